"""`poros train`: from a config to an adapter folder.

What can fail cheaply fails first: the output folder, the checkpoint's headers, the tokenizer, the data. Only then is a
weight read. Training itself is the Trainer of transformers; Poros brings the model and looks after what is written.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from poros.architecture import Architecture
from poros.checkpoint.locate import read_config, resolve
from poros.checkpoint.shards import Shards
from poros.checkpoint.skeleton import read_model_config
from poros.config import RunConfig
from poros.engine.adapters import check_lora, lora_config
from poros.engine.attention import attention_path
from poros.engine.budget import limited, planned, process_peak_bytes
from poros.engine.engine import engine_of
from poros.engine.load import default_device, load
from poros.engine.measured import plan_record
from poros.engine.parts import causal_lm, text_marks
from poros.errors import CheckpointError, PorosError, UnsupportedError
from poros.plan.search import Plan
from poros.plugins import Plugins
from poros.provenance import host_peak_bytes, provenance
from poros.receipt import DTYPE_POLICY, Receipt
from poros.training.batches import BatchShapes, batch_shapes
from poros.training.data import Prepared, TokenRow, collator, prepare, render_report
from poros.training.output import (
    LOSS_CURVE,
    RECEIPT,
    clear_folder,
    plot_losses,
    prepare_folder,
    save_adapter,
    write_run_config,
)
from poros.training.progress import StepRecord
from poros.training.rehearsal import rehearse
from poros.training.resume import find_resumable, is_finished, run_identity

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""At least one of these makes a tokenizer."""


class Listener(Protocol):
    """Whoever shows a run to a person."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def advance(self, what: str, done: int, total: int) -> None:
        """A long task has come this far."""

    def step(self, record: StepRecord) -> None:
        """A training step was logged."""


@dataclass(frozen=True)
class TrainResult:
    """What a run left behind.

    Attributes:
        out: The adapter folder.
        receipt: As written to `receipt.jsonl`.
        losses: (step, training loss).
        evaluations: (step, loss on held-out rows).
    """

    out: Path
    receipt: Receipt
    losses: list[tuple[int, float]]
    evaluations: list[tuple[int, float]]


def train(config: RunConfig, plugins: Plugins, listener: Listener) -> TrainResult:
    """Run a whole training run.

    Raises:
        PorosError: the run can't start, or had to stop. A checkpoint that was complete before stays complete.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UnsupportedError(
            "Poros trains in one process, but WORLD_SIZE says there are several", "start it without torchrun"
        )
    out = prepare_folder(config)
    directory = resolve(config.model.path, config.model.revision)
    architecture = plugins.architecture_for(str(read_config(directory)["model_type"]))
    model_config = read_model_config(directory, architecture)
    lora = lora_config(config.lora, config.model.revision)
    check_lora(lora)
    Shards.open(directory).close()
    tokenizer = read_tokenizer(directory)
    vocab_size = int(model_config.get_text_config().vocab_size)

    rows = _prepare(config, tokenizer, vocab_size, None, listener)
    held_out = None
    if config.data.eval_path is not None:
        held_out = _prepare(config, tokenizer, vocab_size, config.data.eval_path, listener)
    identity = run_identity(config, rows.hash)
    resume_from = _resume_from(config, out, identity, listener)
    device = default_device()
    plan = _planned(config, architecture, directory, [rows, *([held_out] if held_out else [])], device, listener)
    with attention_path(config.training.attention), limited(plan, device):
        model = load(
            directory,
            lora=lora,
            seed=config.training.seed,
            plan=plan,
            **({} if plan is not None else config.stream.model_dump()),
            device=device,
            plugins=plugins,
            name=config.model.path,
            progress=lambda done, total: listener.advance("reading the checkpoint", done, total),
        )
        if config.overwrite and resume_from is None:
            clear_folder(out)  # only now is it sure that something will take its place
        try:
            return _run(config, model, tokenizer, rows, held_out, identity, resume_from, out, device, plugins, listener)
        finally:
            engine_of(model).close()


