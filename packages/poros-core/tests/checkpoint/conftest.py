"""Checkpoints that differ from what stock saved."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from poros.config import LoraPart
from poros.engine.adapters import lora_config
from poros.parity.stock import load_stock

Change = Callable[[dict[str, torch.Tensor]], None]


def change_tensors(directory: Path, change: Change) -> Path:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture
def rewritten() -> Callable[[Path, Change], Path]:
    """rewritten(directory, change) -> the same directory, its tensors changed."""
    return change_tensors


@pytest.fixture
def edited(tmp_path: Path) -> Callable[[Path, Change], Path]:
    """edited(directory, change) -> a copy of a checkpoint, its tensors changed."""

    def edit(directory: Path, change: Change) -> Path:
        return change_tensors(Path(shutil.copytree(directory, tmp_path / "edited")), change)

    return edit


@pytest.fixture
def pre_quantised(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """pre_quantised(family) -> a checkpoint that bitsandbytes has quantised, as transformers saves it."""

    def make(family: str) -> Path:
        directory = tmp_path / "quantised"
        stock = load_stock(checkpoint(family, {}), lora_config(LoraPart(rank=4)), 0, torch.device("cpu"))
        stock.unload().save_pretrained(directory)
        return directory

    return make
