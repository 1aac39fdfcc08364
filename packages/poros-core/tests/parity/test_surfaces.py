"""The comparison itself: it must be able to fail, and must refuse to compare nothing."""

from __future__ import annotations

import math

import pytest
import torch

from poros.errors import PorosError
from poros.parity.surfaces import LAYER_OUTPUTS, SURFACES, Trace, compare

BLOCKS = [(0, 1), (2, 3), (4,)]


def trace(**changes: torch.Tensor) -> Trace:
    """Two steps of a made-up run; a change replaces the tensor of that name."""
    made = Trace()
    for step in (1, 2):
        for layer in range(5):
            for surface in ("gradients", "adapters"):
                name = f"model.layers.{layer}.q_proj.lora_A.weight"
                made.record(
                    surface, step, name, changes.get(f"{surface}{step}{layer}", torch.full((2, 3), float(layer)))
                )
        made.record("loss", step, "micro-batch 1", changes.get(f"loss{step}", torch.tensor(2.0)))
        made.record("gradient_norm", step, "norm", torch.tensor(1.0))
    for layer in range(5):
        made.record(LAYER_OUTPUTS, 1, f"layer {layer}", changes.get(f"out{layer}", torch.ones(2)), layer=layer)
    made.record("logits", 1, "logits", changes.get("logits", torch.ones(4)))
    made.record("optimizer_state", 2, "exp_avg", torch.ones(2))
    made.record("rng_state", 2, "cpu", changes.get("rng", torch.zeros(8, dtype=torch.uint8)))
    return made


def test_equal_traces_are_identical() -> None:
    result = compare(trace(), trace(), BLOCKS)
    assert result.identical
    assert result.surfaces == dict.fromkeys(SURFACES, True)
    assert result.compared == 2 * (5 * 2 + 2) + 3
    assert result.first_block is None


@pytest.mark.parametrize(
    ("changes", "surface", "step", "block"),
    [
        ({"logits": torch.tensor([1.0, 1.0, 1.0, 1.0001])}, "logits", 1, None),
        ({"loss2": torch.tensor(2.0001)}, "loss", 2, None),
        ({"gradients12": torch.zeros(2, 3)}, "gradients", 1, 1),
        # backward meets the last layer first, so that is where the trouble began
        ({"gradients11": torch.zeros(2, 3), "gradients13": torch.zeros(2, 3)}, "gradients", 1, 1),
        ({"gradients10": torch.zeros(2, 3), "gradients14": torch.zeros(2, 3)}, "gradients", 1, 2),
        ({"adapters24": torch.zeros(2, 3), "gradients24": torch.zeros(2, 3)}, "gradients", 2, 2),
        ({"rng": torch.ones(8, dtype=torch.uint8)}, "rng_state", 2, None),
    ],
)
def test_the_first_difference_is_named(
    changes: dict[str, torch.Tensor], surface: str, step: int, block: int | None
) -> None:
    result = compare(trace(), trace(**changes), BLOCKS)
    assert not result.identical
    assert result.difference is not None
    assert (result.difference.key.surface, result.difference.key.step, result.difference.block) == (
        surface,
        step,
        block,
    )
    assert result.surfaces[surface] is False
    assert surface in str(result.difference)


def test_one_unit_in_the_last_place_is_a_difference() -> None:
    value = torch.tensor(2.0)
    result = compare(trace(), trace(loss1=torch.nextafter(value, torch.tensor(3.0))), BLOCKS)
    assert result.surfaces["loss"] is False


def test_another_dtype_or_a_nan_is_a_difference() -> None:
    assert not compare(trace(), trace(loss1=torch.tensor(2.0, dtype=torch.float64)), BLOCKS).identical
    nan = torch.tensor(math.nan)
    assert not compare(trace(loss1=nan), trace(loss1=nan), BLOCKS).identical


def test_the_first_block_is_the_first_whose_output_differs() -> None:
    result = compare(trace(), trace(out3=torch.zeros(2), out4=torch.zeros(2), logits=torch.zeros(4)), BLOCKS)
    assert result.first_block == 1


@pytest.mark.parametrize("surface", SURFACES)
def test_comparing_nothing_is_an_error(surface: str) -> None:
    """Case: the gate that compared 0 of 0 gradients and passed."""
    empty = trace()
    empty.tensors = {key: tensor for key, tensor in empty.tensors.items() if key.surface != surface}
    for one, other in ((empty, empty), (trace(), empty), (empty, trace())):
        with pytest.raises(PorosError, match=f"can't compare {surface}"):
            compare(one, other, BLOCKS)


def test_comparing_other_names_is_an_error() -> None:
    """Case: an empty intersection of names compares as equal."""
    other = trace()
    key = next(key for key in other.tensors if key.surface == "gradients")
    tensor = other.tensors.pop(key)
    other.record("gradients", 1, "base_model.wrapped.layers.0.q_proj", tensor)
    with pytest.raises(PorosError, match="can't compare gradients"):
        compare(trace(), other, BLOCKS)


def test_recording_twice_is_an_error() -> None:
    made = trace()
    with pytest.raises(PorosError, match="twice"):
        made.record("loss", 1, "micro-batch 1", torch.tensor(1.0))
