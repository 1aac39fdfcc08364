"""Stored 4-bit weights: every tensor of them is checked, inside the layers and outside, before anything is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

import poros
from poros.architecture import Architecture
from poros.config import LoraPart
from poros.engine.adapters import lora_config, narrowed
from poros.engine.parts import DecoderParts
from poros.errors import CheckpointError
from poros.parity.stock import load_stock
from poros.plugins import Plugins

Edited = Callable[[Path, Callable[[dict[str, torch.Tensor]], None]], Path]
CPU = torch.device("cpu")
Q = "model.layers.2.self_attn.q_proj.weight"


def lora() -> Any:
    return lora_config(LoraPart(rank=4))


OUTER = "model.per_layer_model_projection.weight"
"""A linear layer outside the decoder layers, which stock quantises too."""


@pytest.fixture
def per_layer(checkpoint: Callable[..., Path], families: dict[str, Architecture], tmp_path: Path) -> Path:
    """A checkpoint in 4 bit with a linear layer outside the decoder layers."""
    values = next(case.config for case in families["gemma4"].parity_cases if case.name == "e-series")
    made, directory = checkpoint("gemma4", dict(values)), tmp_path / "quantised"
    config = AutoConfig.from_pretrained(made)
    stock = load_stock(made, narrowed(lora(), families["gemma4"], config), 0, CPU)
    stock.unload().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("weight", [Q, OUTER])
@pytest.mark.parametrize("part", ["", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"])
@pytest.mark.parametrize("change", ["shape", "dtype", "missing"])
def test_each_tensor_of_a_stored_weight_is_checked_inside_and_outside_the_layers(
    weight: str, part: str, change: str, per_layer: Path, rewritten: Edited, plugins: Plugins
) -> None:
    """A wrong one may be read without an error: what is too long is cut off, what is too short is read past its end."""
    name = weight + part
    right = load_file(per_layer / "model.safetensors")[name]
    if change == "shape":
        wrong = {name: right.flatten()[:-1].clone()}
        words = rf"{name} is {right.dtype} .*{right.numel() - 1}\], expected {right.dtype} .*\(in model.safetensors\)"
    elif change == "dtype":
        wrong = {name: right.to(torch.int16)}
        words = rf"{name} is torch.int16 .*expected {right.dtype} .*\(in model.safetensors\)"
    else:
        wrong = {}
        words = f"{weight} is in 4 bit, but {name} is missing" if part else f"{weight} is missing"

    def change_it(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]
        tensors.update(wrong)

    with pytest.raises(CheckpointError, match=words):
        poros.load(rewritten(per_layer, change_it), device="cpu", plugins=plugins)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_vocabulary_matrix_in_four_bit_is_refused(
    name: str, checkpoint: Callable[..., Path], edited: Edited, plugins: Plugins
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = torch.zeros(9, dtype=torch.uint8)

    with pytest.raises(CheckpointError, match=f"{name} is in 4 bit, which Poros reads for linear layers of"):
        poros.load(edited(checkpoint("qwen2", {}), change), device="cpu", plugins=plugins)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"])
def test_a_shape_outside_the_layers_is_refused_with_its_file(
    name: str, pre_quantised: Callable[[str], Path], rewritten: Edited, plugins: Plugins
) -> None:
    """Of what a quantised checkpoint keeps in 16 bit."""
    directory = pre_quantised("qwen2")
    size = len(load_file(directory / "model.safetensors")[name]) - 1
    words = rf"{name} has shape \[{size}[, 0-9]*\], expected \[{size + 1}[, 0-9]*\] \(in model.safetensors\)"
    with pytest.raises(CheckpointError, match=words):
        poros.load(
            rewritten(directory, lambda tensors: tensors.update({name: tensors[name][:-1].clone()})),
            device="cpu",
            plugins=plugins,
        )


# -- what a 4-bit weight says of itself -------------------------------------------------------------------------------


def says(change: Callable[[dict[str, Any]], dict[str, Any]], weight: str = "") -> Callable[..., None]:
    """Change what a 4-bit weight of a checkpoint says of itself; every one by default."""

    def apply(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(weight) and "quant_state" in name]:
            state = json.loads(bytes(tensors[name].tolist()))
            tensors[name] = torch.tensor(list(json.dumps(state | change(state)).encode()), dtype=torch.uint8)

    return apply


@pytest.mark.parametrize("weight", [Q, OUTER])
def test_a_stored_weight_of_another_layers_shape_is_refused(
    weight: str, per_layer: Path, rewritten: Edited, plugins: Plugins
) -> None:
    """As many elements in other rows and columns: its codes and scales look right, only its state says so."""
    key = f"{weight}.quant_state.bitsandbytes__nf4"
    rows, columns = json.loads(bytes(load_file(per_layer / "model.safetensors")[key].tolist()))["shape"]
    rewritten(per_layer, says(lambda state: {"shape": [2 * rows, columns // 2]}, weight))
    with pytest.raises(CheckpointError, match=rf"{key} says .*{2 * rows}, {columns // 2}.*{rows}, {columns}"):
        poros.load(per_layer, device="cpu", plugins=plugins)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_the_dtype_of_a_stored_weight_is_the_files(
    dtype: str,
    pre_quantised: Callable[[str], Path],
    rewritten: Edited,
    families: dict[str, Architecture],
    plugins: Plugins,
) -> None:
    """Restoring a weight rounds to that dtype, so it is part of the numbers."""
    directory = rewritten(pre_quantised("qwen2"), says(lambda state: {"dtype": dtype}))
    stock = load_stock(directory, lora(), 0, CPU)
    model = poros.load(directory, lora=lora(), seed=0, device="cpu", plugins=plugins)
    for one in DecoderParts.of(model, families["qwen2"]).layers[0].modules():
        if type(one).__name__ == "Linear4bit" and hasattr(one, "quant_state"):
            assert one.weight.quant_state.dtype == getattr(torch, dtype)
    ids = torch.arange(3, 11)[None]
    found = []
    for each in (stock, model):
        each.train()
        with torch.autocast("cpu", torch.bfloat16):
            output = each(input_ids=ids, labels=ids)
        output.loss.backward()
        found.append([output.logits.detach(), *(p.grad for p in each.parameters() if p.grad is not None)])
    assert len(found[0]) == 71
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    "values", [{"blocksize": 128}, {"nested_blocksize": 128}, {"shape": [64, 32]}, {"dtype": "int8"}]
)
def test_other_block_sizes_and_shapes_are_refused(
    values: dict[str, Any], pre_quantised: Callable[[str], Path], rewritten: Edited, plugins: Plugins
) -> None:
    with pytest.raises(CheckpointError, match="Poros reads block sizes"):
        poros.load(rewritten(pre_quantised("qwen2"), says(lambda state: values)), device="cpu", plugins=plugins)


def test_a_garbled_quant_state_is_refused(
    pre_quantised: Callable[[str], Path], rewritten: Edited, plugins: Plugins
) -> None:
    state = f"{Q}.quant_state.bitsandbytes__nf4"
    garbled = {state: torch.zeros(9, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match="can't be read"):
        poros.load(
            rewritten(pre_quantised("qwen2"), lambda tensors: tensors.update(garbled)), device="cpu", plugins=plugins
        )
