"""Soup, another trainer that streams layers, as a method. Imported in a cell's own process only.

Soup keeps a model as one file per decoder layer and quantises 16-bit checkpoints itself. So that it trains the bytes
that the others train, a checkpoint that is quantised already is rewritten as such files, packed weights and statistics
as they are. Model, store, buffers and streams are then its own; the loop is the one of all methods.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from safetensors.torch import save_file
from soup_cli.utils import layer_shard
from soup_cli.utils.layer_stream import stream_arch_of
from soup_cli.utils.layer_stream_runtime import (
    build_meta_skeleton,
    build_streamed_model,
    quantised_layer_suffixes,
    set_stream_recompute,
)
from torch import Tensor
from transformers import AutoConfig

from poros.checkpoint.claims import QUANT_STATE_KEY, STORED_PARTS
from poros.checkpoint.locate import read_config
from poros.checkpoint.reader import four_bit_weights
from poros.checkpoint.shards import Shards
from poros.parity.stock import adapters_of, make_adapters_count
from poros.receipt import DTYPE_POLICY
from poros_bench.cell import Cell, NotApplicableError, Trainee
from poros_bench.methods import SoupOptions
from poros_bench.ways import lora_of

DTYPE = "bfloat16"
NF4 = layer_shard.QUANT_NF4

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def soup(cell: Cell) -> Trainee:
    """Soup's streamed model: NF4 in pinned host memory, two buffers unless set otherwise."""
    options = SoupOptions.model_validate(cell.entry.options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        architecture = stream_arch_of(AutoConfig.from_pretrained(cell.directory))
    except ValueError as error:
        raise NotApplicableError(str(error).splitlines()[0]) from error
    # Soup writes below the home, working or temporary folder only.
    folder = Path(tempfile.mkdtemp(prefix="soup-"))
    try:
        index = write_layers(cell.directory, folder, architecture, device)
        model, runtime = build_streamed_model(
            model_id=str(folder),
            shard_dir=str(folder),
            index=index,
            lora_config=lora_of(cell),
            device=str(device),
            dtype=DTYPE,
            buffers=options.buffers,
            pin=device.type == "cuda",
            require_pin=device.type == "cuda",
            seed=cell.case.seed,
            quant=NF4,
            double_quant=True,
            weights_dir=str(folder),
            nf4_scale_cache=options.scale_cache,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # everything is in memory
    if not options.recompute:
        set_stream_recompute(model, False)
    make_adapters_count(model, cell.case.seed)
    for adapter in adapters_of(model).values():
        adapter.data = adapter.data.to(getattr(torch, options.adapters))

    def record() -> dict[str, Any]:
        return {
            "executor": "soup",
            "stream": {key: value for key, value in runtime.stats().items() if isinstance(value, int | str | bool)},
        }

    return Trainee(
        model=model,
        device=device,
        make_optimizer=torch.optim.AdamW,
        attention=cell.case.attention,
        record=record,
        dtype_policy=DTYPE_POLICY.replace("float32", options.adapters),
        close=runtime.close,
    )


def write_layers(directory: Path, out: Path, architecture: str, device: torch.device) -> layer_shard.ShardIndex:
    """Write a checkpoint as the files that Soup streams from.

    Args:
        directory: A checkpoint, quantised already or in 16 bit; the latter is left to Soup.
        out: An empty folder. It gets a config without quantisation too, from which Soup builds its skeleton.
        architecture: Soup's word for the family.
        device: Where 16-bit weights are quantised.

    Returns:
        Soup's index of the files.
    """
    config = read_config(directory)
    stored = config.pop("quantization_config", None)
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if stored is None:
        skeleton = build_meta_skeleton(str(out), dtype=DTYPE, quant=NF4)
        return layer_shard.shard_checkpoint(
            str(directory),
            str(out),
            dtype=DTYPE,
            arch=architecture,
            quant=NF4,
            quant_suffixes=quantised_layer_suffixes(skeleton),
            quant_device=str(device),
        )
    with Shards.open(directory) as shards:
        return _rewrite(shards, out, architecture, device)


def _rewrite(shards: Shards, out: Path, architecture: str, device: torch.device) -> layer_shard.ShardIndex:
    quantised = four_bit_weights(shards)
    beside = {f"{name}.{part}" for name in quantised for part in (*STORED_PARTS, QUANT_STATE_KEY)}
    layers: dict[int, dict[str, str]] = {}
    outside: list[str] = []
    for name in shards.names:
        found = _LAYER.fullmatch(name)
        if name in beside:
            continue
        if found is None:
            outside.append(name)
        else:
            layers.setdefault(int(found[1]), {})[found[2]] = name
    specs: dict[str, layer_shard.NF4WeightSpec] = {}
    codes: dict[str, Tensor] = {}
    keys: set[str] = set()
    count = 0
    for number, names in sorted(layers.items()):
        file: dict[str, Tensor] = {}
        for short, name in names.items():
            if name not in quantised:
                file[short] = shards.read(name).to(torch.bfloat16)
                count += file[short].numel()
                continue
            state = _state(shards, name)
            file |= {short + suffix: tensor for suffix, tensor in _parts(shards.read(name), state)}
            specs[short] = layer_shard.NF4WeightSpec(
                shape=tuple(state.shape),
                dtype=str(state.dtype).removeprefix("torch."),
                blocksize=state.blocksize,
                quant_type=state.quant_type,
                nested=True,
                nested_blocksize=state.state2.blocksize,
            )
            codes = {layer_shard.NF4_CODE_KEY: state.code, layer_shard.NF4_NESTED_CODE_KEY: state.state2.code}
            count += state.shape.numel()
        keys |= file.keys()
        save_file(file, layer_shard.layer_shard_path(str(out), number))
    # Vocabulary matrices that aren't tied travel through a slot of their own.
    roles = {name for name in outside if layer_shard.large_weight_role(name) is not None}
    large = sorted(roles) if len(roles) > 1 else []
    extras = dict(codes)
    for name in outside:
        tensor = shards.read(name).to(torch.bfloat16)
        count += tensor.numel()
        if name in large:
            save_file({name: tensor}, layer_shard.large_shard_path(str(out), name))
        else:
            extras[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in extras.items()}, layer_shard.extras_shard_path(str(out)))
    return layer_shard.ShardIndex(
        n_layers=len(layers),
        layer_keys=tuple(sorted(keys)),
        extra_keys=tuple(sorted(extras)),
        dtype=DTYPE,
        total_params=count,
        arch=architecture,
        soup_version=importlib.metadata.version("soup-cli"),
        large_keys=tuple(large),
        quant=NF4,
        double_quant=True,
        quant_device=device.type,
        quant_specs=specs,
    )


def _state(shards: Shards, name: str) -> Any:
    stored = {key: shards.read(f"{name}.{key}") for key in (*STORED_PARTS, QUANT_STATE_KEY)}
    return QuantState.from_dict(stored, device=torch.device("cpu"))


def _parts(packed: Tensor, state: Any) -> Iterator[tuple[str, Tensor]]:
    yield "", packed
    yield layer_shard.ABSMAX_SUFFIX, state.absmax
    yield layer_shard.NESTED_ABSMAX_SUFFIX, state.state2.absmax
    yield layer_shard.NESTED_OFFSET_SUFFIX, state.offset
