"""Where the gate's two models come from: a checkpoint, or random weights at a published shape."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from peft import get_peft_model
from transformers import AutoConfig

from poros.architecture import Architecture, PublishedShape
from poros.checkpoint.locate import read_config, resolve
from poros.config import StreamConfig
from poros.engine.adapters import lora_part, narrowed
from poros.engine.attach import attach
from poros.engine.budget import planned
from poros.engine.load import load
from poros.engine.parts import config_of
from poros.errors import PorosError
from poros.parity.resident import random_resident
from poros.parity.stock import Work, load_stock
from poros.plan.search import Plan
from poros.plugins import Plugins

if TYPE_CHECKING:
    from peft import LoraConfig


class Source(Protocol):
    """Gives a stock model and a streamed one, with the same weights and the same adapters.

    Attributes:
        name: For the receipt.
        architecture: The family.
    """

    name: str
    architecture: Architecture

    def stock(self) -> Any:
        """The resident peft model. Called once."""

    def streamed(self) -> Any:
        """The streamed peft model. Called once, after `stock`, when nobody else holds the stock model any more."""

    def streamed_beside(self) -> Any:
        """The streamed peft model, for when the stock model goes on living."""


@dataclass(frozen=True)
class Setting:
    """What both kinds of source need to know.

    Attributes:
        lora, seed: The adapters.
        stream, device, plugins: How to stream, and where.
        num_layers: Cut the model to its first layers.
        plan: For the streamed model, if there is a budget; whoever runs it enforces it.
    """

    lora: LoraConfig
    seed: int
    stream: StreamConfig
    device: torch.device
    plugins: Plugins
    num_layers: int | None = None
    plan: Plan | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Of `load` and `attach`: what lives where."""
        return self.stream.model_dump() if self.plan is None else {"plan": self.plan}

    def own_lora(self, architecture: Architecture, config: Any) -> LoraConfig:
        """The adapters' config for one model, the same for stock as for streamed."""
        return narrowed(self.lora, architecture, config)

    @property
    def cut(self) -> str:
        """For a model's name in a receipt."""
        return "" if self.num_layers is None else f"first {self.num_layers} layers"


class CheckpointSource:
    """Both models from a checkpoint. The streamed one is loaded first: it refuses a bad checkpoint at once.

    Args:
        model, revision: A directory or hub id.
        setting: The rest.
    """

    def __init__(self, model: str, revision: str | None, setting: Setting) -> None:
        self.name = f"{model} ({setting.cut})" if setting.cut else model
        self._directory: Path = resolve(model, revision)
        self.architecture = setting.plugins.architecture_for(str(read_config(self._directory)["model_type"]))
        self._setting = setting
        self._streamed = load(
            self._directory,
            lora=setting.lora,
            seed=setting.seed,
            **setting.options,
            device=setting.device,
            plugins=setting.plugins,
            num_layers=setting.num_layers,
        )

    def stock(self) -> Any:
        setting = self._setting
        try:
            config = AutoConfig.from_pretrained(self._directory).get_text_config()
            lora = setting.own_lora(self.architecture, config)
            return load_stock(self._directory, lora, setting.seed, setting.device, setting.num_layers)
        except torch.OutOfMemoryError as error:
            raise PorosError(
                f"the stock run needs the whole model on {setting.device}, and it doesn't fit there",
                "check fewer of its layers with --layers, or a smaller model of the family",
            ) from error

    def streamed(self) -> Any:
        return self._streamed

    def streamed_beside(self) -> Any:
        return self._streamed


class ShapeSource:
    """A stock model with random weights at a published shape; the same model, attached, is the streamed one.

    Args:
        architecture, shape: What to build.
        setting: The rest.
    """

    def __init__(self, architecture: Architecture, shape: PublishedShape, setting: Setting) -> None:
        self.name = f"{shape.id} ({', '.join(filter(None, ['random weights', setting.cut]))})"
        self.architecture = architecture
        self._shape, self._setting = shape, setting
        self._model = self._build()

    def _build(self) -> Any:
        setting = self._setting
        base = random_resident(self.architecture, self._shape.config, setting.device, setting.num_layers, setting.seed)
        torch.manual_seed(setting.seed)
        return get_peft_model(base, setting.own_lora(self.architecture, config_of(base)))

    def stock(self) -> Any:
        return self._model

    def streamed(self) -> Any:
        return self._attached(self._model)

    def streamed_beside(self) -> Any:
        return self._attached(self._build())

    def _attached(self, model: Any) -> Any:
        return attach(model, **self._setting.options, plugins=self._setting.plugins)


def find_source(model: str, revision: str | None, setting: Setting) -> Source:
    """The source that a name means: a published shape's id, unless a directory is called so, or else a checkpoint.

    Raises:
        PorosError: the checkpoint can't be run.
    """
    published = find_published(model, setting.plugins)
    if published is not None:
        return ShapeSource(*published, setting)
    return CheckpointSource(model, revision, setting)


def find_published(model: str, plugins: Plugins) -> tuple[Architecture, PublishedShape] | None:
    """The published shape that a name means, or None: it means a checkpoint."""
    return None if Path(model).exists() else plugins.published(model)


def planned_setting(model: str, revision: str | None, setting: Setting, work: Work) -> Setting:
    """The setting with a plan in it, if its stream has a budget.

    Args:
        model, revision: As for `find_source`.
        setting: The rest.
        work: What will be trained.

    Raises:
        PorosError: the budget is too small.
    """
    if setting.stream.vram is None:
        return setting
    published = find_published(model, setting.plugins)
    if published is not None:
        architecture, values = published[0], published[1].config
    else:
        values = read_config(resolve(model, revision))
        architecture = setting.plugins.architecture_for(str(values["model_type"]))
    plan = planned(
        setting.stream,
        architecture,
        values,
        lora_part(setting.lora),
        tokens=work.batch_size * work.length,
        rows=work.batch_size,
        padded=work.padded and work.batch_size > 1,  # every other row is
        shapes=2 if work.padded else 1,
        micro_batches=work.accumulation,
        num_layers=setting.num_layers,
        device=setting.device,
    )
    return setting if plan is None else dataclasses.replace(setting, plan=plan, stream=plan.stream)
