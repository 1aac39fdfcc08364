"""The Llama 3 family for Poros."""

from __future__ import annotations

from collections.abc import Sequence

from poros import Architecture, hookimpl
from poros_arch_llama.llama import LLAMA

__version__ = "0.1.0"


@hookimpl
def poros_architectures() -> Sequence[Architecture]:
    """Every family of this package."""
    return (LLAMA,)
