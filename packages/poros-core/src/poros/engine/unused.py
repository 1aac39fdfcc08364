"""Products whose value a recompute needn't form.

A block is run again only to be differentiated, and the gradient of `a + W x` needs neither `a` nor `W x`. So where a
decoder layer ends in a residual connection, the product of its last linear layer, a large one, is computed for nothing.
Which values nobody uses is tried, not derived: the layer gives NaN instead, and if every gradient still has the same
bits as before, none of them depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from poros.engine.kernels.linear import FusedLinear4bit
from poros.engine.replay import Results


def unused_values(
    layers: Sequence[FusedLinear4bit],
    differentiate: Callable[[Sequence[FusedLinear4bit]], Results],
    likely: Sequence[FusedLinear4bit] | None = None,
) -> Sequence[FusedLinear4bit]:
    """The layers among `layers` on whose value no gradient depends.

    Args:
        layers: Candidates.
        differentiate: Runs the block again and differentiates it, each time from the same random state, with the given
            layers giving NaN.
    """
    right = differentiate([])
    if not all(tensor is None or bool(torch.isfinite(tensor).all()) for tensor in right):
        return []  # NaN is equal to nothing
    if likely is not None and (not likely or _same(differentiate(likely), right)):
        return likely
    found = [layer for layer in layers if _same(differentiate([layer]), right)]
    return found if _same(differentiate(found), right) else []


def _same(some: Results, others: Results) -> bool:
    return all(
        (one is None and other is None) or (one is not None and other is not None and torch.equal(one, other))
        for one, other in zip(some, others, strict=True)
    )


@contextmanager
def skipping(layers: Sequence[FusedLinear4bit], how: Literal["nan", "empty"]) -> Iterator[None]:
    """Let layers give something else than their product for a while."""
    for layer in layers:
        layer.skip = how
    try:
        yield
    finally:
        for layer in layers:
            layer.skip = ""
