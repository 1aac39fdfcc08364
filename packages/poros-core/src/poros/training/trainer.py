"""The Trainer of transformers over a streamed model: its own loop, with Poros's checks and records around it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from poros.config import RunConfig
from poros.engine.engine import engine_of
from poros.engine.executor import rng_state, set_rng_state
from poros.engine.optimizer import HostAdamW, adamw_class
from poros.errors import StreamError
from poros.stream.streamer import StreamCounts, Streamer
from poros.training.output import save_adapter
from poros.training.progress import StepRecord
from poros.training.resume import write_manifest


class StreamedTrainer(Trainer):  # type: ignore[misc]
    """`transformers.Trainer` over a streamed model.

    The micro-batches of an optimizer step go through the blocks together, so the base travels once for all of them, and
    checkpoints hold the adapter whole or not at all.
    """

    _window: list[Any] | None = None
    _losses: list[Any] | None = None

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        samples, num_items = super().get_batch_samples(*args, **kwargs)
        self._window, self._losses = (samples, []) if len(samples) > 1 else (None, None)
        return samples, num_items

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if self._window is None:
            return self._stock_step(model, inputs, num_items_in_batch)
        if not self._losses:
            # The Trainer asks for one micro-batch after the other; the first asking runs them all.
            steps = [partial(self._stock_step, model, dict(sample), num_items_in_batch) for sample in self._window]
            self._losses = engine_of(model).accumulate(steps)
        return self._losses.pop(0)

    def _stock_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        with loss_only(self.model):
            return super().training_step(model, inputs, num_items_in_batch)

    def rehearsal_step(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """A micro-batch's forward and backward pass as in training, before that has begun."""
        model = self.accelerator.prepare_model(self.model)  # training takes what has been prepared as it is
        # Training sets this for every step; a loss that the model's class doesn't normalise itself is divided by it.
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self._stock_step(model, dict(inputs), torch.tensor(inputs["labels"].numel()))

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        with loss_only(self.model) if prediction_loss_only else nullcontext():
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def get_optimizer_cls_and_kwargs(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """The Trainer's own choice; where that is torch's AdamW, with its moments where the model's settings say."""
        chosen, options = super().get_optimizer_cls_and_kwargs(*args, **kwargs)
        if chosen is not torch.optim.AdamW:
            return chosen, options
        own, places = adamw_class(engine_of(self.model))
        return own, {**options, **places}

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own; gradients that are on the host are clipped by the optimizer that uses them."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if engine_of(self.model).gradients is not None and isinstance(optimizer, HostAdamW):
            self.accelerator.clip_grad_norm_ = lambda parameters, max_norm, norm_type=2: optimizer.clip_grad_norm_(
                max_norm
            )
        return optimizer

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate without moving the random generators, so that looking changes nothing in what is trained."""
        device = self.args.device
        states = {where: rng_state(where) for where in {torch.device("cpu"), torch.device(device)}}
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            for where, state in states.items():
                set_rng_state(state, where)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        save_adapter(self.accelerator.unwrap_model(self.model), Path(output_dir or self.args.output_dir))


@contextmanager
def loss_only(model: Any) -> Iterator[None]:
    """Let a peft model's forward give its loss and nothing else.

    accelerate turns whatever a forward gives into float32: of the logits that is a copy of twice their size, which is
    there at the fullest moment of a step and which nobody reads. Logits without a loss stay: somebody will make one.
    """

    def drop(module: Any, args: Any, output: Any) -> Any:
        loss = getattr(output, "loss", None)
        return output if loss is None else type(output)(loss=loss)

    # peft calls the base's `forward` itself, past its hooks; what it calls as a module is the tuner in between.
    hook = model.base_model.register_forward_hook(drop)
    try:
        yield
    finally:
        hook.remove()


class StepObserver(TrainerCallback):  # type: ignore[misc]
    """Watches the optimizer loop.

    Args:
        model: The peft model, to see that every adapter learns.
        identity: Written into the manifest of each checkpoint.
        streamer: Of the model.
        on_step: Told of every logged step.
        on_evaluation: Told of every evaluation: step and loss.
    """

    def __init__(
        self,
        model: Any,
        identity: str,
        streamer: Streamer,
        on_step: Callable[[StepRecord], None],
        on_evaluation: Callable[[int, float], None],
    ) -> None:
        self._adapters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._gradients = engine_of(model).gradients
        self._identity = identity
        self._streamer = streamer
        self._on_step = on_step
        self._on_evaluation = on_evaluation
        self._checked = False
        self._began = time.perf_counter()
        self._seen = 0
        self.durations: list[float] = []
        self.tokens: list[int] = []
        self._start = self._last = streamer.measured()
        self._evaluating = StreamCounts(copy_seconds=0.0, stall_seconds=0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._checked:
            return
        self._checked = True
        elsewhere = self._gradients
        idle = [
            name
            for name, parameter in self._adapters
            if parameter.grad is None and (elsewhere is None or parameter not in elsewhere)
        ]
        if idle:
            raise StreamError(
                f"{len(idle)} of {len(self._adapters)} adapter tensors got no gradient in the first step: {idle[0]}",
                "they would stay as they are; leave the layers they belong to out of lora.targets",
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.durations.append(time.perf_counter() - self._began)
        self._last = self._streamer.measured()
        self.tokens.append(state.num_input_tokens_seen - self._seen)
        self._seen = state.num_input_tokens_seen

    def traffic(self) -> StreamCounts:
        """What travelled in training steps; evaluations are left out."""
        return self._streamer.measured().since(self._start).since(self._evaluating)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._seen = state.num_input_tokens_seen  # not zero in a resumed run

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        loss, norm = float(logs["loss"]), float(logs.get("grad_norm", math.nan))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise StreamError(
                f"step {state.global_step}: the loss is {loss} and the gradient norm {norm}",
                "lower training.learning_rate, or look for rows with extreme content; checkpoints so far are intact",
            )
        self._on_step(
            StepRecord(
                step=state.global_step,
                steps=state.max_steps,
                loss=loss,
                gradient_norm=norm,
                learning_rate=float(logs.get("learning_rate", math.nan)),
                tokens=self.tokens[-1] if self.tokens else 0,
                seconds=self.durations[-1] if self.durations else 0.0,
            )
        )

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        now = self._streamer.measured()
        self._evaluating, self._last = self._evaluating.plus(now.since(self._last)), now
        if metrics and "eval_loss" in metrics:
            self._on_evaluation(state.global_step, float(metrics["eval_loss"]))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        write_manifest(Path(args.output_dir) / f"checkpoint-{state.global_step}", self._identity)


def training_arguments(config: RunConfig, out: Path, on_cpu: bool, evaluates: bool = False) -> TrainingArguments:
    """The Trainer's arguments for a run's config: bf16 autocast, torch's AdamW, nothing reported anywhere.

    Args:
        config: The run.
        out: Where checkpoints go.
        on_cpu: Whether to stay on the CPU.
        evaluates: Whether there are held-out rows.
    """
    part = config.training
    return TrainingArguments(
        output_dir=str(out),
        max_steps=part.steps if part.steps is not None else -1,
        num_train_epochs=part.epochs,
        per_device_train_batch_size=part.batch_size,
        per_device_eval_batch_size=part.batch_size,
        gradient_accumulation_steps=part.accumulation,
        learning_rate=part.learning_rate,
        lr_scheduler_type=part.schedule,
        warmup_steps=part.warmup_steps,
        weight_decay=part.weight_decay,
        max_grad_norm=part.max_grad_norm,
        optim="adamw_torch",
        bf16=True,
        use_cpu=on_cpu,
        seed=part.seed,
        data_seed=part.seed,
        logging_strategy="steps",
        logging_steps=part.log_every,
        logging_nan_inf_filter=False,  # it would show the last finite loss in place of NaN
        save_strategy="steps" if part.save_every is not None else "no",
        save_steps=part.save_every or 1,
        save_total_limit=part.keep_checkpoints,
        eval_strategy="steps" if evaluates and part.eval_every is not None else "no",
        eval_steps=part.eval_every,
        prediction_loss_only=True,  # keeping the logits of an evaluation takes more memory than training
        remove_unused_columns=False,
        dataloader_pin_memory=not on_cpu,
        include_num_input_tokens_seen="all",
        report_to=[],
        disable_tqdm=True,
    )
