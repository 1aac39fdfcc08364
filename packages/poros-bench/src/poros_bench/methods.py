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
        missing: Returns the packages that it needs and that aren't installed.
    """

    name: str
    description: str
    missing: Callable[[], Sequence[str]]


def needs(*modules: str) -> Callable[[], Sequence[str]]:
    """A `Method.missing` that looks for modules without importing them."""
    return lambda: tuple(module for module in modules if find_spec(module) is None)


POROS = Method(
    name="poros",
    description="Poros: the frozen base streams, bit-identical to resident",
    missing=needs("torch", "transformers", "peft", "bitsandbytes"),
)
RESIDENT = Method(
    name="resident",
    description="stock transformers + peft + bitsandbytes, everything on the device",
    missing=needs("torch", "transformers", "peft", "bitsandbytes"),
)