def _planned(
    config: RunConfig,
    architecture: Architecture,
    directory: Path,
    lots: Sequence[Prepared],
    device: torch.device,
    listener: Listener,
) -> Plan | None:
    """The plan for the budget of a run, at its longest row; None without a budget."""
    part, (trained, *_) = config.training, lots
    every = _batch_shapes(config, [row for lot in lots for row in lot.rows])
    plan = planned(
        config.stream,
        architecture,
        read_config(directory),
        config.lora,
        tokens=part.batch_size * every.longest,
        rows=part.batch_size,
        padded=every.padded,
        shapes=_batch_shapes(config, trained.rows).number,  # an evaluation records no graphs
        micro_batches=part.accumulation,
        device=device,
    )
    if plan is not None:
        for line in plan.summary():
            listener.note(line)
    return plan


def _batch_shapes(config: RunConfig, rows: Sequence[TokenRow]) -> BatchShapes:
    lengths = [len(row.input_ids) for row in rows]
    return batch_shapes(lengths, config.training.batch_size, config.data.pad_to_multiple_of)


def read_tokenizer(directory: Path) -> Any:
    """The checkpoint's tokenizer.

    Raises:
        CheckpointError: there is none, or it can't be read.
    """
    from transformers import AutoTokenizer

    # Without any of these files transformers doesn't fail: it makes a tokenizer with an empty vocabulary.
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"there is no tokenizer in {directory}: none of {', '.join(TOKENIZER_FILES)}",
            "put tokenizer.json and tokenizer_config.json of the model beside its weights",
        )
    try:
        return AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        raise CheckpointError(
            f"no tokenizer can be read from {directory}: {' '.join(str(error).split())[:300]}",
            "put tokenizer.json and tokenizer_config.json of the model beside its weights",
        ) from error


def _prepare(config: RunConfig, tokenizer: Any, vocab_size: int, path: str | None, listener: Listener) -> Prepared:
    shown = path or config.data.path
    prepared = prepare(
        config.data,
        tokenizer,
        vocab_size=vocab_size,
        path=path,
        progress=lambda done, total: listener.advance(f"preparing {shown}", done, total),
    )
    for line in render_report(prepared.report):
        listener.note(f"{shown}: {line}")
    return prepared


def _resume_from(config: RunConfig, out: Path, identity: str, listener: Listener) -> Path | None:
    if not config.resume:
        return None
    found = find_resumable(out, identity)
    for line in found.passed_over:
        listener.note(f"passed over {line}")
    where = (
        f"going on from {found.folder.name}" if found.folder else "no complete checkpoint; starting from the beginning"
    )
    listener.note(where)
    return found.folder


