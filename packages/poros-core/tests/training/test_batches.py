"""What is known of a run's batches before it begins."""

from __future__ import annotations

import itertools
import random

import pytest

from poros.training.batches import BatchShapes, batch_shapes


@pytest.mark.parametrize(
    ("lengths", "batch_size", "expected"),
    [
        ([16, 16], 1, BatchShapes(16, False, 1)),
        ([16, 15], 1, BatchShapes(16, True, 2)),
        ([16, 24], 1, BatchShapes(24, False, 2)),
        ([3, 9, 10, 64], 1, BatchShapes(64, True, 3)),
        ([16, 16, 16, 16], 4, BatchShapes(16, False, 1)),
        ([16, 16], 4, BatchShapes(16, False, 2)),
        ([16, 24], 2, BatchShapes(24, True, 4)),
        ([16, 15], 2, BatchShapes(16, True, 2)),
        ([3, 3, 3], 2, BatchShapes(8, True, 3)),
    ],
)
def test_the_shapes_of_a_run(lengths: list[int], batch_size: int, expected: BatchShapes) -> None:
    assert batch_shapes(lengths, batch_size, 8) == expected


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_no_epoch_has_more_shapes(batch_size: int) -> None:
    """Of rows in any order: (rows, length, whether any is padded) of every batch."""
    draw = random.Random(0)
    for _ in range(40):
        lengths = [draw.randint(1, 40) for _ in range(draw.randint(1, 9))]
        if draw.random() < 0.3:
            lengths = [draw.choice((8, 16)) for _ in lengths]
        known = batch_shapes(lengths, batch_size, 8)
        for order in itertools.islice(itertools.permutations(lengths), 0, None, 97):
            batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
            widths = [-(-max(rows) // 8) * 8 for rows in batches]
            seen = {(len(rows), width, min(rows) < width) for rows, width in zip(batches, widths, strict=True)}
            assert len(seen) <= known.number
            assert max(widths) == known.longest
            assert known.padded or not any(masked for _, _, masked in seen)
