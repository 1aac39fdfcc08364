"""Adapters: which ones stream, and whether all of them learn."""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from poros.architecture import Architecture
from poros.config import LoraPart
from poros.errors import UnsupportedError
from poros.plan.adapters import PeftPart, is_adapted

if TYPE_CHECKING:
    from peft import LoraConfig

log = logging.getLogger(__name__)

_PLAIN_INITS = (True, False, "gaussian")
"""Initialisations that look at shapes only. The others read the base weights, which aren't there yet."""

_PLAIN = frozenset(
    "peft_type task_type auto_mapping peft_version base_model_name_or_path revision inference_mode runtime_config r "
    "lora_alpha lora_dropout target_modules exclude_modules rank_pattern alpha_pattern layers_to_transform "
    "layers_pattern use_rslora fan_in_fan_out bias init_lora_weights".split()
)
"""Fields of `LoraConfig` that may differ from their defaults. Any other is a variant that Poros doesn't know."""


def check_lora(config: LoraConfig) -> None:
    """Refuse, by name and before anything is loaded, what can't be trained exactly over a streamed base.

    Raises:
        UnsupportedError: for anything but plain LoRA on linear layers.
    """
    kind = type(config)
    if kind.__name__ != "LoraConfig":
        raise UnsupportedError(f"{kind.__name__} adapters are not supported", "use peft.LoraConfig")
    usual = vars(kind())
    for name, value in vars(config).items():
        if name not in _PLAIN and value != usual.get(name) and not name.startswith("_"):
            raise UnsupportedError(
                f"LoraConfig({name}=...) is not supported: Poros trains plain LoRA on linear layers",
                f"leave {name} out",
            )
    if config.bias != "none":
        raise UnsupportedError(
            f"LoraConfig(bias={config.bias!r}) is not supported: it trains biases of the base", "use bias='none'"
        )
    if config.init_lora_weights not in _PLAIN_INITS:
        raise UnsupportedError(
            f"LoraConfig(init_lora_weights={config.init_lora_weights!r}) is not supported: it reads the base weights",
            f"use one of {', '.join(map(repr, _PLAIN_INITS))}",
        )


def narrowed(lora: LoraConfig, architecture: Architecture, config: Any) -> LoraConfig:
    """A copy of an adapter config whose targets are linear layers inside the decoder layers only.

    peft would also reach a vision tower or the projection of per-layer embeddings, which Poros leaves as they are. A
    copy in any case: peft writes the names that it finds in a model into the config it is given.

    Args:
        lora: What was asked for.
        architecture: The family.
        config: The model's text config.
    """
    made = copy.deepcopy(lora)
    if made.exclude_modules is None and architecture.has_outer_linears(config):
        made.exclude_modules = rf"(?!{re.escape(f'{architecture.decoder}.{architecture.layers}.')}).*"
        if made.target_modules == "all-linear":
            inside = f"{architecture.decoder}.{architecture.layers}"
            log.warning("all-linear is narrowed to the linear layers inside %s", inside)
    return made


def with_adapters(model: Any, lora: LoraConfig) -> Any:
    """The peft model around a model that may lack the parts which the config excludes."""
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You have passed exclude_modules")
        return get_peft_model(model, lora)


