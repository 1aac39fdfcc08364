"""What a run writes: whole, or visibly not there."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import poros
from poros.config import LoraPart, load_config
from poros.engine.adapters import lora_config
from poros.errors import ConfigError, SaveError
from poros.parity.stock import load_stock, make_adapters_count
from poros.plugins import Plugins
from poros.training.output import ADAPTER, ADAPTER_CONFIG, clear_folder, plot_losses, prepare_folder, save_adapter

CPU = torch.device("cpu")


@pytest.fixture
def model(checkpoint: Callable[..., Path], plugins: Plugins) -> Any:
    made = poros.load(
        checkpoint("qwen2", {}), lora=lora_config(LoraPart(rank=4)), seed=0, device="cpu", plugins=plugins
    )
    make_adapters_count(made, 0)
    return made


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_the_adapter_is_the_one_stock_would_save(
    family: str, checkpoint: Callable[..., Path], plugins: Plugins, tmp_path: Path
) -> None:
    lora = lora_config(LoraPart(rank=4))
    stock = load_stock(checkpoint(family, {}), lora, 0, CPU)
    streamed = poros.load(checkpoint(family, {}), lora=lora, seed=0, device="cpu", plugins=plugins)
    for model in (stock, streamed):
        make_adapters_count(model, 0)
    stock.save_pretrained(tmp_path / "stock")
    save_adapter(streamed, tmp_path / "streamed")
    expected, found = load_file(tmp_path / "stock" / ADAPTER), load_file(tmp_path / "streamed" / ADAPTER)
    assert len(expected) == 2 * 7 * 5
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    configs = [json.loads((tmp_path / who / ADAPTER_CONFIG).read_text()) for who in ("stock", "streamed")]
    for config in configs:
        config["target_modules"].sort()
    assert configs[0] == configs[1]
    assert configs[1]["base_model_name_or_path"] == str(checkpoint(family, {}))


def test_the_adapter_loads_in_stock_and_changes_the_logits(
    model: Any, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    save_adapter(model, tmp_path / "adapter")
    ids = torch.tensor([[5, 9, 33, 7]])
    base = AutoModelForCausalLM.from_pretrained(checkpoint("qwen2", {}), dtype=torch.bfloat16)
    with torch.no_grad():
        before = base(input_ids=ids).logits
        loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
        after = loaded(input_ids=ids).logits
    assert not torch.equal(before, after)
    mine, theirs = get_peft_model_state_dict(model), get_peft_model_state_dict(loaded)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def test_saving_never_reaches_for_the_network(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case O-38. The fixture no_network turns a connection into a failure; a hub id is what makes peft ask."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    model.peft_config["default"].base_model_name_or_path = "some-org/some-model"
    save_adapter(model, tmp_path / "adapter")
    saved = json.loads((tmp_path / "adapter" / ADAPTER_CONFIG).read_text())
    assert saved["base_model_name_or_path"] == "some-org/some-model"


def test_an_adapter_with_too_few_tensors_is_an_error(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case O-05: a wrapper that changes module names makes peft save nothing, without an error."""
    stock_save = type(model).save_pretrained

    def save_half(self: Any, folder: Path, **options: Any) -> None:
        state = get_peft_model_state_dict(self)
        stock_save(self, folder, state_dict=dict(list(state.items())[::2]), **options)

    monkeypatch.setattr(type(model), "save_pretrained", save_half)
    with pytest.raises(SaveError, match="holds 35 tensors, but 70 are trained"):
        save_adapter(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter" / ADAPTER_CONFIG).exists()


def test_an_adapter_under_other_names_is_an_error(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock_save = type(model).save_pretrained

    def rename(self: Any, folder: Path, **options: Any) -> None:
        state = {name.replace("q_proj", "other"): t for name, t in get_peft_model_state_dict(self).items()}
        stock_save(self, folder, state_dict=state, **options)
        path = folder / ADAPTER
        save_file({name.replace("o_proj", "other"): t for name, t in load_file(path).items()}, path)

    monkeypatch.setattr(type(model), "save_pretrained", rename)
    with pytest.raises(SaveError):
        save_adapter(model, tmp_path / "adapter")


def test_what_a_failed_save_left_does_not_lock_the_folder(model: Any, tmp_path: Path) -> None:
    (tmp_path / ".unfinished").mkdir()
    (tmp_path / ".unfinished" / "half").write_text("")
    prepare_folder(config(tmp_path, resume=True))
    save_adapter(model, tmp_path)
    assert not (tmp_path / ".unfinished").exists()


def test_an_adapter_that_is_not_finite_is_not_saved(model: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad)[0, 0] = float("nan")
    with pytest.raises(SaveError, match="not finite"):
        save_adapter(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("nth", range(4))
def test_a_full_disk_leaves_no_adapter_that_looks_whole(
    nth: int, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    stock_fsync = os.fsync

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == nth + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        stock_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    folder = tmp_path / "adapter"
    try:
        save_adapter(model, folder)
    except SaveError as error:
        assert "No space left" in error.message
        whole = (folder / ADAPTER_CONFIG).exists() and (folder / ADAPTER).exists()
        assert not whole or nth == 3  # the last flush is of the folder itself, when everything is in place
    else:
        pytest.fail("the error was swallowed")
    monkeypatch.undo()
    save_adapter(model, folder)
    assert len(load_file(folder / ADAPTER)) == 70
    assert not list(folder.glob(".unfinished*"))


def config(out: Path, **values: Any) -> Any:
    return load_config(None, {"model.path": "m", "data.path": "d", "out": str(out), **values})


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "something").write_text("precious")
    with pytest.raises(ConfigError, match="not empty") as caught:
        prepare_folder(config(tmp_path))
    assert "--overwrite" in caught.value.hint
    prepare_folder(config(tmp_path, overwrite=True))
    prepare_folder(config(tmp_path, resume=True))


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        prepare_folder(config(tmp_path / "out"))


def test_a_folder_that_can_not_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't write"):
        prepare_folder(config(tmp_path / "file" / "out"))


def test_overwriting_removes_only_what_a_run_wrote(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("precious")
    (tmp_path / ADAPTER).write_text("old")
    (tmp_path / "README.md").write_text("of the adapter")
    (tmp_path / "checkpoint-3").mkdir()
    clear_folder(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4  # no run's config: this is somebody else's folder
    (tmp_path / "run.yaml").write_text("out: .")
    clear_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("count", [0, 1, 3, 50])
def test_a_loss_curve_is_drawn(count: int, tmp_path: Path) -> None:
    path = tmp_path / "loss.png"
    plot_losses(path, [(step, 1 / (step + 1)) for step in range(count)], [(0, 2.0), (count, 1.0)], "title")
    assert path.read_bytes().startswith(b"\x89PNG")
