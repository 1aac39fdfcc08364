"""Filling a skeleton from a checkpoint: what each tensor of the files becomes, checked first and read afterwards.

Checking needs only the headers of the files; reading goes tensor by tensor, so that the host holds the store and a few
tensors more, never a whole layer or model in 16 bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn

from poros.checkpoint.claims import (
    FLOATS,
    QUANT_STATE_KEY,
    STORED_PARTS,
    check_place,
    check_stored,
    is_four_bit,
    misshapen,
)
from poros.checkpoint.frozen import FrozenTensor, state_tensors
from poros.checkpoint.packing import Packing
from poros.checkpoint.shards import Shards
from poros.checkpoint.skeleton import COMPUTE_DTYPE, Skeleton, placeholder
from poros.errors import CheckpointError, UnsupportedError
from poros.store.store import HostStore

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in all)."""


@dataclass(frozen=True)
class ReadPlan:
    """Where each tensor of the model comes from, all of it checked against the files' headers.

    Attributes:
        packings: The layout of each layer; layers of one kind share one object.
        layer_prefixes: Begin of the names of each layer's tensors in the files.
        outside: Name in the model -> name in the files, for everything outside the layers.
        tied: Names in the model that are another name for a tensor in `outside`.
    """

    packings: tuple[Packing, ...]
    layer_prefixes: tuple[str, ...]
    outside: dict[str, str]
    tied: tuple[str, ...]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each layer's slab."""
        return [packing.nbytes for packing in self.packings]


def four_bit_weights(shards: Shards) -> frozenset[str]:
    """Names of the weights that are stored in 4 bit, recognised by their quant state and not by any list.

    Raises:
        UnsupportedError: weights are stored in FP4.
    """
    fp4 = next((name for name in shards.names if name.endswith("quant_state.bitsandbytes__fp4")), None)
    if fp4 is not None:
        raise UnsupportedError(
            f"{fp4}: the checkpoint is in FP4", "Poros streams NF4; quantise the 16-bit model instead"
        )
    end = f".{QUANT_STATE_KEY}"
    return frozenset(name.removesuffix(end) for name in shards.names if name.endswith(end))


def make_packings(
    layers: Sequence[Sequence[FrozenTensor]], kinds: Sequence[str], mixed: bool = False
) -> tuple[Packing, ...]:
    """The packing of every layer; layers with equal layouts share one object.

    Args:
        layers: The frozen tensors of each layer.
        kinds: The layer kind of each layer.
        mixed: Whether layers of one kind may differ, as in a checkpoint in which some weights were left in 16 bit.

    Raises:
        CheckpointError: layers of one kind differ in their frozen tensors, or there is not one kind per layer.
    """
    if len(kinds) != len(layers):
        raise CheckpointError(f"the config has {len(kinds)} layer kinds for {len(layers)} layers")
    first_of: dict[str, tuple[int, Packing]] = {}
    shared: dict[Packing, Packing] = {}
    packings = []
    for index, (places, kind) in enumerate(zip(layers, kinds, strict=True)):
        packing = Packing.of((place.name, place.get().dtype, tuple(place.get().shape)) for place in places)
        first, known = first_of.setdefault(kind, (index, packing))
        if known != packing and not mixed:
            names = sorted({field.name for field in set(packing.fields) ^ set(known.fields)})
            raise CheckpointError(f"layers {first} and {index} are both {kind!r} but differ in {', '.join(names[:5])}")
        packings.append(shared.setdefault(packing, packing))
    return tuple(packings)


def plan_reading(
    skeleton: Skeleton, shards: Shards, prefix: str, kinds: Sequence[str], layers_in_files: int | None = None
) -> ReadPlan:
    """Match the model's tensors with the files' tensors and check dtype and shape of each.

    Args:
        skeleton: The model to fill.
        shards: The files.
        prefix: Begin of the decoder's tensors in the files.
        kinds: The layer kind of each layer.
        layers_in_files: How many layers the files hold, if the skeleton is cut to its first ones.

    Raises:
        CheckpointError: with every missing, unexpected or misshapen tensor (the first few of many).
    """
    architecture = skeleton.architecture
    quantised = four_bit_weights(shards)
    packings = make_packings(skeleton.layers, kinds, mixed=bool(quantised))
    prefixes = tuple(f"{prefix}{architecture.layers}.{index}." for index in range(len(skeleton.layers)))
    problems: list[str] = []
    claimed: set[str] = set()
    for layer_prefix, places in zip(prefixes, skeleton.layers, strict=True):
        for place in places:
            if not place.part:
                check_place(place, layer_prefix + place.name, shards, quantised, problems, claimed)

    outside, tied = _outside(skeleton, shards, prefix, problems, claimed)
    left_out = tuple(
        f"{prefix}{architecture.layers}.{index}." for index in range(len(skeleton.layers), layers_in_files or 0)
    )
    # What transformers says may be in the files for nothing: keys and values of layers that share those of others.
    ignored = [
        re.compile(pattern)
        for module in (skeleton.model, skeleton.decoder)
        for pattern in getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    ]
    stray = [
        name
        for name in shards.names
        if name not in claimed
        and name.startswith(prefix)
        and not name.startswith(left_out)
        and not name.endswith("rotary_emb.inv_freq")
        and not any(pattern.search(name) for pattern in ignored)
    ]
    problems.extend(f"{name} is in the files, but the model has no such tensor" for name in stray)
    if problems:
        shown = problems[:10] + ([f"and {len(problems) - 10} more"] if len(problems) > 10 else [])
        raise CheckpointError(
            "the checkpoint doesn't fit its config.json:\n" + "\n".join(f"  - {problem}" for problem in shown),
            "check that config.json and the .safetensors files come from the same model",
        )
    return ReadPlan(packings, prefixes, outside, tied)


