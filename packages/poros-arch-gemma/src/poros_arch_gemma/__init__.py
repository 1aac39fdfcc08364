"""The Gemma families for Poros."""

from __future__ import annotations

from collections.abc import Sequence

from poros import Architecture, hookimpl
from poros_arch_gemma.gemma3 import GEMMA3, GEMMA3_MULTIMODAL
from poros_arch_gemma.gemma4 import GEMMA4, GEMMA4_MULTIMODAL

__version__ = "0.1.0"


@hookimpl
def poros_architectures() -> Sequence[Architecture]:
    """Every family of this package."""
    return (GEMMA3, GEMMA3_MULTIMODAL, GEMMA4, GEMMA4_MULTIMODAL)
