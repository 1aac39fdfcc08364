"""From files to slabs: exactly what stock loading gives, or a refusal that says what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

import poros
from poros.architecture import Architecture
from poros.checkpoint.frozen import frozen_tensors
from poros.config import LoraPart
from poros.engine.adapters import lora_config, narrowed
from poros.engine.engine import engine_of
from poros.engine.parts import DecoderParts
from poros.errors import CheckpointError, UnsupportedError
from poros.parity.stock import load_stock
from poros.plugins import Plugins

CPU = torch.device("cpu")
FAMILIES = ("qwen2", "gemma3")
Q = "model.layers.2.self_attn.q_proj.weight"


def lora() -> Any:
    return lora_config(LoraPart(rank=4))


def slabs(model: Any) -> dict[str, torch.Tensor]:
    """Every frozen tensor of a streamed model, by layer and name."""
    engine = engine_of(model)
    return {
        f"{index}.{field.name}": view
        for index, packing in enumerate(engine.packings)
        for field, view in zip(packing.fields, packing.views(engine.store.slab(index)), strict=True)
    }


def stock_tensors(model: Any, architecture: Architecture) -> dict[str, torch.Tensor]:
    return {
        f"{index}.{place.name}": place.get()
        for index, layer in enumerate(DecoderParts.of(model, architecture).layers)
        for place in frozen_tensors(layer)
    }


def assert_same_model(directory: Path, architecture: Architecture, plugins: Plugins) -> None:
    """Slabs, parameters and buffers of a streamed model equal stock's, one by one."""
    stock = load_stock(directory, lora(), 0, CPU)
    streamed = poros.load(directory, lora=lora(), seed=0, device="cpu", plugins=plugins)
    expected, found = stock_tensors(stock, architecture), slabs(streamed)
    assert expected
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert [n for n, _ in streamed.named_parameters()] == [n for n, _ in stock.named_parameters()]
    assert streamed.num_parameters() == stock.num_parameters()
    inside = f".{architecture.decoder}.{architecture.layers}."
    for kind in ("named_parameters", "named_buffers"):
        theirs = dict(getattr(stock, kind)())
        for name, tensor in getattr(streamed, kind)():
            assert tensor.shape == theirs[name].shape, name
            assert tensor.dtype == theirs[name].dtype, name
            assert tensor.requires_grad == theirs[name].requires_grad, name
            if inside not in name or tensor.requires_grad:
                assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shard", ["5GB", "40KB"])
def test_codes_scales_and_buffers_are_stocks(
    family: str,
    dtype: torch.dtype,
    shard: str,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
) -> None:
    """fp32 weights give other codes than bf16 ones (case O-12), so the order of cast and quantisation matters."""
    directory = checkpoint(family, {}, dtype=dtype, max_shard_size=shard)
    assert (len(list(directory.glob("*.safetensors"))) > 1) == (shard == "40KB")
    assert_same_model(directory, families[family], plugins)