def fill_outside(
    skeleton: Skeleton,
    shards: Shards,
    plan: ReadPlan,
    device: torch.device,
    tables: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Load what lies outside the layers (embedding, final norm, head) onto the device; tie what is tied.

    In bf16, but for linear layers that stock would quantise too: those become 4-bit and stay on the device.

    Args:
        skeleton, shards, plan: The model, the files, and what belongs where.
        device: Where the model will run.
        tables: Name in the model -> a tensor in host memory to be filled instead; a placeholder takes its place.
    """
    for name, source in plan.outside.items():
        path, _, attribute = name.rpartition(".")
        module = skeleton.model.get_submodule(path)
        if name in tables:
            tables[name].copy_(shards.read(source))
            empty = placeholder(tables[name].dtype, tuple(tables[name].shape), device)
            module._parameters[attribute] = nn.Parameter(empty, requires_grad=False)
            continue
        if f"{source}.{QUANT_STATE_KEY}" in shards:
            stored = {key: shards.read(f"{source}.{key}") for key in (*STORED_PARTS, QUANT_STATE_KEY)}
            module.weight = bnb.nn.Params4bit.from_prequantized(
                shards.read(source), stored, device=device, module=module
            )
            continue
        value = shards.read(source).to(device=device, dtype=COMPUTE_DTYPE, copy=True)
        if isinstance(module, bnb.nn.Linear4bit) and attribute == "weight":
            storage = module.quant_storage if hasattr(module, "quant_storage") else torch.uint8
            module.weight = _quantised(value, device, storage, module)
        elif attribute in module._parameters:
            module._parameters[attribute] = nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[attribute] = value
    if plan.tied:
        skeleton.model.tie_weights()
    left = [name for name, tensor in _state(skeleton.model) if tensor.device.type == "meta"]
    if left:
        raise CheckpointError(f"nothing in the checkpoint fills {', '.join(left[:5])}")


def fill_store(
    skeleton: Skeleton,
    shards: Shards,
    plan: ReadPlan,
    store: HostStore,
    device: torch.device,
    progress: Progress | None = None,
) -> None:
    """Quantise the layers tensor by tensor into the store.

    Args:
        skeleton: The model, for the names of its frozen tensors.
        shards: The files.
        plan: From `plan_reading`.
        store: As large as the plan's sizes.
        device: Where to quantise: the device on which stock would, so that codes and scales are the same.
        progress: Told the bytes read.
    """
    quantised = four_bit_weights(shards)
    total = sum(
        shards.info(plan.layer_prefixes[index] + place.name).nbytes
        for index, places in enumerate(skeleton.layers)
        for place in places
        if not place.part
    )

    def fill(index: int, place: FrozenTensor) -> int:
        slab, packing, source = store.slab(index), plan.packings[index], plan.layer_prefixes[index] + place.name
        tensor = shards.read(source)
        if source in quantised:
            packing.write(slab, place.name, tensor)
            _write_parts(packing, slab, place.name, _stored_parts(shards, source))
        elif is_four_bit(place):
            weight = _quantised(tensor.to(device=device, dtype=COMPUTE_DTYPE), device, place.get().dtype)
            packing.write(slab, place.name, weight.data)
            _write_parts(packing, slab, place.name, state_tensors(weight.quant_state))
        else:
            packing.write(slab, place.name, tensor.to(place.get().dtype))
        return tensor.nbytes

    # Threads, so that one tensor is read from the disk while another is quantised. Each writes its own bytes.
    with ThreadPoolExecutor(READING_THREADS, "poros-read") as threads:
        jobs = [
            threads.submit(fill, index, place)
            for index, places in enumerate(skeleton.layers)
            for place in places
            if not place.part
        ]
        try:
            done = 0
            for job in jobs:
                done += job.result()
                if progress is not None:
                    progress(done, total)
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


READING_THREADS = 3
"""As many tensors in 16 bit are in memory at a time."""


def _quantised(tensor: Tensor, device: torch.device, storage: torch.dtype, module: Any = None) -> bnb.nn.Params4bit:
    """A weight in NF4 with double quantisation, as stock loading makes it."""
    return bnb.nn.Params4bit(
        tensor,
        requires_grad=False,
        compress_statistics=True,
        quant_type="nf4",
        quant_storage=storage,
        module=module,
    ).to(device)


def _write_parts(packing: Packing, slab: Tensor, name: str, parts: dict[str, Tensor]) -> None:
    for part, tensor in parts.items():
        packing.write(slab, f"{name}.{part}", tensor)


def _stored_parts(shards: Shards, source: str) -> dict[str, Tensor]:
    stored = {key: shards.read(f"{source}.{key}") for key in (*STORED_PARTS, QUANT_STATE_KEY)}
    return state_tensors(bnb.functional.QuantState.from_dict(stored, device=torch.device("cpu")))


def _outside(
    skeleton: Skeleton, shards: Shards, prefix: str, problems: list[str], claimed: set[str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Match what lies outside the layers. A tied head may be absent from the files; an untied one may not.

    The class that ties is the whole model's, so its config counts and not that of a text part. Where the config ties
    and the files hold a head of their own, stock goes by the files; Poros refuses.
    """
    architecture = skeleton.architecture
    inside = f"{architecture.decoder}.{architecture.layers}."
    head = f"{architecture.head}.weight"
    embedding = f"{architecture.decoder}.{architecture.embedding}.weight"
    is_tied = bool(getattr(skeleton.model.config, "tie_word_embeddings", False))
    stored_head = _stored_head(shards, head, prefix, problems)
    outside: dict[str, str] = {}
    for name, tensor in _state(skeleton.model):
        if name.startswith(inside) or (name == head and is_tied):
            continue
        source = (
            prefix + name.removeprefix(f"{architecture.decoder}.") if name.startswith(architecture.decoder) else name
        )
        if name == head:
            source = stored_head
        if source not in shards:
            why = " (the config says that head and embedding are not tied)" if name == head else ""
            problems.append(f"{source} is missing{why}")
            continue
        claimed.add(source)
        info = shards.info(source)
        if f"{source}.{QUANT_STATE_KEY}" in shards:
            module = skeleton.model.get_submodule(name.rpartition(".")[0])
            if isinstance(module, bnb.nn.Linear4bit):
                check_stored(module, source, shards, problems, claimed)
                outside[name] = source
            else:
                problems.append(f"{source} is in 4 bit, which Poros reads for linear layers of the decoder only")
            continue
        if info.shape != tuple(tensor.shape):
            problems.append(misshapen(info, tuple(tensor.shape)))
        if info.dtype not in FLOATS:
            problems.append(f"{source} is {info.dtype}, expected one of bfloat16, float16, float32")
        outside[name] = source
    if is_tied and stored_head in shards and embedding in outside:
        claimed.add(stored_head)
        if not _equal(shards, stored_head, outside[embedding]):
            problems.append(
                f"{stored_head} is in the files and differs from the embedding, "
                "but the config says that the two are tied"
            )
    return outside, ((head,) if is_tied else ())


def _stored_head(shards: Shards, head: str, prefix: str, problems: list[str]) -> str:
    """What the head is called in the files: as in the model, or else beside the text decoder.

    A multimodal checkpoint may keep it there, under a part of the decoder's path. What merely ends in the same name, as
    the head of a draft model that was saved with it, is another head.
    """
    if head in shards:
        return head
    found = [
        name for name in shards.names if name.endswith(f".{head}") and f".{name.removesuffix(head)}" in f".{prefix}"
    ]
    if len(found) > 1:
        problems.append(f"{' and '.join(found)} are in the files, and only one of them can be the head")
    return found[0] if found else head


def _equal(shards: Shards, one: str, other: str) -> bool:
    first, second = shards.info(one), shards.info(other)
    return (
        first.shape == second.shape
        and first.dtype == second.dtype
        and torch.equal(shards.read(one), shards.read(other))
    )


def _state(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and persistent buffers by name, a shared one under each of its names."""
    entries: list[tuple[str, Tensor]] = []
    for path, module in model.named_modules():
        dot = f"{path}." if path else ""
        entries += [(dot + name, p) for name, p in module._parameters.items() if p is not None]
        entries += [
            (dot + name, b)
            for name, b in module._buffers.items()
            if b is not None and name not in module._non_persistent_buffers_set
        ]
    return entries
