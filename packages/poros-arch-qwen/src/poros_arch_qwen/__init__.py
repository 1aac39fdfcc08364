"""The Qwen families for Poros."""

from __future__ import annotations

from collections.abc import Sequence

from poros import Architecture, hookimpl
from poros_arch_qwen.qwen2 import QWEN2
from poros_arch_qwen.qwen3 import QWEN3

__version__ = "0.1.0"


@hookimpl
def poros_architectures() -> Sequence[Architecture]:
    """Every family of this package."""
    return (QWEN2, QWEN3)
