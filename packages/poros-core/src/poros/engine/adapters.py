"""Adapters: which ones stream, and whether all of them learn."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import nn

from poros.config import LoraPart
from poros.errors import UnsupportedError

if TYPE_CHECKING:
    from peft import LoraConfig

_PLAIN_INITS = (True, False, "gaussian", "orthogonal")
"""Initialisations that look at shapes only. The others read the base weights, which aren't there yet."""

_REFUSED = {
    "use_dora": "DoRA needs the norms of the base weights",
    "modules_to_save": "modules_to_save trains whole base modules",
    "trainable_token_indices": "trainable_token_indices trains rows of the embedding",
    "layer_replication": "layer_replication makes one layer's weights serve several layers",
    "target_parameters": "target_parameters adapts bare parameters",
}


def check_lora(config: LoraConfig) -> None:
    """Refuse, by name and before anything is loaded, what can't be trained exactly over a streamed base.

    Raises:
        UnsupportedError: for anything but plain LoRA on linear layers.
    """
    kind = type(config).__name__
    if kind != "LoraConfig":
        raise UnsupportedError(f"{kind} adapters are not supported", "use peft.LoraConfig")
    values: dict[str, Any] = vars(config)
    for name, why in _REFUSED.items():
        if values.get(name):
            raise UnsupportedError(f"LoraConfig({name}=...) is not supported: {why}", f"leave {name} out")
    if values.get("bias", "none") != "none":
        raise UnsupportedError(
            f"LoraConfig(bias={config.bias!r}) is not supported: it trains biases of the base", "use bias='none'"
        )
    if values.get("init_lora_weights", True) not in _PLAIN_INITS:
        raise UnsupportedError(
            f"LoraConfig(init_lora_weights={config.init_lora_weights!r}) is not supported: it reads the base weights",
            f"use one of {', '.join(map(repr, _PLAIN_INITS))}",
        )


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
        )
        raise UnsupportedError(
            f"the LoRA targets name nothing in this model: {', '.join(unknown)}",
            f"its linear layers: {', '.join(linears)}",
        )


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
