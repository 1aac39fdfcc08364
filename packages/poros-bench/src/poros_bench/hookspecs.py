"""The hook that poros-bench adds to Poros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from poros_bench.methods import Method

hookspec = pluggy.HookspecMarker("poros")


@hookspec
def poros_bench_methods() -> Sequence[Method]:
    """Contribute ways to train, to be benchmarked against each other.

    When: once, when a benchmark or `poros bench methods` starts.
    Receives: nothing.
    Return: a sequence of `Method` values with distinct names.
    Don't: import what a method needs; say in `missing` what is absent, without importing it.
    """
    raise AssertionError("a hook specification is never called")
