"""The frozen tensors of a live layer: finding each one, and pointing it somewhere else.

A 4-bit weight is six tensors: bitsandbytes keeps the packed codes in the parameter and everything that turns them
back into numbers (scales, nested scales, offset, two code tables) in a `QuantState` beside it. All six travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import bitsandbytes as bnb
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from poros.errors import UnsupportedError

QUANT_STATE_TENSORS = {
    "absmax": ("absmax",),
    "quant_map": ("code",),
    "nested_absmax": ("state2", "absmax"),
    "nested_quant_map": ("state2", "code"),
    "nested_offset": ("offset",),
}
"""Tensors of a nested `QuantState`: the name used in checkpoints -> the attribute path."""


@dataclass(frozen=True)
class FrozenTensor:
    """A place in a live module that holds a frozen tensor.

    The owner is a module, not a path: peft may wrap the module afterwards and the place stays the same.

    Attributes:
        name: Path inside the layer, without the segments that peft adds.
        owner: The module.
        attribute: Name of the parameter or buffer.
        part: Which tensor of a 4-bit weight, a key of `QUANT_STATE_TENSORS`; empty for the tensor itself.
    """

    name: str
    owner: nn.Module
    attribute: str
    part: str = ""

    @property
    def is_four_bit(self) -> bool:
        """Whether it belongs to a 4-bit weight: its codes, or one of the tensors that say what they mean."""
        return bool(self.part) or isinstance(self.owner._parameters.get(self.attribute), bnb.nn.Params4bit)

    def get(self) -> Tensor:
        """The tensor that is there now."""
        if self.part:
            holder, last = self._holder()
            tensor: Tensor = getattr(holder, last)
            return tensor
        parameter = self.owner._parameters.get(self.attribute)
        if parameter is not None:
            return parameter.data
        buffer = self.owner._buffers[self.attribute]
        assert buffer is not None
        return buffer

    def set(self, tensor: Tensor) -> None:
        """Point the place at another tensor of the same dtype and shape; nothing is copied."""
        if self.part:
            holder, last = self._holder()
            setattr(holder, last, tensor)
            return
        parameter = self.owner._parameters.get(self.attribute)
        if parameter is not None:
            parameter.data = tensor
        else:
            self.owner._buffers[self.attribute] = tensor

    def _holder(self) -> tuple[Any, str]:
        return _find(self.owner._parameters[self.attribute].quant_state, self.part)  # type: ignore[union-attr]


def _find(state: Any, part: str) -> tuple[Any, str]:
    """The object that holds a tensor of a quant state, and the attribute's name."""
    *path, last = QUANT_STATE_TENSORS[part]
    for step in path:
        state = getattr(state, step)
    return state, last


def state_tensors(state: Any) -> dict[str, Tensor]:
    """The tensors of a nested quant state, by the names used in checkpoints."""
    return {part: getattr(*_find(state, part)) for part in QUANT_STATE_TENSORS}


def frozen_tensors(layer: nn.Module) -> list[FrozenTensor]:
    """Every frozen tensor of a decoder layer, in a fixed order. Adapters are not among them.

    Raises:
        UnsupportedError: a base parameter requires a gradient, is quantised in a way that doesn't stream, or two
            places share one tensor.
    """
    found = list(_walk(layer, ""))
    seen: dict[int, str] = {}
    for place in found:
        if place.part or place.attribute not in place.owner._parameters:
            continue
        key = id(place.owner._parameters[place.attribute])
        if key in seen:
            raise UnsupportedError(
                f"{place.name} and {seen[key]} are one tensor; a layer with tied weights can't stream"
            )
        seen[key] = place.name
    return found


def _walk(module: nn.Module, prefix: str) -> Iterator[FrozenTensor]:
    if isinstance(module, BaseTunerLayer):
        # The base layer keeps the name it had before peft wrapped it.
        yield from _walk(module.get_base_layer(), prefix)
        return
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        path = f"{prefix}{name}"
        if parameter.requires_grad:
            raise UnsupportedError(
                f"the base parameter {path} of a decoder layer requires a gradient",
                "Poros trains LoRA adapters; leave biases, norms and weights of the base frozen",
            )
        yield FrozenTensor(path, module, name)
        if isinstance(parameter, bnb.nn.Params4bit):
            yield from _walk_quant_state(parameter, path, module, name)
        elif isinstance(parameter, bnb.nn.Int8Params):
            raise UnsupportedError(f"{path} is in 8 bit", "Poros streams NF4 bases; load the model in 4 bit")
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield FrozenTensor(f"{prefix}{name}", module, name)
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{prefix}{name}.")


def _walk_quant_state(parameter: bnb.nn.Params4bit, path: str, module: nn.Module, name: str) -> Iterator[FrozenTensor]:
    state = parameter.quant_state
    if state is None:
        raise UnsupportedError(f"{path} is a 4-bit weight that was never quantised", "load the checkpoint completely")
    if getattr(state, "packing_format_for_cpu", False):
        raise UnsupportedError(
            f"{path} was repacked by bitsandbytes for CPU inference",
            "attach before the model is used in eval mode, or use poros.load",
        )
    if state.quant_type != "nf4" or not state.nested:
        kind = state.quant_type + (" with" if state.nested else " without") + " double quantisation"
        raise UnsupportedError(
            f"{path} is quantised as {kind}",
            "use bnb_4bit_quant_type='nf4' and bnb_4bit_use_double_quant=True",
        )
    for part in QUANT_STATE_TENSORS:
        yield FrozenTensor(f"{path}.{part}", module, name, part)


def packed_layout(
    shape: tuple[int, ...], storage: torch.dtype = torch.uint8
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtypes and shapes of the six tensors of a nested NF4 weight, block size 64 and 256, as bitsandbytes lays it out.

    Args:
        shape: (out, in) of the weight.
        storage: dtype in which the packed codes are kept.

    Returns:
        Part -> (dtype, shape); the packed codes under the empty name. An odd number of elements is padded to a byte.
    """
    elements = shape[0] * shape[1]
    scales = -(-elements // 64)
    codes = -(-elements // 2)
    return {
        "": (storage, (-(-codes // storage.itemsize), 1)),
        "absmax": (torch.uint8, (scales,)),
        "quant_map": (torch.float32, (16,)),
        "nested_absmax": (torch.float32, (-(-scales // 256),)),
        "nested_quant_map": (torch.float32, (256,)),
        "nested_offset": (torch.float32, ()),
    }