def _run(
    config: RunConfig,
    model: Any,
    tokenizer: Any,
    rows: Prepared,
    held_out: Prepared | None,
    identity: str,
    resume_from: Path | None,
    out: Path,
    device: torch.device,
    plugins: Plugins,
    listener: Listener,
) -> TrainResult:
    from transformers import PrinterCallback, TrainerState

    from poros.training.trainer import StepObserver, StreamedTrainer, training_arguments

    losses: list[tuple[int, float]] = []
    evaluations: list[tuple[int, float]] = []

    def on_step(record: StepRecord) -> None:
        losses.append((record.step, record.loss))
        listener.step(record)
        plugins.step_end(record)

    def on_evaluation(step: int, loss: float) -> None:
        evaluations.append((step, loss))
        listener.note(f"held-out loss at step {step}: {loss:.4f}")

    observer = StepObserver(model, identity, engine_of(model).streamer, on_step, on_evaluation)
    trainer = StreamedTrainer(
        model=model,
        args=training_arguments(config, out, device.type == "cpu", held_out is not None),
        train_dataset=rows.dataset(),
        eval_dataset=held_out.dataset() if held_out is not None else None,
        data_collator=collator(
            tokenizer,
            config.data.pad_to_multiple_of,
            vocab_size=model.config.get_text_config().vocab_size,
            marks=text_marks(causal_lm(model)),
        ),
        callbacks=[observer],
    )

    trainer.remove_callback(PrinterCallback)  # it prints every log as a dict; the listener shows them

    if engine_of(model).plan is not None and device.type == "cuda":
        part, shapes = config.training, _batch_shapes(config, rows.rows)
        listener.note(f"rehearsing a step with rows of {shapes.longest} tokens")
        if not rehearse(
            model,
            trainer.rehearsal_step,
            part.batch_size,
            shapes.longest,
            part.accumulation,
            padded=shapes.padded,
            marks=text_marks(causal_lm(model)),
        ):
            listener.note(
                "there was no room to record graphs for the longest row: such rows take longer than planned, with the "
                "same numbers; give a larger vram, and please report a plan that is wrong"
            )

    write_run_config(config, out)
    began = time.perf_counter()
    try:
        if held_out is not None and resume_from is None:
            trainer.evaluate()
        if resume_from is not None and is_finished(resume_from):
            listener.note(f"{resume_from.name} is of the last step; nothing is left to train")
            trainer._load_from_checkpoint(str(resume_from))
            trainer.state = TrainerState.load_from_json(str(resume_from / "trainer_state.json"))
        else:
            trainer.train(resume_from_checkpoint=str(resume_from) if resume_from is not None else None)
        # The Trainer's own history holds the steps before a resume as well.
        losses[:] = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
        if held_out is not None and (not evaluations or evaluations[-1][0] != trainer.state.global_step):
            trainer.evaluate()
        save_adapter(model, out)
    except (PorosError, torch.OutOfMemoryError) as error:
        status = "oom" if isinstance(error, torch.OutOfMemoryError) else "error"
        _receipt(config, model, rows, observer, losses, device, trainer.optimizer, status, str(error)).append(
            out / RECEIPT
        )
        if isinstance(error, PorosError):
            raise
        longest = max(len(row.input_ids) for row in rows.rows)
        raise PorosError(
            f"out of memory; the longest row has {longest} tokens, {config.training.batch_size} rows go at a time",
            "lower data.max_length or training.batch_size; raise training.accumulation to keep the batch",
        ) from error
    receipt = _receipt(config, model, rows, observer, losses, device, trainer.optimizer, "ok", None)
    receipt.append(out / RECEIPT)
    plot_losses(out / LOSS_CURVE, losses, evaluations, f"{Path(config.model.path).name}: {Path(config.data.path).name}")
    listener.note(f"trained in {time.perf_counter() - began:.0f} s")
    return TrainResult(out, receipt, losses, evaluations)


def _receipt(
    config: RunConfig,
    model: Any,
    rows: Prepared,
    observer: Any,
    losses: list[tuple[int, float]],
    device: torch.device,
    optimizer: torch.optim.Optimizer | None,
    status: Any,
    reason: str | None,
) -> Receipt:
    durations = observer.durations[1:] or observer.durations  # the first step warms up
    seconds = statistics.median(durations) if durations else None
    steps = len(observer.durations)
    on_gpu = device.type == "cuda"
    return Receipt(
        kind="train",
        case=config.model.path,
        method="poros",
        model_type=model.config.model_type,
        config=config.model_dump(mode="json"),
        config_hash=config.hash,
        data_hash=rows.hash,
        tokens_per_step=round(statistics.mean(observer.tokens)) if observer.tokens else None,
        trainable_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        dtype_policy=DTYPE_POLICY,
        s_step_median=seconds,
        s_step_std=statistics.stdev(durations) if len(durations) > 1 else None,
        passes=[statistics.median(durations)] if durations else [],
        steps=steps,
        vram_allocated_gb=torch.cuda.max_memory_allocated(device) / 1e9 if on_gpu else None,
        vram_reserved_gb=torch.cuda.max_memory_reserved(device) / 1e9 if on_gpu else None,
        host_peak_gb=host_peak_bytes() / 1e9,
        vram_device_gb=_gb(process_peak_bytes(device) if on_gpu else None),
        plan=plan_record(model, optimizer),
        **observer.traffic().per_step(steps, seconds, engine_of(model).streamer.link_gb_s()),
        losses=[loss for _, loss in losses],
        status=status,
        reason=reason,
        provenance=provenance(),
    )


def _gb(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / 1e9
