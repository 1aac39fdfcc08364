"""Methods: the ways to train that are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec


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
    """

    name: str
    description: str
    missing: Callable[[], Sequence[str]]
    entry: str
    takes_budget: bool = False
    first: str | None = None


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
)
