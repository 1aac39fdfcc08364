"""What is known of a run's batches before it begins: by it memory is planned, and by it graphs are counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchShapes:
    """The shapes of a run's batches.

    Attributes:
        longest: Tokens of the longest row, padding included.
        padded: Whether any row may be padded, for which layers are given masks.
        number: Shapes: rows and lengths, with a mask or without.
    """

    longest: int
    padded: bool
    number: int


def batch_shapes(lengths: Sequence[int], batch_size: int, multiple: int) -> BatchShapes:
    """The shapes that the batches of an epoch may have, whatever their order.

    Args:
        lengths: Tokens of each row.
        batch_size: Rows of a batch. What is left of them is a batch of its own.
        multiple: Rows are padded to the longest of their batch, and that to a multiple of so many tokens.
    """
    widths = {length: -(-length // multiple) * multiple for length in set(lengths)}
    if batch_size == 1:
        masked = {(width, length < width) for length, width in widths.items()}
        return BatchShapes(max(widths.values()), any(mask for _, mask in masked), len(masked))
    padded = len(widths) > 1 or any(length < width for length, width in widths.items())
    left_over = len(lengths) % batch_size > 0
    return BatchShapes(max(widths.values()), padded, len(set(widths.values())) * (1 + padded) + left_over)
