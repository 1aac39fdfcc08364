"""What must be equal for one recorded graph to serve two calls, or two layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from poros.engine.attention import attention_backends
from poros.engine.prologue import Call

Signature = tuple[Any, ...]

IGNORED_ARGUMENTS = frozenset({"num_items_in_batch"})
"""Arguments that pass through a layer without changing what it computes, and that differ from step to step."""


class CannotRecordError(Exception):
    """An argument of a layer is of a kind that a graph can't hold."""


def switches_signature(device: torch.device) -> Signature:
    """torch's switches that decide which kernels an operation becomes: autocast, determinism, attention backends."""
    products = torch.backends.cuda.matmul
    return (
        torch.is_autocast_enabled(device.type),
        torch.get_autocast_dtype(device.type),
        torch.are_deterministic_algorithms_enabled(),
        attention_backends(),
        products.allow_tf32,
        products.allow_bf16_reduced_precision_reduction,
        products.allow_fp16_reduced_precision_reduction,
    )


def value_signature(value: Any) -> Signature:
    """Everything about an argument but the contents of its tensors.

    Raises:
        CannotRecordError: it is an object with a state of its own (a cache, say).
    """
    if isinstance(value, Tensor):
        return ("tensor", tuple(value.shape), value.dtype, value.device)
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(value_signature, value))
    if isinstance(value, dict):
        return ("dict", *((key, value_signature(item)) for key, item in value.items()))
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return ("value", type(value), value)
    raise CannotRecordError(f"a layer is given a {type(value).__name__}")


def call_signature(call: Call) -> Signature:
    """The signature of a layer's arguments, those that don't matter left out."""
    kwargs = {name: value for name, value in call.kwargs.items() if name not in IGNORED_ARGUMENTS}
    return (value_signature(call.args), value_signature(kwargs))


def layer_signature(layer: nn.Module) -> Signature:
    """What changes a layer's computation, its frozen tensors apart: adapters, scaling, dropout, mode."""
    parts: list[Any] = [type(layer), layer.training]
    for name, module in layer.named_modules():
        if isinstance(module, BaseTunerLayer):
            parts.append(
                (
                    name,
                    tuple(getattr(module, "scaling", {}).items()),
                    tuple(module.active_adapters),
                    module.disable_adapters,
                    tuple(module.merged_adapters),
                )
            )
        elif isinstance(module, nn.Dropout):
            parts.append((name, module.p))
        parts.append((name, module.training, getattr(module, "attention_dropout", None)))
        parts.extend(
            (name, key, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
            for key, parameter in module._parameters.items()
            if parameter is not None
        )
    return tuple(parts)


def check_no_hooks(layer: nn.Module) -> None:
    """Refuse to record a layer that something hooks into: a graph would not call it.

    Raises:
        CannotRecordError: naming the module.
    """
    for name, module in layer.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            raise CannotRecordError(f"a hook is registered on {name or 'a layer'}, and a graph would not call it")


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same nest of tuples, lists and dicts with each tensor replaced."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(item, function) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    return value


def tensors_of(call: Call) -> list[Tensor]:
    """The tensors among a layer's arguments that matter, in the order in which `map_tensors` meets them."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(call.args, note)
    map_tensors({name: value for name, value in call.kwargs.items() if name not in IGNORED_ARGUMENTS}, note)
    return found
