"""Static memory that graphs of many shapes share."""

from __future__ import annotations

import pytest
import torch

from poros.engine.statics import Statics


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(2, 3, 4), (5,), (), (0, 3)])
def test_a_tensor_in_a_place(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    wanted = torch.ones(shape, dtype=dtype)
    made = Statics().like(("x",), wanted)
    assert (made.shape, made.dtype, made.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
    assert not made.any()
    made.copy_(wanted)
    assert torch.equal(made, wanted)


def test_strides_are_kept_unless_they_leave_holes() -> None:
    statics = Statics()
    turned = torch.arange(6.0).view(2, 3).t()
    assert statics.like(("x",), turned).stride() == turned.stride()
    assert statics.like(("x",), torch.ones(1, 4).expand(3, 4)).stride() == (4, 1)


def test_smaller_tensors_use_the_beginning_of_the_same_memory() -> None:
    statics = Statics()
    large, other = torch.zeros(8), torch.zeros(8)
    first = statics.like(("x",), large)
    assert statics.like(("x",), torch.zeros(3, dtype=torch.bfloat16)).data_ptr() == first.data_ptr()
    assert statics.like(("y",), other).data_ptr() != first.data_ptr()
    assert statics.nbytes == 2 * 32


def test_a_larger_tensor_gets_another_place_and_the_old_one_lives_on() -> None:
    statics = Statics()
    old = statics.place(("x",), torch.zeros(2))
    old.holds = (torch.zeros(2), 0)
    view = old.like(torch.zeros(2)).fill_(1)
    new = statics.place(("x",), torch.zeros(9))
    assert new is not old
    assert new.holds is None
    assert view.tolist() == [1, 1]
    assert statics.place(("x",), torch.zeros(2)) is new
    statics.forget()
    assert statics.nbytes == 0


@pytest.mark.parametrize("exact", [False, True])
def test_places_that_grow(exact: bool) -> None:
    """Where rows get longer and longer, few places are left behind, unless there is no room for more than is asked."""
    statics = Statics(exact)
    made = {id(place): place for size in range(1, 101) for place in [statics.place(("x",), torch.zeros(size))]}
    assert len(made) == (100 if exact else 8)
    assert statics.nbytes == 4 * (100 if exact else 128)
    assert statics.outgrown
