"""Where the gate's two models come from: a checkpoint, or random weights at a published shape."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from peft import get_peft_model

from poros.architecture import Architecture, PublishedShape
from poros.checkpoint.locate import read_config, resolve
from poros.config import StreamConfig
from poros.engine.attach import attach
from poros.engine.load import load
from poros.errors import PorosError
from poros.parity.resident import random_resident
from poros.parity.stock import load_stock
from poros.plugins import Plugins

if TYPE_CHECKING:
    from peft import LoraConfig


class Source(Protocol):
    """Gives the stock model and then the streamed one, with the same weights and the same adapters.

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


class CheckpointSource:
    """Both models from a checkpoint. The streamed one is loaded first: it refuses a bad checkpoint at once.

    Args:
        model, revision: A directory or hub id.
        lora, seed: The adapters.
        stream, device, plugins: How to stream.
    """

    def __init__(
        self,
        model: str,
        revision: str | None,
        lora: LoraConfig,
        seed: int,
        stream: StreamConfig,
        device: torch.device,
        plugins: Plugins,
    ) -> None:
        self.name = model
        self._directory: Path = resolve(model, revision)
        self.architecture = plugins.architecture_for(str(read_config(self._directory)["model_type"]))
        self._lora, self._seed, self._device = lora, seed, device
        self._streamed = load(
            self._directory,
            lora=lora,
            seed=seed,
            **stream.model_dump(),
            device=device,
            plugins=plugins,
        )

    def stock(self) -> Any:
        try:
            return load_stock(self._directory, self._lora, self._seed, self._device)
        except torch.OutOfMemoryError as error:
            raise PorosError(
                f"the stock run needs the whole model on {self._device}, and it doesn't fit there",
                "check a smaller model of the family on this machine",
            ) from error

    def streamed(self) -> Any:
        return self._streamed


class ShapeSource:
    """A stock model with random weights at a published shape; the same model, attached, is the streamed one.

    Args:
        architecture, shape: What to build.
        layers: Cut it to its first layers.
        lora, seed: The adapters.
        stream, device, plugins: How to stream.
    """

    def __init__(
        self,
        architecture: Architecture,
        shape: PublishedShape,
        layers: int | None,
        lora: LoraConfig,
        seed: int,
        stream: StreamConfig,
        device: torch.device,
        plugins: Plugins,
    ) -> None:
        cut = f", first {layers} layers" if layers is not None else ""
        self.name = f"{shape.id} (random weights{cut})"
        self.architecture = architecture
        self._stream, self._plugins = stream, plugins
        base = random_resident(architecture, shape.config, device, layers, seed)
        torch.manual_seed(seed)
        self._model = get_peft_model(base, lora)

    def stock(self) -> Any:
        return self._model

    def streamed(self) -> Any:
        return attach(self._model, **self._stream.model_dump(), plugins=self._plugins)


def find_source(
    model: str,
    revision: str | None,
    layers: int | None,
    lora: LoraConfig,
    seed: int,
    stream: StreamConfig,
    device: torch.device,
    plugins: Plugins,
) -> Source:
    """The source that a name means: a published shape's id, unless a directory is called so, or else a checkpoint.

    Raises:
        PorosError: the checkpoint can't be run, or `layers` was given for one.
    """
    if not Path(model).exists():
        for architecture in plugins.architectures():
            for shape in architecture.published:
                if shape.id == model:
                    return ShapeSource(architecture, shape, layers, lora, seed, stream, device, plugins)
    if layers is not None:
        raise PorosError("only published shapes can be cut to fewer layers", "leave --layers out for a checkpoint")
    return CheckpointSource(model, revision, lora, seed, stream, device, plugins)
