"""Checking that what a checkpoint's files hold is what a place in the model needs."""

from __future__ import annotations

import json
from typing import Any

import bitsandbytes as bnb
import torch

from poros.checkpoint.frozen import FrozenTensor, packed_layout
from poros.checkpoint.headers import TensorInfo
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
        dtype = check_stored(place.owner, source, shards, problems, claimed)
        if dtype is not None:
            place.owner._parameters[place.attribute].quant_state.dtype = dtype  # type: ignore[union-attr]
        return
    if any(f"{source}.{part}" in shards for part in STORED_PARTS):
        problems.append(f"{source} has scales beside it but no {QUANT_STATE_KEY}")
        return
    if is_four_bit(place):
        owner = place.owner
        shape = (int(owner.out_features), int(owner.in_features))  # type: ignore[arg-type]
    if info.shape != shape:
        problems.append(misshapen(info, shape))
    if info.dtype not in FLOATS and (expected.dtype.is_floating_point or is_four_bit(place)):
        problems.append(f"{source} is {info.dtype}, expected one of bfloat16, float16, float32")


def misshapen(info: TensorInfo, shape: tuple[int, ...]) -> str:
    """What to say of a tensor that hasn't the shape of its place."""
    return f"{info.name} has shape {list(info.shape)}, expected {list(shape)} (in {info.file.name})"


def check_stored(owner: Any, source: str, shards: Shards, problems: list[str], claimed: set[str]) -> torch.dtype | None:
    """Check the tensors of a stored 4-bit weight: all are there, with the dtypes and shapes of their linear layer.

    Args:
        owner: The linear layer.
        source: Name of its weight in the files.
        shards: The files.
        problems: What is wrong is added.
        claimed: Names in the files that are taken are added.

    Returns:
        The dtype to which the weight is restored; None if that can't be told.
    """
    parts = [f"{source}.{part}" for part in STORED_PARTS]
    key = f"{source}.{QUANT_STATE_KEY}"
    claimed.update(parts, [key])
    absent = [part for part in parts if part not in shards]
    if absent:
        problems.append(f"{source} is in 4 bit, but {', '.join(absent)} is missing")
        return None
    size = (int(owner.out_features), int(owner.in_features))
    layout = packed_layout(size, owner.quant_storage)
    for part in ("", *STORED_PARTS):
        info, (dtype, shape) = shards.info(f"{source}.{part}" if part else source), layout[part]
        if (info.dtype, info.shape) != (dtype, shape):
            problems.append(
                f"{info.name} is {info.dtype} {list(info.shape)}, expected {dtype} {list(shape)} (in {info.file.name})"
            )
    try:
        state = json.loads(bytes(shards.read(key).tolist()).decode())
        restored = getattr(torch, state["dtype"])
        found = (state["blocksize"], state["nested_blocksize"], tuple(state["shape"]), state["quant_type"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problems.append(f"{key} can't be read: {type(error).__name__}: {error}")
        return None
    expected = (64, 256, size, "nf4")
    if found != expected or restored not in FLOATS:
        problems.append(
            f"{key} says {found} and {state['dtype']}; Poros reads block sizes, shape and kind {expected} "
            f"(in {shards.info(key).file.name})"
        )
        return None
    assert isinstance(restored, torch.dtype)
    return restored
