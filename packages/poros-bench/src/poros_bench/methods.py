"""Methods: the ways to train that are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from pydantic import Field

from poros.config import Part, StreamConfig


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to train.

    Attributes:
        name: As it appears in receipts ("poros", "resident").
        description: One line for people.
        missing: Returns what it needs and what isn't there: packages, a GPU.
        entry: "module:function", imported in the cell's own process only. The function is given a `Cell` and returns a
            `Trainee` (both in `poros_bench.cell`).
        takes_budget: Whether it can be given a budget of GPU memory.
        first: A module that must be imported before torch and transformers, which it changes.
        options: What can be set with `options`; None: nothing.
        distribution: The package whose version decides, beside the stack's, what is measured.
    """

    name: str
    description: str
    missing: Callable[[], Sequence[str]]
    entry: str
    takes_budget: bool = False
    first: str | None = None
    options: type[Part] | None = None
    distribution: str | None = None


def needs(*modules: str) -> Callable[[], Sequence[str]]:
    """A `Method.missing` that looks for modules without importing them."""
    return lambda: tuple(module for module in modules if find_spec(module) is None)


STOCK = ("torch", "transformers", "peft", "bitsandbytes")

POROS = Method(
    name="poros",
    description="Poros: the frozen base streams, bit-identical to resident",
    missing=needs(*STOCK),
    entry="poros_bench.ways:poros",
    takes_budget=True,
    options=StreamConfig,
)
RESIDENT = Method(
    name="resident",
    description="stock transformers + peft + bitsandbytes, everything on the device",
    missing=needs(*STOCK),
    entry="poros_bench.ways:resident",
)
CHECKPOINTING = Method(
    name="resident-checkpointing",
    description="stock with gradient checkpointing",
    missing=needs(*STOCK),
    entry="poros_bench.ways:resident_checkpointing",
)
UNSLOTH = Method(
    name="unsloth",
    description="unsloth: its own loader, layers and gradient checkpointing",
    missing=needs("unsloth"),
    entry="poros_bench.ways:unsloth",
    first="unsloth",
    distribution="unsloth",
)


class SoupOptions(Part):
    """What can be set for Soup; the defaults are its own, but for the dtype of the adapters."""

    buffers: int = Field(2, ge=2, le=8, description="layers on the device at a time")
    scale_cache: bool = Field(False, description="keep the expanded scales of every weight on the device")
    recompute: bool = Field(True, description="run a layer's forward again in the backward pass")
    adapters: Literal["float32", "bfloat16"] = Field("float32", description="its own trainer casts them to bfloat16")


SOUP = Method(
    name="soup",
    description="Soup: another trainer that streams layers, in an environment of its own",
    missing=needs("soup_cli"),
    entry="poros_bench.soup:soup",
    options=SoupOptions,
    distribution="soup-cli",
)
