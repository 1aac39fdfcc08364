"""What a streamed model has allocated on its device, by the components of a plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn

from poros.architecture import Architecture
from poros.engine.engine import engine_of
from poros.engine.graphs import GraphExecutor
from poros.engine.parts import causal_lm


def allocated_components(model: Any, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
    """Component -> bytes of what stays on the device; what comes and goes within a step is not in it.

    Args:
        model: A streamed model.
        optimizer: Its optimizer, if there is one.
    """
    engine, base = engine_of(model), causal_lm(model)
    family = engine.architecture
    decoder = base.get_submodule(family.decoder)
    inside = f"{family.decoder}.{family.layers}."
    tables = [module.weight for module in _outside(decoder, f"{family.layers}.") if isinstance(module, nn.Embedding)]
    head = base.get_submodule(family.head)._parameters["weight"]
    towers = towers_of(base, family)
    others = [
        tensor
        for module in _outside(base, inside)
        if all(module is not tower for tower in towers)
        for tensor in _tensors(module)
        if all(tensor is not known for known in (*tables, head))
    ]
    slots = sum(slot.buffer.numel() for slot in engine.streamer.slots)
    restored = engine.executor.buffers.nbytes if isinstance(engine.executor, GraphExecutor) else 0
    of_head = 0 if any(head is table for table in tables) else _bytes([head])
    if engine.arena is not None:
        of_head = max(0, engine.arena.buffer.numel() - slots - restored)
    moments = [
        value
        for state in (optimizer.state.values() if optimizer is not None else ())
        for name, value in state.items()
        if isinstance(value, Tensor) and name != "step" and optimizer is not None
    ]
    return {
        "slots": slots,
        "restored weights": restored,
        "resident blocks": sum(slot.buffer.numel() for slot in engine.streamer.homes.values()),
        "embedding": _bytes(tables),
        "head": of_head,
        "outside the layers": _bytes(others),
        "towers": bytes_on(engine.device, towers),
        "adapters": _bytes(parameter for parameter in model.parameters() if parameter.requires_grad),
        "moments": 0 if engine.config.optimizer == "host" else _bytes(moments),
    }


def towers_of(base: nn.Module, family: Architecture) -> list[nn.Module]:
    """Every module of the parts that text never reaches. `poros.load` leaves them out; a model that is attached may
    have them, and they stay where they are."""
    paths = tuple(f"{path}." for path in family.absent)
    return [module for path, module in base.named_modules() if f"{path}.".startswith(paths)]


def bytes_on(device: torch.device, modules: Iterable[nn.Module]) -> int:
    """Bytes on a device of the tensors that modules hold themselves."""
    return _bytes(tensor for module in modules for tensor in _tensors(module) if tensor.device == device)


def plan_record(model: Any, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any] | None:
    """What was predicted, and beside it what stays on the device, for a receipt; None if nothing was planned."""
    plan = engine_of(model).plan
    if plan is None:
        return None
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate puts one of its own around it
    found = allocated_components(model, inner)
    return {**plan.to_json(), "measured_components": {name: size / 1e9 for name, size in found.items() if size}}


def _outside(module: nn.Module, layers: str) -> list[nn.Module]:
    """Every module inside another one, but for the layers."""
    return [child for path, child in module.named_modules() if not f"{path}.".startswith(layers)]


def _tensors(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers of a module itself; of a 4-bit weight all its tensors."""
    found = [buffer for buffer in module._buffers.values() if buffer is not None]
    for parameter in module._parameters.values():
        if isinstance(parameter, bnb.nn.Params4bit):
            found += [parameter.data, *_tensors_of_state(parameter.quant_state)]
        elif parameter is not None:
            found.append(parameter)
    return found


def _tensors_of_state(state: Any) -> list[Tensor]:
    """Nested or not: only those of the layers are known to be."""
    if state is None:
        return []
    return [one for one in vars(state).values() if isinstance(one, Tensor)] + _tensors_of_state(state.state2)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind tensors; a placeholder has that of one element."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
