"""A budget of GPU memory: what the machine has, the plan that keeps to it, and the limit that holds the run to it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch

from poros.architecture import Architecture
from poros.config import LEAST, LoraPart, StreamConfig, parse_size
from poros.dimensions import Values
from poros.errors import BudgetError, ConfigError
from poros.plan.cards import CARDS, Card, card_named
from poros.plan.fit import dimensions_of, fit, fixed_settings, make_job
from poros.plan.memory import outside_torch
from poros.plan.search import Plan, smallest_plan
from poros.provenance import host_ram_bytes
from poros.store.tiers import make_store

MARGIN = 0.02
"""Part of the free memory that `auto` leaves to others."""

OWN_LOOP = frozenset({"optimizer", "gradients", "head"})
"""What a plan leaves alone where loop and loss are the caller's: a fused loss may read the head's weight itself."""

PROBE_BYTES = 256_000_000
"""Size of the copies by which the link is measured."""


def planned(
    stream: StreamConfig,
    architecture: Architecture,
    values: Values,
    lora: LoraPart,
    *,
    tokens: int | None = None,
    rows: int = 1,
    padded: bool = False,
    shapes: int | None = None,
    micro_batches: int = 1,
    num_layers: int | None = None,
    device: torch.device,
    fixed: frozenset[str] = frozenset(),
    towers: int = 0,
) -> Plan | None:
    """The plan for a budget; None if the settings name none.

    Args:
        stream: The settings; those that were made hold.
        architecture: The family.
        values: Of the model's `config.json`.
        lora: The adapters.
        tokens: Of a micro-batch, padding included, if the settings don't say.
        rows: Rows of a micro-batch.
        padded: Whether rows may be padded.
        shapes: Batch shapes that micro-batches may have; see `make_job`.
        micro_batches: Per optimizer step.
        num_layers: Of a model that is cut to its first layers.
        device: Where.
        fixed: Further settings that hold.
        towers: Bytes on the device of parts that text never reaches, in a model that is there already.

    Raises:
        BudgetError: nothing fits.
        ConfigError: nobody says how many tokens there will be.
    """
    if stream.vram is None:
        return None
    tokens = max(filter(None, (stream.tokens, tokens)), default=None)
    if tokens is None:
        raise ConfigError(
            "vram is given, but not the tokens of a micro-batch, on which memory depends",
            "give `tokens`: rows at a time, times the longest row",
        )
    host = host_bytes_free()
    budget = None if stream.vram == LEAST else budget_bytes(stream.vram, device)
    card = card_of(device)
    dimensions = dimensions_of(architecture, values)
    dimensions = dataclasses.replace(dimensions, layers=dimensions.layers[:num_layers])
    graphs = device.type == "cuda"
    job = make_job(dimensions, lora, tokens, micro_batches, stream, graphs, rows, padded, shapes, towers)
    if budget is None:
        budget = smallest_plan(job, card, stream, fixed | fixed_settings(stream), host).device_bytes
    return fit(job, card, budget, stream, host, fixed)


def card_of(device: torch.device) -> Card:
    """The card of a device, its link measured; on a CPU one that is like none, for trying things out."""
    if device.type != "cuda":
        return dataclasses.replace(
            CARDS["h200"], id="cpu", name="no GPU", context_gb=0.0, workspace_gb=0.0, pages_gb=0.0
        )
    properties = torch.cuda.get_device_properties(device)
    known = card_named(properties.name)
    base = known or CARDS["rtx-3060"]
    _, total = torch.cuda.mem_get_info(device)
    context = context_bytes(device)
    return dataclasses.replace(
        base,
        id=base.id if known else "unknown",
        name=properties.name,
        vram_gb=total / 1e9,
        link_gb_s=measure_link(device),
        context_gb=base.context_gb if context is None else max(base.context_gb, context / 1e9),
    )


def measure_link(device: torch.device, copies: int = 4) -> float:
    """GB/s of pinned copies to a device, one after the other."""
    store = make_store([PROBE_BYTES], "auto", device)
    target = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(store.slab(0), non_blocking=True)
    start.record()
    for _ in range(copies):
        target.copy_(store.slab(0), non_blocking=True)
    end.record()
    end.synchronize()
    store.close()
    del target
    torch.cuda.empty_cache()
    milliseconds = float(start.elapsed_time(end))
    return copies * PROBE_BYTES / 1e6 / milliseconds


def budget_bytes(vram: str, device: torch.device) -> int:
    """Bytes that a budget means on a device.

    Raises:
        BudgetError: the card hasn't got as much, or `auto` is asked for without a GPU.
    """
    if device.type != "cuda":
        if vram == "auto":
            raise BudgetError("vram: auto asks for a GPU's free memory, and there is no GPU", "give a size, as 12GB")
        return parse_size(vram)
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device) + (context_bytes(device) or 0)
    available = free + own
    if vram == "auto":
        return round((1 - MARGIN) * available)
    wanted = parse_size(vram)
    if wanted > total:
        raise BudgetError(f"{vram} is more than the {total / 1e9:.1f} GB of this card", "give less, or `auto`")
    if wanted > available:
        raise BudgetError(
            f"{vram} is more than the {available / 1e9:.1f} GB that are free on this card",
            "close what else uses it, or give less, or `auto`",
        )
    return wanted


def process_bytes(device: torch.device) -> int | None:
    """GPU memory of this whole process as the driver counts it, context included; None where it can't be told."""
    try:
        import pynvml
    except ImportError:
        return None
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return None
    own = [process for process in processes if process.pid == os.getpid()]
    if not own and len(processes) == 1:
        own = processes  # a container has numbers of its own for its processes
    used = own[0].usedGpuMemory if own else None
    return None if used is None else int(used)


