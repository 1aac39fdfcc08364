"""What must be equal for one recorded graph to serve two calls, or two layers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from poros.engine.attention import attention_backends
from poros.engine.prologue import SIDE_OUTPUT, Call

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
    if value is SIDE_OUTPUT:
        return ("side output",)
    raise CannotRecordError(f"a layer is given a {type(value).__name__}")


def call_signature(call: Call) -> Signature:
    """The signature of a layer's arguments, those that don't matter left out."""
    kwargs = {name: value for name, value in call.kwargs.items() if name not in IGNORED_ARGUMENTS}
    return (value_signature(call.args), value_signature(kwargs))


def calls_by_kind(
    kinds: Sequence[str], calls: Sequence[Call], starts: Sequence[int]
) -> dict[str, tuple[Call, Signature]]:
    """How the layers of each kind are called, with the signature of that.

    Args:
        kinds: The layer kind of each layer.
        calls: The arguments of each layer.
        starts: First layer of each block, and the number of layers.

    Raises:
        CannotRecordError: layers that would share a graph are called in different ways.
    """
    by_kind: dict[str, tuple[Call, Signature]] = {}
    seen_objects: set[Signature] = set()
    for kind, call in zip(kinds, calls, strict=True):
        objects = (kind, *call.kwargs, *map(id, (*call.args, *call.kwargs.values())))
        if objects in seen_objects:
            continue
        seen_objects.add(objects)
        signature = call_signature(call)
        if by_kind.setdefault(kind, (call, signature))[1] != signature:
            raise CannotRecordError(f"layers of kind {kind!r} are called in different ways")
    for start, end in pairwise(starts):
        seen: dict[str, list[Tensor]] = {}
        for index in range(start, end) if end - start > 1 else ():
            tensors = tensors_of(calls[index])
            first = seen.setdefault(kinds[index], tensors)
            if any(one is not other for one, other in zip(first, tensors, strict=True)):
                # Both would be copied into the same static arguments before one replay.
                raise CannotRecordError("layers of one kind in a block are given different tensors")
    return by_kind


@dataclass(frozen=True, eq=False)
class LayerSignature:
    """What changes a layer's computation, its frozen tensors apart: adapters, scaling, dropout, mode.

    Layers that are alike have one and the same object, so that signatures can be compared by identity.

    Attributes:
        hook: Name of a module that something hooks into, or None. A graph would not call the hook.
    """

    hook: str | None

    @classmethod
    def of(cls, layer: nn.Module) -> LayerSignature:
        """The signature of a layer as it is now."""
        parts: list[Any] = [type(layer)]
        hook = None
        for name, module in layer.named_modules():
            if isinstance(module, BaseTunerLayer):
                parts.append((name, _tuner_state(module)))
            parts.append((name, type(module), module.training, _dropout(module)))
            parts.extend(
                (name, key, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
                for key, parameter in module._parameters.items()
                if parameter is not None
            )
            if hook is None and _is_hooked(module):
                hook = name or "a layer"
        key = (hook, *parts)
        found = _known.get(key)
        if found is None:
            found = _known[key] = cls(hook)
        return found


_known: weakref.WeakValueDictionary[Signature, LayerSignature] = weakref.WeakValueDictionary()


class LayerWatch:
    """Gives a layer's signature, and walks through the layer only when something about it has changed.

    A signature is wanted at every visit of every block. What can change is therefore read off flat lists, which is some
    ten times as fast as the walk.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        # The lists keep what they hold alive: an object that comes later can't have the same identity.
        self._modules: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []
        self._tuners: list[BaseTunerLayer] = []
        self._dropouts: list[nn.Module] = []
        self._seen: list[Any] | None = None
        self._signature: LayerSignature | None = None
        self._held = self._is_current = False

    def hold(self, held: bool) -> None:
        """Say that nothing changes the layer from now on, so that one look is enough, or that anything may again."""
        self._held, self._is_current = held, False

    def signature(self) -> LayerSignature:
        """The layer's signature as it is now."""
        if self._is_current and self._signature is not None:
            return self._signature
        if self._signature is None or self._look() != self._seen:
            self._modules = list(self._layer.modules())
            self._parameters = list(self._layer.parameters())
            self._tuners = [module for module in self._modules if isinstance(module, BaseTunerLayer)]
            self._dropouts = [module for module in self._modules if _dropout(module) is not None]
            self._signature = LayerSignature.of(self._layer)
            self._seen = self._look()
        self._is_current = self._held
        return self._signature

    def parameters(self) -> list[nn.Parameter]:
        """The layer's parameters as they are now, each once."""
        self.signature()
        return self._parameters

    def _look(self) -> list[Any]:
        modules, parameters = self._modules, self._parameters
        return [
            [id(child) for module in modules for child in module._modules.values()],
            [id(parameter) for module in modules for parameter in module._parameters.values()],
            [module.training for module in modules],
            [parameter.requires_grad for parameter in parameters],
            [parameter.dtype for parameter in parameters],
            [parameter.shape for parameter in parameters],
            [_tuner_state(module) for module in self._tuners],
            [_dropout(module) for module in self._dropouts],
            [_is_hooked(module) for module in modules],
        ]


def _tuner_state(module: BaseTunerLayer) -> Signature:
    return (
        tuple(getattr(module, "scaling", {}).items()),
        tuple(module.active_adapters),
        module.disable_adapters,
        tuple(module.merged_adapters),
    )


def _dropout(module: nn.Module) -> float | None:
    """The probability that a module drops something, if it is of a kind that does."""
    value = module.p if isinstance(module, nn.Dropout) else module.__dict__.get("attention_dropout")
    return None if value is None else float(value)


def _is_hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


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
