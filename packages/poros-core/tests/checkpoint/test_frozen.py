"""Finding every frozen tensor of a live layer."""

from __future__ import annotations

import bitsandbytes as bnb
import pytest
import torch
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from torch import nn

from poros.checkpoint.frozen import QUANT_STATE_TENSORS, frozen_tensors, packed_layout
from poros.errors import UnsupportedError


def four_bit(out: int, inner: int, bias: bool = True, **options: object) -> bnb.nn.Linear4bit:
    options = {"quant_type": "nf4", "compress_statistics": True, **options}
    layer = bnb.nn.Linear4bit(inner, out, bias=bias, compute_dtype=torch.bfloat16, **options)
    weight = torch.randn(out, inner, dtype=torch.bfloat16)
    layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, **options).to("cpu")
    return layer.requires_grad_(False)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = four_bit(64, 128)
        self.norm = nn.LayerNorm(64).requires_grad_(False)
        self.register_buffer("scalar", torch.ones(1))
        self.register_buffer("table", torch.ones(4), persistent=False)


NAMES = [
    "scalar",
    "proj.weight",
    *(f"proj.weight.{part}" for part in QUANT_STATE_TENSORS),
    "proj.bias",
    "norm.weight",
    "norm.bias",
]


def test_everything_that_is_frozen_is_found() -> None:
    assert [place.name for place in frozen_tensors(Layer())] == NAMES


def test_every_tensor_of_a_quant_state_is_found() -> None:
    """Case O-08: walk the QuantState itself, so that a tensor that bitsandbytes adds one day fails here."""
    state = four_bit(64, 64).weight.quant_state
    reachable = {
        (path, name)
        for path, holder in (("", state), ("state2", state.state2))
        for name, value in vars(holder).items()
        if isinstance(value, torch.Tensor)
    }
    known = {("state2" if len(path) == 2 else "", path[-1]) for path in QUANT_STATE_TENSORS.values()}
    assert reachable == known


def test_peft_changes_neither_names_nor_places() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()
            self.is_loaded_in_4bit = True

    model = Model()
    before = frozen_tensors(model.layer)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["proj"]))
    after = frozen_tensors(wrapped.base_model.model.layer)
    assert [place.name for place in after] == NAMES
    assert [place.owner for place in after] == [place.owner for place in before]


def test_a_place_can_be_pointed_elsewhere() -> None:
    for place in frozen_tensors(Layer()):
        other = place.get().clone()
        place.set(other)
        assert place.get().data_ptr() == other.data_ptr()


@pytest.mark.parametrize("shape", [(64, 64), (33, 65), (5, 7), (96, 40), (1, 64), (257, 129)])
def test_layout_is_what_bitsandbytes_makes(shape: tuple[int, int]) -> None:
    """Odd sizes and partial blocks included (case O-09)."""
    if shape[0] * shape[1] % 2 and Version(bnb.__version__) < Version("0.50"):
        pytest.xfail("bitsandbytes before 0.50 can't quantise an odd number of elements on a CPU")
    weight = four_bit(*shape, bias=False).weight
    layout = packed_layout(shape)
    assert (weight.data.dtype, tuple(weight.data.shape)) == layout[""]
    for part, path in QUANT_STATE_TENSORS.items():
        tensor = weight.quant_state
        for step in path:
            tensor = getattr(tensor, step)
        assert (tensor.dtype, tuple(tensor.shape)) == layout[part], part


def trains_a_bias() -> nn.Module:
    layer = Layer()
    layer.proj.bias.requires_grad_(True)
    return layer


def shares_a_weight() -> nn.Module:
    layer = Layer()
    layer.other = nn.Module()
    layer.other.weight = layer.norm.weight
    return layer


def in_eight_bit() -> nn.Module:
    layer = Layer()
    layer.other = nn.Module()
    layer.other.weight = bnb.nn.Int8Params(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    return layer


def with_linear(**options: object) -> nn.Module:
    layer = Layer()
    layer.proj = four_bit(64, 64, **options)
    return layer


def never_quantised() -> nn.Module:
    layer = Layer()
    layer.proj = bnb.nn.Linear4bit(64, 64, quant_type="nf4").requires_grad_(False)
    return layer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (trains_a_bias, "proj.bias of a decoder layer requires a gradient"),
        (shares_a_weight, "are one tensor"),
        (in_eight_bit, "8 bit"),
        (lambda: with_linear(quant_type="fp4"), "fp4 with double quantisation"),
        (lambda: with_linear(compress_statistics=False), "nf4 without double quantisation"),
        (never_quantised, "never quantised"),
    ],
)
def test_what_can_not_stream_is_refused_by_name(make: object, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        frozen_tensors(make())  # type: ignore[operator]
