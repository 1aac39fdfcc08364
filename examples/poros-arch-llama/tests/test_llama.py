"""The Llama family."""

from __future__ import annotations

from poros_arch_llama.llama import LLAMA

from poros.testing.conformance import ArchitectureConformance


class TestLlama(ArchitectureConformance):
    architecture = LLAMA
