"""The gate with both models at a time: the same verdicts, whatever the number of steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from poros.config import LoraPart, StreamConfig
from poros.engine.adapters import lora_config
from poros.engine.executor import Visit
from poros.parity import lockstep
from poros.parity.gate import check, corrupt, receipt_of
from poros.parity.lockstep import check_in_lockstep
from poros.parity.stock import Work
from poros.parity.surfaces import SURFACES
from poros.plugins import Plugins

WORK = Work(steps=4, length=16, accumulation=2)
PART = LoraPart(rank=4, dropout=0.1)


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_identical_and_as_the_ordinary_gate_finds_it(
    family: str, checkpoint: Callable[..., Path], plugins: Plugins
) -> None:
    told: list[tuple[str, int, int]] = []
    stream = StreamConfig(block_size=2)
    directory = str(checkpoint(family, {}))
    result = check_in_lockstep(
        directory, lora_config(PART), WORK, stream=stream, plugins=plugins, announce=lambda *what: told.append(what)
    )
    assert result.verdict == "identical", str(result.streamed.difference)
    assert result.surfaces == dict.fromkeys(SURFACES, True)
    assert result.control_found == result.control_block
    assert told[-1] == ("in lockstep", 4, 4)
    ordinary = check(directory, lora_config(PART), WORK, stream=stream, plugins=plugins)
    assert result.losses == ordinary.losses
    assert result.streamed.compared == ordinary.streamed.compared
    receipt = receipt_of(result, PART)
    assert receipt.config["lockstep"] is True
    assert set(receipt.arms) == {"stock", "streamed"}


def test_one_step_has_a_time(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    work = Work(steps=1, length=16, accumulation=1)
    result = check_in_lockstep(str(checkpoint("qwen2", {})), lora_config(PART), work, plugins=plugins)
    assert result.verdict == "identical"
    assert all(seconds > 0 for seconds in result.seconds.values())


def test_a_published_shape_cut_to_its_first_layers(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models are built, and the second one streams."""
    built = []
    right = lockstep.find_source

    def spy(*args: Any) -> Any:
        source = right(*args)
        built.append(source)
        return source

    monkeypatch.setattr(lockstep, "find_source", spy)
    work = Work(steps=2, batch_size=1, length=8, accumulation=1)
    result = check_in_lockstep("gemma3-270m", lora_config(LoraPart(rank=2)), work, layers=2, plugins=plugins)
    assert result.verdict == "identical", str(result.streamed.difference)
    assert result.model == "gemma3-270m (random weights, first 2 layers)"
    assert built


def test_one_late_wrong_gradient_is_told_apart(
    checkpoint: Callable[..., Path], plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the third step's backward pass is wrong, by one bit of one gradient."""
    directory = checkpoint("qwen2", {})
    layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    right = Visit.backward
    calls = 0

    def wrong(self: Visit, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        first, gradients = right(self, *args, **kwargs)
        if calls == 2 * WORK.accumulation * layers + 1:
            assert gradients[0] is not None
            gradients[0].view(torch.int32)[0, 0] ^= 1
        return first, gradients

    monkeypatch.setattr(Visit, "backward", wrong)
    result = check_in_lockstep(str(directory), lora_config(PART), WORK, plugins=plugins)
    assert result.verdict == "different"
    assert result.surfaces["logits"] is True
    assert result.surfaces["gradients"] is False
    assert result.streamed.difference is not None
    assert result.streamed.difference.key.step == 3
    assert result.streamed.difference.key.surface == "gradients"


def test_a_control_arm_that_is_not_caught_is_said(
    checkpoint: Callable[..., Path], plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockstep, "corrupt", lambda engine, block: None)
    result = check_in_lockstep(str(checkpoint("qwen2", {})), lora_config(PART), WORK, plugins=plugins)
    assert result.verdict == "control arm not caught"
    assert corrupt is not lockstep.corrupt