def process_peak_bytes(device: torch.device) -> int | None:
    """GPU memory of this whole process at the moment when torch held most, since its peaks were last reset."""
    whole = process_bytes(device)
    if whole is None:
        return None
    return whole - torch.cuda.memory_reserved(device) + torch.cuda.max_memory_reserved(device)


def context_bytes(device: torch.device) -> int | None:
    """What this process takes beside torch's own memory: context, kernels, recorded graphs."""
    torch.zeros(1, device=device)  # from here on there is a context
    whole = process_bytes(device)
    return None if whole is None else max(0, whole - torch.cuda.memory_reserved(device))


def host_bytes_free() -> int:
    """Host memory that this process may have, what it has already included: as the kernel and a control group say."""
    own = int(psutil.Process().memory_info().rss)
    return min(int(psutil.virtual_memory().available) + own, host_ram_bytes())


def check_room(plan: Plan, device: torch.device, own: int = 0) -> None:
    """Refuse a plan whose budget other things have taken.

    Args:
        plan: The plan.
        device: Its device.
        own: Bytes there that are the model's own, which the plan counts.

    Raises:
        BudgetError: what else this process holds is more than the budget leaves beside the context.
    """
    if device.type != "cuda" or plan.budget_bytes is None:
        return
    torch.cuda.empty_cache()  # what was there before and is no longer used counts too
    held = torch.cuda.memory_allocated(device) - own
    if held > plan.budget_bytes - outside_torch(plan.device):
        raise BudgetError(
            f"this process holds {held / 1e9:.1f} GB of GPU memory already, and the plan counts with all of the "
            f"{plan.budget_bytes / 1e9:.1f} GB",
            "drop the other models and tensors first (del, then gc.collect()), or give a larger vram",
        )


_limits: dict[torch.device, list[Plan]] = {}
"""The plans whose limits are set on a device. torch knows one limit at a time: that of the last holds."""


def set_limit(plan: Plan, device: torch.device) -> None:
    """Let torch take no more than a plan's budget leaves it beside the context, until that is lifted."""
    if device.type == "cuda" and plan.budget_bytes is not None:
        _limits[device] = [*_without(plan, device), plan]
        torch.cuda.empty_cache()
        _tell_torch(device)


def _without(plan: Plan, device: torch.device) -> list[Plan]:
    return [one for one in _limits.get(device, []) if one is not plan]


def _tell_torch(device: torch.device) -> None:
    fraction = 1.0
    if _limits[device]:
        plan = _limits[device][-1]
        assert plan.budget_bytes is not None
        _, total = torch.cuda.mem_get_info(device)
        fraction = min(1.0, (plan.budget_bytes - outside_torch(plan.device)) / total)
    torch.cuda.set_per_process_memory_fraction(fraction, device)


def enforce(plan: Plan, device: torch.device) -> None:
    """Set the limit of a plan, before there is anything of the model.

    Raises:
        BudgetError: this process holds more than that already.
    """
    check_room(plan, device)
    set_limit(plan, device)


@contextmanager
def limited(plan: Plan | None, device: torch.device) -> Iterator[None]:
    """Set the limit of a plan, if there is one; it stays unless something goes wrong."""
    if plan is not None:
        enforce(plan, device)
    try:
        yield
    except BaseException:
        if plan is not None:
            lift(device, plan)
        raise


def lift(device: torch.device, plan: Plan | None = None) -> None:
    """Take a plan's limit back; that of a plan which was enforced before it and is still there holds again.

    Args:
        device: Where.
        plan: Whose; all there are by default.
    """
    if _limits.get(device):
        _limits[device] = [] if plan is None else _without(plan, device)
        _tell_torch(device)
