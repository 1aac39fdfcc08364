"""Nothing of a step outlives it: what the tensors of the process take is the same after every step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import poros
from poros.architecture import Architecture
from poros.config import LoraPart
from poros.engine.adapters import lora_config
from poros.engine.engine import engine_of
from poros.engine.optimizer import adamw_for
from poros.plugins import Plugins

SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "on the host": {"embedding": "host", "head": "host", "boundaries": "host", "loss_rows": 16},
    "gradients too": {"optimizer": "host", "gradients": "host"},
    "kept": {"resident": "all", "recompute": False},
    "partly kept": {"resident": 2, "recompute": False},
}

E_SERIES = {
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 8,
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
    "num_key_value_heads": 1,
}


def live_bytes() -> int:
    """Bytes of all memory that some tensor refers to."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor) and found.layout is torch.strided:
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["qwen2", "gemma4"])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_no_step_leaves_anything_behind(
    family: str,
    settings: str,
    accumulation: int,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
) -> None:
    series = {} if family == "qwen2" else E_SERIES
    model = poros.load(
        checkpoint(family, series),
        lora=lora_config(LoraPart(rank=4, dropout=0.1)),
        seed=0,
        device="cpu",
        plugins=plugins,
        **SETTINGS[settings],
    )
    model.train()
    optimizer = adamw_for(engine_of(model))([p for p in model.parameters() if p.requires_grad])

    def micro_step(number: int) -> torch.Tensor:
        ids = torch.arange(24).view(1, -1) + number
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        (loss / accumulation).backward()
        return loss.detach()

    taken = []
    for _ in range(4):
        engine_of(model).accumulate([partial(micro_step, number) for number in range(accumulation)])
        with torch.no_grad():
            model(input_ids=torch.arange(24).view(1, -1))
        optimizer.zero_grad()
        taken.append(live_bytes())
    assert taken[1:] == [taken[1]] * 3


def test_the_count_sees_what_is_left_behind() -> None:
    """The control arm: a circle through autograd, which Python's collector can't break."""
    before = live_bytes()

    def circle() -> None:
        leaf = torch.zeros(1000, requires_grad=True)
        held: dict[str, Any] = {}
        leaf.register_hook(lambda gradient: held.update(seen=True))
        held["output"] = leaf * 2

    circle()
    assert live_bytes() >= before + 4000
