"""The Qwen3 family."""

from __future__ import annotations

from poros.testing.conformance import ArchitectureConformance
from poros_arch_qwen.qwen3 import QWEN3


class TestQwen3(ArchitectureConformance):
    architecture = QWEN3
