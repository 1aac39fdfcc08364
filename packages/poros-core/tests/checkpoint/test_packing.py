"""Slabs: layout, views and refusals."""

from __future__ import annotations

import pytest
import torch

from poros.checkpoint.packing import Packing
from poros.dimensions import ALIGNMENT
from poros.errors import CheckpointError

TENSORS = [
    ("codes", torch.uint8, (33, 1)),
    ("offset", torch.float32, ()),
    ("norm", torch.bfloat16, (7,)),
    ("empty", torch.float32, (0,)),
    ("scales", torch.float32, (3, 5)),
]


def test_fields_are_aligned_and_do_not_overlap() -> None:
    packing = Packing.of(TENSORS)
    end = 0
    for field in packing.fields:
        assert field.offset % ALIGNMENT == 0
        assert field.offset >= end
        end = field.offset + field.nbytes
    assert packing.nbytes % ALIGNMENT == 0
    assert packing.nbytes >= end


@pytest.mark.parametrize("start", [0, 2 * ALIGNMENT])
def test_written_tensors_come_back_as_views(start: int) -> None:
    packing = Packing.of(TENSORS)
    slab = torch.zeros(packing.nbytes, dtype=torch.uint8)
    values = {
        name: torch.randint(0, 255, shape, dtype=dtype) if dtype == torch.uint8 else torch.randn(shape).to(dtype)
        for name, dtype, shape in TENSORS
    }
    for name, tensor in values.items():
        packing.write(slab, name, tensor)
    buffer = torch.zeros(start + packing.nbytes, dtype=torch.uint8)
    buffer[start:].copy_(slab)
    for field, view in zip(packing.fields, packing.views(buffer, start), strict=True):
        assert view.dtype == field.dtype
        assert torch.equal(view, values[field.name])
        assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("norm", torch.zeros(7)),
        ("norm", torch.zeros(8, dtype=torch.bfloat16)),
        ("absent", torch.zeros(7, dtype=torch.bfloat16)),
    ],
)
def test_what_does_not_fit_is_refused(name: str, tensor: torch.Tensor) -> None:
    packing = Packing.of(TENSORS)
    with pytest.raises(CheckpointError, match=name):
        packing.write(torch.zeros(packing.nbytes, dtype=torch.uint8), name, tensor)


def test_equal_tensors_give_equal_packings() -> None:
    assert Packing.of(TENSORS) == Packing.of(TENSORS)
    assert Packing.of(TENSORS) != Packing.of(TENSORS[1:])
