"""How many layers of a model stock can hold."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from poros.config import LoraPart, StreamConfig
from poros.engine.adapters import lora_config
from poros.errors import PorosError
from poros.parity import fit
from poros.parity.fit import MARGIN, cut_to_fit, layers_that_fit, needed_on_gpu
from poros.parity.gate import check
from poros.parity.source import Setting
from poros.parity.stock import Work
from poros.plugins import Plugins

WORK = Work(steps=2, length=16, accumulation=1)
PART = LoraPart(rank=4, dropout=0.1)


@pytest.mark.parametrize("free", [0, 5, 11, 12, 40, 75, 100, 1000])
@pytest.mark.parametrize("beside", [False, True])
def test_as_many_as_fit_and_not_one_more(free: int, beside: bool) -> None:
    def needed(layers: int) -> int:
        return 10 + 3 * layers

    found = layers_that_fit(20, free, needed, beside)
    reserve = needed(3) if beside else 0
    fits = [n for n in range(1, 21) if needed(n) + reserve <= free * MARGIN]
    assert found == max(fits, default=0)


@pytest.mark.parametrize("free", [40, 75, 100])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("steeper", [4, 9, 30])
@pytest.mark.parametrize("out_of_memory", [False, True])
def test_many_layers_that_need_more_than_a_few_suggest(
    free: int, beside: bool, steeper: int, out_of_memory: bool
) -> None:
    def needed(layers: int) -> int:
        found = max(10 + 3 * layers, steeper * layers - 10)
        if out_of_memory and found > free:
            raise torch.OutOfMemoryError("made up")
        return found

    def fits(layers: int) -> bool:
        return max(10 + 3 * layers, steeper * layers - 10) + (19 if beside else 0) <= free * MARGIN

    found = layers_that_fit(20, free, needed, beside)
    assert found <= 3 or fits(found)
    if steeper == 4:
        assert found == max((n for n in range(1, 21) if fits(n)), default=0)


@pytest.mark.parametrize(("most", "fitting"), [(0, 0), (1, 1), (2, 2)])
def test_a_card_too_small_for_measuring(most: int, fitting: int) -> None:
    def needed(layers: int) -> int:
        if layers > most:
            raise torch.OutOfMemoryError("made up")
        return 10

    assert layers_that_fit(20, 10**6, needed) == fitting
    assert layers_that_fit(20, 10**6, needed, beside=True) == 0


def test_a_tiny_model_is_not_measured() -> None:
    assert layers_that_fit(3, 0, lambda layers: 1 // 0) == 3


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_a_checkpoint_cut_to_its_first_layers_is_checked(
    family: str, checkpoint: Callable[..., Path], plugins: Plugins
) -> None:
    directory = checkpoint(family, {})
    result = check(str(directory), lora_config(PART), WORK, layers=2, plugins=plugins)
    assert result.verdict == "identical", str(result.streamed.difference)
    assert result.model == f"{directory} (first 2 layers)"
    whole = check(str(directory), lora_config(PART), WORK, plugins=plugins)
    assert result.trainable < whole.trainable
    assert result.losses != whole.losses


@pytest.mark.parametrize("too_large", [False, True])
def test_nothing_of_what_was_tried_is_left(
    too_large: bool, plugins: Plugins, card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []

    class Model:
        def __init__(self, *args: Any) -> None:
            self.itself = self  # as peft's models have circles
            made.append(weakref.ref(self))

    def train(model: Any, *args: Any) -> None:
        if too_large:
            raise torch.OutOfMemoryError("made up")

    for name, stub in {"random_resident": Model, "get_peft_model": Model, "train": train}.items():
        monkeypatch.setattr(fit, name, stub)
    monkeypatch.setattr(fit, "narrowed", lambda *args: None)
    monkeypatch.setattr(fit, "config_of", lambda model: None)
    monkeypatch.setattr(fit.DecoderParts, "of", lambda *args: SimpleNamespace(layers=[]))
    monkeypatch.setattr(fit, "needed_on_gpu", needed_on_gpu)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    with suppress(PorosError):
        cut_to_fit("qwen2.5-7b", None, setting(plugins), WORK)
    assert made
    assert not any(model() for model in made)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    card = SimpleNamespace(free=10**6, per_layer=10**5)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (card.free, 2 * card.free))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(fit, "needed_on_gpu", lambda *args: lambda layers: 10**5 + card.per_layer * layers)
    return card


def setting(plugins: Plugins, device: str = "cuda") -> Setting:
    return Setting(lora_config(PART), 0, StreamConfig(), torch.device(device), plugins)


def test_a_model_that_is_too_large_is_cut_and_that_is_said(
    card: SimpleNamespace, plugins: Plugins, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = cut_to_fit("qwen2.5-7b", None, setting(plugins), WORK)
    assert found.num_layers == 8
    assert "stock can hold the first 8 of 28 layers" in caplog.text
    assert cut_to_fit("qwen2.5-7b", None, setting(plugins), WORK, beside=True).num_layers == 4


def test_what_fits_is_left_alone(card: SimpleNamespace, plugins: Plugins, checkpoint: Callable[..., Path]) -> None:
    assert cut_to_fit("qwen2.5-7b", None, setting(plugins, "cpu"), WORK).num_layers is None
    card.free = 10**12
    assert cut_to_fit("qwen2.5-7b", None, setting(plugins), WORK).num_layers is None
    card.free, card.per_layer = 10**9, 10
    assert cut_to_fit("qwen2.5-7b", None, setting(plugins), WORK).num_layers is None
    assert cut_to_fit(str(checkpoint("qwen2", {})), None, setting(plugins), WORK).num_layers is None


def test_not_even_one_layer(card: SimpleNamespace, plugins: Plugins) -> None:
    card.free = 1000
    with pytest.raises(PorosError, match="can't hold even one layer of qwen2") as caught:
        cut_to_fit("qwen2.5-7b", None, setting(plugins), WORK)
    assert "--length" in caught.value.hint
