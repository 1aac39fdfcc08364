"""How many leading layers of a model a card can train resident, so that there is something to compare with.

What a layer needs is measured, not estimated: stock trains two steps of the model cut to one layer and to three, with
random weights, what a layer costs is the difference, and as many layers as that suggests are tried. Nothing of the
checkpoint is read for that.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from peft import get_peft_model
from transformers import AutoConfig

from poros.architecture import Architecture
from poros.checkpoint.locate import read_config, resolve
from poros.engine.adapters import narrowed
from poros.engine.parts import DecoderParts, config_of
from poros.errors import PorosError
from poros.parity.resident import random_resident
from poros.parity.source import Setting, find_published
from poros.parity.stock import Work, train

if TYPE_CHECKING:
    from peft import LoraConfig

log = logging.getLogger(__name__)

MARGIN = 0.93
"""Share of the free memory that is planned with; the rest is for fragments and for what libraries take."""

_FEW, _MORE = 1, 3


def layers_that_fit(num_layers: int, free_bytes: int, needed: Callable[[int], int], beside: bool = False) -> int:
    """How many leading layers fit.

    Args:
        num_layers: Layers of the whole model.
        free_bytes: Free memory of the card.
        needed: Bytes that training the first so many layers takes.
        beside: Whether a streamed model must fit beside the stock one.

    Returns:
        `num_layers` if all do, and 0 if not even one does.
    """
    if num_layers <= _MORE:
        return num_layers
    few = _tried(needed, _FEW)
    if few is None:
        return 0
    more = _tried(needed, _MORE)
    if more is None:
        return 0 if beside else _MORE - 1 if _tried(needed, _MORE - 1) is not None else _FEW
    per_layer = max((more - few) / (_MORE - _FEW), 1.0)
    room = free_bytes * MARGIN - (more if beside else 0)
    fitting = min(num_layers, _FEW + math.floor((room - few) / per_layer))
    # Many layers have another fullest moment than a few, the update instead of the loss: tried, not believed.
    while fitting > _MORE:
        found = _tried(needed, fitting)
        if found is not None and found <= room:
            break
        fitting -= 1 if found is None else max(1, math.ceil((found - room) / per_layer))
    return max(fitting, 0)


def _tried(needed: Callable[[int], int], num_layers: int) -> int | None:
    """What some layers need; None if they don't fit."""
    try:
        return needed(num_layers)
    except torch.OutOfMemoryError:
        return None


def needed_on_gpu(
    architecture: Architecture, config: Mapping[str, Any], lora: LoraConfig, work: Work, device: torch.device
) -> Callable[[int], int]:
    """A function that measures what stock needs on a GPU for a number of leading layers.

    Args:
        architecture: The family.
        config: Values of `config.json`.
        lora, work: What would be trained.
        device: A CUDA device.
    """

    def needed(num_layers: int) -> int:
        _free()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        base = random_resident(architecture, config, device, num_layers)
        model = get_peft_model(base, narrowed(lora, architecture, config_of(base)))
        # From the second step on there are moments.
        train(model, DecoderParts.of(model, architecture).layers, dataclasses.replace(work, steps=2), device)
        return torch.cuda.max_memory_allocated(device) - before

    return needed


def cut_to_fit(model: str, revision: str | None, setting: Setting, work: Work, beside: bool = False) -> Setting:
    """The setting, with the model cut to as many layers as stock can hold if it can't hold all.

    Args:
        model, revision: What is to be checked.
        setting: A number of layers in it stays what it is.
        work: What would be trained.
        beside: Whether both models will be there at a time.

    Raises:
        PorosError: not even one layer fits.
    """
    if setting.device.type != "cuda" or setting.num_layers is not None:
        return setting
    published = find_published(model, setting.plugins)
    if published is not None:
        architecture, config, parameters = published[0], published[1].config, published[1].parameters
    else:
        directory = resolve(model, revision)
        config = read_config(directory)
        architecture = setting.plugins.architecture_for(str(config["model_type"]))
        parameters = sum(file.stat().st_size for file in directory.glob("*.safetensors"))  # in 4 bit, or twice as many
    _free()
    free, _ = torch.cuda.mem_get_info(setting.device)
    if _PLENTY * parameters < free:
        return setting
    whole = int(AutoConfig.for_model(**config).get_text_config().num_hidden_layers)
    needed = needed_on_gpu(architecture, config, setting.lora, work, setting.device)
    fitting = layers_that_fit(whole, free, needed, beside or published is None)
    _free()  # the last model tried: peft's circles keep it alive until they are collected
    if fitting == 0:
        raise PorosError(
            f"stock can't hold even one layer of {model} in the {free / 1e9:.1f} GB that are free",
            "close what else uses the card, or check with shorter rows (--length) or fewer (--batch-size)",
        )
    if fitting == whole:
        return setting
    log.warning("stock can hold the first %d of %d layers in %.1f GB; checking those", fitting, whole, free / 1e9)
    return dataclasses.replace(setting, num_layers=fitting)


_PLENTY = 6
"""Bytes of free memory per parameter at which nothing need be measured."""


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
