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

import poros
from poros.architecture import Architecture
from poros.checkpoint.frozen import frozen_tensors
from poros.config import LoraPart
from poros.engine.adapters import lora_config
from poros.engine.engine import engine_of
from poros.engine.parts import DecoderParts
from poros.errors import CheckpointError, UnsupportedError
from poros.parity.stock import load_stock
from poros.plugins import Plugins

Edited = Callable[[Path, Callable[[dict[str, torch.Tensor]], None]], Path]
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
    edited: Edited,
    plugins: Plugins,
) -> None:
    with pytest.raises(CheckpointError, match=words):
        poros.load(edited(checkpoint("qwen2", {}), change), lora=lora(), device="cpu", plugins=plugins)


def test_several_problems_come_at_once(checkpoint: Callable[..., Path], edited: Edited, plugins: Plugins) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "layers.3" in name]:
            del tensors[name]
        del tensors["model.norm.weight"]

    with pytest.raises(CheckpointError) as caught:
        poros.load(edited(checkpoint("qwen2", {}), change), lora=lora(), device="cpu", plugins=plugins)
    assert caught.value.message.count("is missing") == 10
    assert "and 3 more" in caught.value.message


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


def test_fp4_is_refused(checkpoint: Callable[..., Path], edited: Edited, plugins: Plugins) -> None:
    def mark(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q}.quant_state.bitsandbytes__fp4"] = torch.zeros(1, dtype=torch.uint8)

    with pytest.raises(UnsupportedError, match="FP4"):
        poros.load(edited(checkpoint("qwen2", {}), mark), device="cpu", plugins=plugins)


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