@pytest.fixture
def pre_quantised(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """A checkpoint that bitsandbytes has quantised, as transformers saves it."""

    def make(family: str) -> Path:
        directory = tmp_path / "quantised"
        load_stock(checkpoint(family, {}), lora(), 0, CPU).unload().save_pretrained(directory)
        return directory

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pre_quantised_checkpoint_is_taken_as_it_is(
    family: str, pre_quantised: Callable[[str], Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    directory = pre_quantised(family)
    assert any("absmax" in name for name in load_file(directory / "model.safetensors"))
    assert_same_model(directory, families[family], plugins)


def test_files_decide_what_is_in_four_bit_not_the_list(
    pre_quantised: Callable[[str], Path], checkpoint: Callable[..., Path], plugins: Plugins
) -> None:
    """Case O-13: a dynamic repository leaves some weights in 16 bit and lists them under another version's paths."""
    directory = pre_quantised("qwen2")
    tensors = load_file(directory / "model.safetensors")
    plain = load_file(checkpoint("qwen2", {}) / "model.safetensors")
    kept = "model.layers.1.mlp.down_proj.weight"
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(kept)} | {kept: plain[kept]}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    model = poros.load(directory, lora=lora(), seed=0, device="cpu", plugins=plugins)
    found = slabs(model)
    assert torch.equal(found["1.mlp.down_proj.weight"], plain[kept])
    assert "1.mlp.down_proj.weight.absmax" not in found
    assert "0.mlp.down_proj.weight.absmax" in found
    assert len({id(packing) for packing in engine_of(model).packings}) == 2
    with torch.no_grad():
        assert torch.isfinite(model(input_ids=torch.arange(8)[None]).logits).all()


@pytest.mark.parametrize("part", ["absmax", "quant_map", "nested_absmax", "nested_quant_map"])
def test_half_a_set_of_quantisation_tensors_is_refused(
    part: str, pre_quantised: Callable[[str], Path], plugins: Plugins
) -> None:
    directory = pre_quantised("qwen2")
    tensors = load_file(directory / "model.safetensors")
    del tensors[f"{Q}.{part}"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{Q} is in 4 bit, but {Q}.{part} is missing"):
        poros.load(directory, device="cpu", plugins=plugins)


OUTER = "model.per_layer_model_projection.weight"
"""A linear layer outside the decoder layers, which stock quantises too."""


def shorter(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name].flatten()[:-1].clone()


@pytest.mark.parametrize("weight", [Q, OUTER])
@pytest.mark.parametrize("part", ["", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"])
@pytest.mark.parametrize("change", ["shape", "dtype", "missing"])
def test_each_tensor_of_a_stored_weight_is_checked_inside_and_outside_the_layers(
    weight: str,
    part: str,
    change: str,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
    tmp_path: Path,
) -> None:
    """A wrong one may be read without an error: what is too long is cut off, what is too short is read past its end."""
    directory = per_layer(checkpoint, families, tmp_path)
    tensors = load_file(directory / "model.safetensors")
    name = weight + part
    right = tensors[name]
    if change == "shape":
        shorter(tensors, name)
        words = rf"{name} is {right.dtype} .*{right.numel() - 1}\], expected {right.dtype} .*\(in model.safetensors\)"
    elif change == "dtype":
        tensors[name] = right.to(torch.int16)
        words = rf"{name} is torch.int16 .*expected {right.dtype} .*\(in model.safetensors\)"
    else:
        del tensors[name]
        words = f"{weight} is in 4 bit, but {name} is missing" if part else f"{weight} is missing"
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=words):
        poros.load(directory, device="cpu", plugins=plugins)


@pytest.mark.parametrize("weight", [Q, OUTER])
def test_a_stored_weight_of_another_layers_shape_is_refused(
    weight: str,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
    tmp_path: Path,
) -> None:
    """As many elements in other rows and columns: its codes and scales look right, only its state says so."""
    directory = per_layer(checkpoint, families, tmp_path)
    tensors = load_file(directory / "model.safetensors")
    key = f"{weight}.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[key].tolist()))
    rows, columns = state["shape"]
    turned = {**state, "shape": [2 * rows, columns // 2]}
    tensors[key] = torch.tensor(list(json.dumps(turned).encode()), dtype=torch.uint8)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{key} says .*{2 * rows}, {columns // 2}.*{rows}, {columns}"):
        poros.load(directory, device="cpu", plugins=plugins)


def per_layer(checkpoint: Callable[..., Path], families: dict[str, Architecture], tmp_path: Path) -> Path:
    """A checkpoint in 4 bit with a linear layer outside the decoder layers."""
    values = next(case.config for case in families["gemma4"].parity_cases if case.name == "e-series")
    made, directory = checkpoint("gemma4", dict(values)), tmp_path / "quantised"
    config = AutoConfig.from_pretrained(made)
    stock = load_stock(made, narrowed(lora(), families["gemma4"], config), 0, CPU)
    stock.unload().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_vocabulary_matrix_in_four_bit_is_refused(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path, plugins: Plugins
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = torch.zeros(9, dtype=torch.uint8)

    with pytest.raises(CheckpointError, match=f"{name} is in 4 bit, which Poros reads for linear layers of"):
        poros.load(edited(checkpoint("qwen2", {}), tmp_path, change), device="cpu", plugins=plugins)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"])
def test_a_shape_outside_the_layers_is_refused_with_its_file(
    name: str, pre_quantised: Callable[[str], Path], plugins: Plugins
) -> None:
    """Of what a quantised checkpoint keeps in 16 bit."""
    directory = pre_quantised("qwen2")
    tensors = load_file(directory / "model.safetensors")
    tensors[name] = tensors[name][:-1].clone()
    size = len(tensors[name])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    words = rf"{name} has shape \[{size}[, 0-9]*\], expected \[{size + 1}[, 0-9]*\] \(in model.safetensors\)"
    with pytest.raises(CheckpointError, match=words):
        poros.load(directory, device="cpu", plugins=plugins)


def edited(directory: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a checkpoint with some of its tensors changed."""
    copy = tmp_path / "edited"
    shutil.copytree(directory, copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(Q), f"{Q} is missing"),
        (lambda t: t.update({Q: t[Q][:32].clone()}), rf"{Q} has shape \[32, 64\], expected \[64, 64\]"),
        (lambda t: t.update({Q: t[Q].to(torch.int32)}), f"{Q} is torch.int32"),
        (lambda t: t.pop("model.embed_tokens.weight"), "embed_tokens.weight is missing"),
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing .*not tied"),
        (lambda t: t.update({"model.layers.9.extra": torch.ones(1)}), "model.layers.9.extra is in the files, but"),
        (lambda t: t.update({f"{Q}.absmax": torch.ones(1)}), "has scales beside it but no quant_state"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"model.norm.weight has shape \[3\]"),
    ],
)
def test_what_does_not_fit_the_config_is_named(
    change: Callable[[dict[str, torch.Tensor]], None],
    words: str,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    plugins: Plugins,
) -> None:
    with pytest.raises(CheckpointError, match=words):
        poros.load(edited(checkpoint("qwen2", {}), tmp_path, change), lora=lora(), device="cpu", plugins=plugins)


def test_several_problems_come_at_once(checkpoint: Callable[..., Path], tmp_path: Path, plugins: Plugins) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "layers.3" in name]:
            del tensors[name]
        del tensors["model.norm.weight"]

    with pytest.raises(CheckpointError) as caught:
        poros.load(edited(checkpoint("qwen2", {}), tmp_path, change), lora=lora(), device="cpu", plugins=plugins)
    assert caught.value.message.count("is missing") == 10
    assert "and 3 more" in caught.value.message


# -- tying (case O-16) ------------------------------------------------------------------------------------------------


def test_tied_stays_one_tensor(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    directory = checkpoint("qwen2", {"tie_word_embeddings": True})
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    model = poros.load(directory, device="cpu", plugins=plugins)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tied_with_a_copy_of_the_embedding_is_fine(
    checkpoint: Callable[..., Path], tmp_path: Path, plugins: Plugins
) -> None:
    def add_copy(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    directory = edited(checkpoint("qwen2", {"tie_word_embeddings": True}), tmp_path, add_copy)
    model = poros.load(directory, device="cpu", plugins=plugins)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tied_with_another_head_in_the_files_is_refused(
    checkpoint: Callable[..., Path], tmp_path: Path, plugins: Plugins
) -> None:
    def add_other(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2

    directory = edited(checkpoint("qwen2", {"tie_word_embeddings": True}), tmp_path, add_other)
    with pytest.raises(CheckpointError, match="differs from the embedding, but the config says that the two are tied"):
        poros.load(directory, device="cpu", plugins=plugins)


# -- which head (the first of several names is not the right one) -----------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("decoy", ["draft.lm_head.weight", "a.model.lm_head.weight", "zzz.lm_head.weight"])
def test_the_head_of_another_part_is_not_the_models(
    tied: bool, decoy: str, checkpoint: Callable[..., Path], tmp_path: Path, plugins: Plugins
) -> None:
    """However its name is sorted, and whether the model has a head of its own in the files or not."""
    directory = edited(
        checkpoint("qwen2", {"tie_word_embeddings": tied}),
        tmp_path,
        lambda tensors: tensors.update({decoy: torch.zeros_like(tensors["model.embed_tokens.weight"])}),
    )
    model = poros.load(directory, device="cpu", plugins=plugins)
    right = load_file(directory / "model.safetensors")[f"{'model.embed_tokens' if tied else 'lm_head'}.weight"]
    assert torch.equal(model.lm_head.weight, right)


def test_the_head_of_another_part_does_not_stand_in_for_a_missing_one(
    checkpoint: Callable[..., Path], tmp_path: Path, plugins: Plugins
) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["draft.lm_head.weight"] = tensors.pop("lm_head.weight")

    with pytest.raises(CheckpointError, match=r"- lm_head.weight is missing .*not tied"):
        poros.load(edited(checkpoint("qwen2", {}), tmp_path, rename), device="cpu", plugins=plugins)


BESIDE = "language_model.lm_head.weight"
"""Where a multimodal checkpoint keeps its head, beside the decoder `language_model.model`."""


@pytest.fixture
def multimodal(checkpoint: Callable[..., Path], families: dict[str, Architecture], tmp_path: Path) -> Any:
    """An untied multimodal checkpoint, its tensors named as on the hub, after a change."""

    def make(change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
        text = {**families["gemma3"].tiny_config, "initializer_range": 0.1, "tie_word_embeddings": False}
        made = checkpoint("gemma3_multimodal", {"tie_word_embeddings": False, "text_config": text})

        def as_on_the_hub(tensors: dict[str, torch.Tensor]) -> None:
            for name in list(tensors):  # transformers 5.5 puts a word before it
                tensors[name.removeprefix("model.") if ".language_model.model." in name else name] = tensors.pop(name)
            change(tensors)

        return edited(made, tmp_path, as_on_the_hub)

    return make


@pytest.mark.parametrize("name", [BESIDE, "lm_head.weight"])
def test_a_head_beside_the_decoder_is_found_among_others(name: str, multimodal: Any, plugins: Plugins) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["draft.lm_head.weight"] = torch.zeros_like(tensors[BESIDE])
        tensors["vision_tower.lm_head.weight"] = torch.zeros(3)
        tensors[name] = tensors.pop(BESIDE)

    directory = multimodal(change)
    model = poros.load(directory, device="cpu", plugins=plugins)
    assert torch.equal(model.lm_head.weight, load_file(directory / "model.safetensors")[name])


def test_the_models_own_name_for_the_head_wins(multimodal: Any, plugins: Plugins) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors[BESIDE] * 2

    directory = multimodal(change)
    model = poros.load(directory, device="cpu", plugins=plugins)
    assert torch.equal(model.lm_head.weight, load_file(directory / "model.safetensors")["lm_head.weight"])


def test_two_heads_beside_the_decoder_are_refused(multimodal: Any, plugins: Plugins) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.lm_head.weight"] = tensors[BESIDE].clone()

    with pytest.raises(CheckpointError, match=f"{BESIDE} and model.lm_head.weight are in the files, and only one"):
        poros.load(multimodal(change), device="cpu", plugins=plugins)


# -- refusals by config -----------------------------------------------------------------------------------------------


def with_config(directory: Path, tmp_path: Path, **values: Any) -> Path:
    copy = tmp_path / "configured"
    shutil.copytree(directory, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **values}))
    return copy


@pytest.mark.parametrize(
    ("family", "values", "words"),
    [
        ("qwen2", {"model_type": "nobodys"}, "no installed plugin knows the model type 'nobodys'"),
        ("qwen2", {"model_type": "qwen2_moe"}, "mixture of experts"),
        ("qwen2", {"model_type": "qwen3_moe"}, "mixture of experts"),
        ("qwen2", {"model_type": "qwen2_5_vl"}, "vision-language"),
        ("gemma3", {"model_type": "gemma2"}, "second Gemma family"),
        ("gemma3", {"use_bidirectional_attention": True}, "bidirectional attention is not supported"),
    ],
)
def test_unsupported_kinds_are_refused_by_name(
    family: str, values: dict[str, Any], words: str, checkpoint: Callable[..., Path], tmp_path: Path, plugins: Plugins
) -> None:
    directory = with_config(checkpoint(family, {}), tmp_path, **values)
    (directory / "model.safetensors").write_bytes(b"not to be looked at")
    with pytest.raises(UnsupportedError, match=words) as caught:
        poros.load(directory, device="cpu", plugins=plugins)
    assert caught.value.hint


def test_a_config_for_another_size_is_refused(
    checkpoint: Callable[..., Path], tmp_path: Path, plugins: Plugins
) -> None:
    with pytest.raises(CheckpointError, match="has shape"):
        poros.load(with_config(checkpoint("qwen2", {}), tmp_path, hidden_size=128), device="cpu", plugins=plugins)


def test_fp4_is_refused(checkpoint: Callable[..., Path], tmp_path: Path, plugins: Plugins) -> None:
    def mark(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q}.quant_state.bitsandbytes__fp4"] = torch.zeros(1, dtype=torch.uint8)

    with pytest.raises(UnsupportedError, match="FP4"):
        poros.load(edited(checkpoint("qwen2", {}), tmp_path, mark), device="cpu", plugins=plugins)


@pytest.mark.parametrize("damage", ["truncate", "empty", "pointer", "delete"])
def test_damaged_shards_are_named_before_anything_is_read(
    damage: str, checkpoint: Callable[..., Path], tmp_path: Path, plugins: Plugins
) -> None:
    copy = tmp_path / "damaged"
    shutil.copytree(checkpoint("qwen2", {}, max_shard_size="40KB"), copy)
    shard = sorted(copy.glob("*.safetensors"))[1]
    size = shard.stat().st_size
    if damage == "delete":
        shard.unlink()
    else:
        content = {
            "truncate": shard.read_bytes()[:-100],
            "empty": b"",
            "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
        }
        shard.write_bytes(content[damage])
    with pytest.raises(CheckpointError, match=shard.name) as caught:
        poros.load(copy, device="cpu", plugins=plugins)
    if damage == "truncate":
        assert f"expected {size} bytes" in caught.value.message
        assert f"found {size - 100} bytes" in caught.value.message


STATE = f"{Q}.quant_state.bitsandbytes__nf4"


def with_state(directory: Path, **values: Any) -> Path:
    """Change what every 4-bit weight of a checkpoint says of itself."""
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if "quant_state" in name]:
        state = json.loads(bytes(tensors[name].tolist()))
        tensors[name] = torch.tensor(list(json.dumps({**state, **values}).encode()), dtype=torch.uint8)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_the_dtype_of_a_stored_weight_is_the_files(
    dtype: str, pre_quantised: Callable[[str], Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    """Restoring a weight rounds to that dtype, so it is part of the numbers."""
    directory = with_state(pre_quantised("qwen2"), dtype=dtype)
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
    values: dict[str, Any], pre_quantised: Callable[[str], Path], plugins: Plugins
) -> None:
    with pytest.raises(CheckpointError, match="Poros reads block sizes"):
        poros.load(with_state(pre_quantised("qwen2"), **values), device="cpu", plugins=plugins)


def test_a_garbled_quant_state_is_refused(pre_quantised: Callable[[str], Path], plugins: Plugins) -> None:
    directory = pre_quantised("qwen2")
    tensors = load_file(directory / "model.safetensors")
    tensors[STATE] = torch.zeros(9, dtype=torch.uint8)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="can't be read"):
        poros.load(directory, device="cpu", plugins=plugins)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "awq"}, "AWQ"),
        ({"quant_method": "gptq", "bits": 4}, "GPTQ"),
        ({"quant_method": "fp8"}, "FP8"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "8-bit"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "FP4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "without double"),
    ],
)
def test_other_ways_of_being_quantised_are_refused_by_name(
    settings: dict[str, Any], words: str, checkpoint: Callable[..., Path], tmp_path: Path, plugins: Plugins
) -> None:
    directory = with_config(checkpoint("qwen2", {}), tmp_path, quantization_config=settings)
    with pytest.raises(UnsupportedError, match=words) as caught:
        poros.load(directory, device="cpu", plugins=plugins)
    assert caught.value.hint


@pytest.mark.parametrize("values", [{"hidden_act": "no-such"}, {"hidden_size": "wide"}, {"num_attention_heads": -1}])
def test_a_config_that_transformers_rejects_is_refused(
    values: dict[str, Any], checkpoint: Callable[..., Path], tmp_path: Path, plugins: Plugins
) -> None:
    with pytest.raises(CheckpointError):
        poros.load(with_config(checkpoint("qwen2", {}), tmp_path, **values), device="cpu", plugins=plugins)


# -- memory (case O-12) -----------------------------------------------------------------------------------------------


class HostMemory(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, and the most that are alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import weakref

        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                key = storage.data_ptr()
                if key and key not in self.alive:
                    self.alive[key] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, key, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def test_host_memory_is_the_store_and_one_tensor(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    config = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
    directory = checkpoint("qwen2", config)
    biggest = max(tensor.nbytes for tensor in load_file(directory / "model.safetensors").values())
    outside = 2 * 128 * 256 * 2 + 256 * 2
    with HostMemory() as memory:
        model = poros.load(directory, device="cpu", plugins=plugins)
    store = engine_of(model).store.nbytes
    slots = 2 * store // 8
    # Quantising one tensor takes its own size in codes and scales besides, and the code tables a few KB.
    assert memory.peak < store + slots + outside + 2 * biggest + 100_000
    # Reading a whole layer in 16 bit before quantising it would not pass.
    layer = 2 * (3 * 256 * 1024 + 2 * 256 * 256 + 2 * 256 * 128)
    assert memory.peak < store + outside + layer


def test_progress_counts_up_to_the_bytes_read(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    seen: list[tuple[int, int]] = []
    poros.load(checkpoint("qwen2", {}), device="cpu", plugins=plugins, progress=lambda *at: seen.append(at))
    assert seen == sorted(seen)
    assert 0 < seen[-1][0] <= seen[-1][1]
