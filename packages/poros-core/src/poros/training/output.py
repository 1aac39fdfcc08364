"""What a training run leaves behind, written so that a half-written thing never looks whole.

The adapter is written to a staging folder, counted, flushed to disk and only then moved into place, its config last:
a folder without `adapter_config.json` is no adapter to anybody. A full disk or a kill leaves the staging folder.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open
from torch import nn

from poros.config import RunConfig
from poros.errors import ConfigError, SaveError

ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
RUN_CONFIG = "run.yaml"
RECEIPT = "receipt.jsonl"
LOSS_CURVE = "loss.png"
_STAGING = ".unfinished"


def prepare_folder(config: RunConfig) -> Path:
    """Make the output folder, or refuse one that holds something.

    Raises:
        ConfigError: it is not empty and neither `overwrite` nor `resume` is set, or it can't be written to.
    """
    out = Path(config.out)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"the output folder {out} is a file", "choose another name for out")
    if out.is_dir() and any(out.iterdir()) and not (config.overwrite or config.resume):
        raise ConfigError(
            f"the output folder {out} is not empty",
            "choose another one, pass --overwrite to replace what a run left there, or --resume to go on with it",
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(f"can't write to the output folder {out}: {error.strerror}") from error
    return out


def clear_folder(out: Path) -> None:
    """Remove what an earlier run left in a folder, and nothing else; a folder without a run's config is left alone."""
    if not (out / RUN_CONFIG).is_file():
        return
    for name in (ADAPTER, ADAPTER_CONFIG, RUN_CONFIG, RECEIPT, LOSS_CURVE, "README.md"):
        (out / name).unlink(missing_ok=True)
    for folder in [*out.glob("checkpoint-*"), out / _STAGING]:
        shutil.rmtree(folder, ignore_errors=True)


def save_adapter(model: Any, folder: Path) -> None:
    """Write a peft model's adapter as stock peft does, whole or not at all.

    Args:
        model: A `PeftModel`.
        folder: Where to; made if missing.

    Raises:
        SaveError: what was written is not one tensor for each trainable one, a value isn't finite, or the disk is full.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    spoiled = [name for name, parameter in trainable.items() if not bool(torch.isfinite(parameter).all())]
    if spoiled:
        raise SaveError(
            f"{len(spoiled)} adapter tensors hold values that are not finite, {spoiled[0]} first",
            "nothing was saved; lower the learning rate or look at the data",
        )
    staging = folder / _STAGING
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staging, ignore_errors=True)
        # The embeddings are frozen, so peft need not ask any hub whether they changed size.
        model.save_pretrained(staging, safe_serialization=True, save_embedding_layers=False)
        count_adapter(staging, trainable)
        names = sorted(path.name for path in staging.iterdir())
        for name in sorted(names, key=lambda name: name == ADAPTER_CONFIG):
            flush(staging / name)
            (staging / name).replace(folder / name)
        staging.rmdir()
        flush(folder)
    except OSError as error:
        raise SaveError(
            f"the adapter could not be written to {folder}: {error.strerror or error}",
            f"what is in {staging} is not complete; make room and save again",
        ) from error


def count_adapter(folder: Path, trainable: dict[str, nn.Parameter]) -> None:
    """Check that a folder holds one tensor for each trainable parameter, of its name and size.

    Raises:
        SaveError: it doesn't.
    """
    path = folder / ADAPTER
    if not path.is_file():
        raise SaveError(f"peft wrote no {ADAPTER} into {folder}")
    with safe_open(path, framework="pt") as file:
        saved = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    # peft leaves the adapter's name out: ...lora_A.default.weight is saved as ...lora_A.weight.
    expected = {re.sub(r"\.(lora_[A-Za-z_]+)\.[^.]+\.", r".\1.", name): tuple(p.shape) for name, p in trainable.items()}
    if not expected or saved != expected:
        raise SaveError(
            f"the saved adapter holds {len(saved)} tensors, but {len(expected)} are trained"
            + ("" if len(saved) != len(expected) else ", and their names or shapes differ"),
            "the model's module names don't match what peft expects; this adapter would load as a plain base model",
        )


def flush(path: Path) -> None:
    """Make sure that a file or a folder's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_run_config(config: RunConfig, out: Path) -> None:
    """Write the validated config, from which the run can be repeated; whether to overwrite is asked anew each time."""
    values = config.model_dump(mode="json", exclude={"overwrite", "resume"})
    if config.stream.vram is not None:
        # What was left to the plan is left to it again.
        values["stream"] = config.stream.model_dump(mode="json", exclude_unset=True)
    (out / RUN_CONFIG).write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


def plot_losses(
    path: Path, losses: Sequence[tuple[int, float]], evaluations: Sequence[tuple[int, float]], title: str
) -> None:
    """Draw the loss curve.

    Args:
        path: Of the PNG.
        losses: (step, training loss).
        evaluations: (step, loss on held-out rows).
        title: Above the plot.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), dpi=144, layout="constrained")
    axes = figure.add_subplot()
    steps, values = [step for step, _ in losses], [value for _, value in losses]
    axes.plot(steps, values, color="#9ab7d3", linewidth=1, label="each step")
    if len(values) >= 10:
        axes.plot(steps, _smooth(values), color="#1f4e79", linewidth=2, label="smoothed")
    if evaluations:
        axes.plot(*zip(*evaluations, strict=True), "o-", color="#c0504d", label="held out")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    figure.savefig(path)


def _smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average, corrected for its start (as Adam corrects its moments)."""
    smoothed, average, share = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            average = weight * average + (1 - weight) * value
            share = weight * share + (1 - weight)
        smoothed.append(average / share if share else math.nan)
    return smoothed
