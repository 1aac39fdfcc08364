"""Checking that what a checkpoint's files hold is what a place in the model needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import bitsandbytes as bnb
import torch

from poros.checkpoint.frozen import FrozenTensor, packed_layout
from poros.checkpoint.shards import Shards

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""dtypes in which a weight may be stored; all are read as bf16, as stock does when asked for bf16."""

QUANT_STATE_KEY = "quant_state.bitsandbytes__nf4"

STORED_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
"""Tensors beside a 4-bit weight in a file; the offset is in the packed quant state."""


def is_four_bit(place: FrozenTensor) -> bool:
    """Whether a place is to hold a 4-bit weight."""
    return isinstance(place.owner._parameters.get(place.attribute), bnb.nn.Params4bit)


def check_place(
    place: FrozenTensor,
    source: str,
    shards: Shards,
    quantised: frozenset[str],
    problems: list[str],
    claimed: set[str],
) -> None:
    """Check dtype and shape of the tensor that a place is to be filled with.

    Args:
        place: In the model.
        source: Name of its tensor in the files.
        shards: The files.
        quantised: Names of the weights that are stored in 4 bit.
        problems: What is wrong is added.
        claimed: Names in the files that are taken are added.
    """
    if source not in shards:
        problems.append(f"{source} is missing")
        return
    info = shards.info(source)
    claimed.add(source)
    expected = place.get()
    shape = tuple(expected.shape)
    if source in quantised:
        parts = [f"{source}.{part}" for part in STORED_PARTS]
        absent = [part for part in parts if part not in shards]
        claimed.update(parts, [f"{source}.{QUANT_STATE_KEY}"])
        if absent:
            problems.append(f"{source} is in 4 bit, but {', '.join(absent)} is missing")
        else:
            problems.extend(_check_stored_state(place, source, shards))
        if info.dtype != expected.dtype or info.shape != shape:
            problems.append(f"{source} is {info.dtype} {list(info.shape)}, expected {expected.dtype} {list(shape)}")
        return
    if any(f"{source}.{part}" in shards for part in STORED_PARTS):
        problems.append(f"{source} has scales beside it but no {QUANT_STATE_KEY}")
        return
    if is_four_bit(place):
        owner = place.owner
        shape = (int(owner.out_features), int(owner.in_features))  # type: ignore[arg-type]
    if info.shape != shape:
        problems.append(f"{source} has shape {list(info.shape)}, expected {list(shape)}")
    if info.dtype not in FLOATS and (expected.dtype.is_floating_point or is_four_bit(place)):
        problems.append(f"{source} is {info.dtype}, expected one of bfloat16, float16, float32")


def _check_stored_state(place: FrozenTensor, source: str, shards: Shards) -> Iterator[str]:
    """What is wrong with the tensors beside a stored 4-bit weight; sets the dtype to which it is restored."""
    owner: Any = place.owner
    layout = packed_layout((int(owner.out_features), int(owner.in_features)))
    for part in STORED_PARTS:
        info = shards.info(f"{source}.{part}")
        if (info.dtype, info.shape) != layout[part]:
            dtype, shape = layout[part]
            yield f"{info.name} is {info.dtype} {list(info.shape)}, expected {dtype} {list(shape)}"
    key = f"{source}.{QUANT_STATE_KEY}"
    try:
        state = json.loads(bytes(shards.read(key).tolist()).decode())
        dtype = getattr(torch, state["dtype"])
        found = (state["blocksize"], state["nested_blocksize"], tuple(state["shape"]), state["quant_type"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        yield f"{key} can't be read: {type(error).__name__}: {error}"
        return
    expected = (64, 256, (int(owner.out_features), int(owner.in_features)), "nf4")
    if found != expected or dtype not in FLOATS:
        yield f"{key} says {found} and {state['dtype']}; Poros reads block sizes, shape and kind {expected}"
        return
    owner._parameters[place.attribute].quant_state.dtype = dtype