def check_targets(config: LoraConfig, model: nn.Module) -> None:
    """Refuse targets that name nothing in the model; peft itself complains only when none of them does.

    Raises:
        UnsupportedError: naming the targets, and the linear layers that there are.
    """
    names = [name for name, _ in model.named_modules() if name]
    targets = config.target_modules
    if targets == "all-linear" or targets is None:
        return
    if isinstance(targets, str):
        unknown = [] if any(re.fullmatch(targets, name) for name in names) else [targets]
    else:
        unknown = [t for t in sorted(targets) if not any(name == t or name.endswith(f".{t}") for name in names)]
    if unknown:
        linears = sorted(
            {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
            - {"lm_head"}
        )
        raise UnsupportedError(
            f"the LoRA targets name nothing in this model: {', '.join(unknown)}",
            f"its linear layers: {', '.join(linears)}",
        )


def say_coverage(config: LoraConfig, layers: Sequence[nn.Module], path: str) -> None:
    """Warn of targets that only some layers have: v_proj, say, where global layers use their keys as values.

    Layers that the config itself leaves out are no news, and where it leaves out all there is nothing to say.

    Args:
        config: What peft is given; only targets given by name are looked at.
        layers: The decoder layers.
        path: Of the list of layers in the model, by which the config may leave some out.
    """
    targets = config.target_modules
    for target in sorted(targets) if isinstance(targets, (list, set, tuple)) else ():
        part = _peft_part(config).model_copy(update={"targets": (target,)})
        named = part.model_copy(update={"excluded": (), "only_layers": None})
        there, reached = (
            sum(
                any(is_adapted(one, f"{path}.{number}.{name}", number) for name, _ in layer.named_modules())
                for number, layer in enumerate(layers)
            )
            for one in (named, part)
        )
        if reached and there < len(layers):
            log.warning("the LoRA target %s is in %d of %d layers", target, there, len(layers))


def lora_config(part: LoraPart, revision: str | None = None) -> LoraConfig:
    """The peft config for the `lora` part of a run's config, naming the base's revision."""
    from peft import LoraConfig

    return LoraConfig(
        r=part.rank,
        lora_alpha=part.alpha,
        lora_dropout=part.dropout,
        target_modules=part.targets if part.targets == "all-linear" else list(part.targets),
        task_type="CAUSAL_LM",
        revision=revision,
    )


def lora_part(config: LoraConfig | None) -> LoraPart:
    """What a plan needs to know of adapters; usual ones if there are none yet."""
    return LoraPart() if config is None else _peft_part(config)


def _peft_part(config: LoraConfig) -> PeftPart:
    targets, excluded, layers = config.target_modules, config.exclude_modules or (), config.layers_to_transform
    named = tuple(targets) if isinstance(targets, (list, set, tuple)) and targets else "all-linear"
    return PeftPart(
        rank=config.r,
        targets=named,
        pattern=targets if isinstance(targets, str) and targets != "all-linear" else None,
        excluded=excluded if isinstance(excluded, str) else tuple(excluded),
        only_layers=None if layers is None or layers == [] else (layers,) if isinstance(layers, int) else tuple(layers),
        rank_pattern=dict(config.rank_pattern or {}),
        dropout=float(config.lora_dropout or 0.0),
    )


def lora_there(layers: Sequence[nn.Module]) -> LoraPart:
    """The same of a model that has its adapters, all of them counted; usual ones if there are none yet.

    Args:
        layers: The decoder layers.
    """
    # A layer whose adapters were all deleted is still one of peft's, with nothing in it.
    found = [{n: m for n, m in layer.named_modules() if isinstance(m, LoraLayer) and m.r} for layer in layers]
    adapted = [module for layer in found for module in layer.values()]
    if not adapted:
        return LoraPart()
    dropped = any(isinstance(one, nn.Dropout) and one.p for module in adapted for one in module.lora_dropout.values())
    return PeftPart(
        rank=max(max(module.r.values()) for module in adapted),
        dropout=0.1 if dropped else 0.0,  # how much doesn't matter to a plan
        there=tuple({name: sum(module.r.values()) for name, module in layer.items()} for layer in found),
    )


def put_side_by_side(parameters: Sequence[nn.Parameter]) -> None:
    """Move parameters out of the gaps between weights that have left the device, to memory next to each other.

    A card's memory is given back in pages, and each page in which one small adapter is left stays taken: of a 72B model
    more than a gigabyte. The parameters stay the same objects.
    """
    here = [parameter.device for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.to("cpu", copy=True)
    if any(device.type == "cuda" for device in here):
        torch.cuda.empty_cache()
    for parameter, device in zip(parameters, here, strict=True):
        parameter.data = parameter.data.to(device)
