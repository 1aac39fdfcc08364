"""The reference: a resident QLoRA run made of transformers, peft, bitsandbytes and torch, and nothing of Poros."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from poros.checkpoint.skeleton import attention_of, cut_layers
from poros.engine.parts import causal_lm, text_marks
from poros.parity.surfaces import CPU, Trace, record_layer_outputs

Accumulate = Callable[[Sequence[Callable[[], None]]], object]
"""Runs the forward and backward passes of a step's micro-batches."""

MakeOptimizer = Callable[..., torch.optim.Optimizer]
"""Makes an optimizer of parameters and keyword arguments of `torch.optim.AdamW`."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The training that each arm of the gate does.

    Attributes:
        steps: Optimizer steps.
        batch_size: Rows per micro-batch.
        padded: Whether every other row of a micro-batch ends in padding.
        length: Tokens per row.
        accumulation: Micro-batches per optimizer step.
        seed: Of adapters, data and dropout.
        learning_rate: Of AdamW. Large enough that each step moves the adapters visibly.
    """

    steps: int = 5
    batch_size: int = 2
    padded: bool = True
    length: int = 64
    accumulation: int = 2
    seed: int = 0
    learning_rate: float = 1e-3


def load_stock(
    directory: Path, lora: LoraConfig, seed: int, device: torch.device, num_layers: int | None = None
) -> Any:
    """A resident `PeftModel` as the libraries' own documentation builds it.

    A checkpoint that is quantised already brings its own quantisation config. With `num_layers`, only the first layers
    are built and loaded.
    """
    from transformers import AutoConfig

    model_config = cut_layers(AutoConfig.from_pretrained(directory), num_layers)
    stored = getattr(model_config, "quantization_config", None)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        directory,
        config=model_config,
        dtype=torch.bfloat16,
        attn_implementation=attention_of(model_config),
        device_map={"": str(device)},
        **({} if stored is not None else {"quantization_config": config}),
    )
    torch.manual_seed(seed)
    return get_peft_model(model, lora)


def adapters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def make_adapters_count(model: nn.Module, seed: int) -> None:
    """Give every lora_B values other than zero: with zeros every gradient of lora_A vanishes and the gate is blind."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapters_of(model).items():
            if "lora_B" in name:
                parameter.copy_(torch.empty(parameter.shape).normal_(0, 0.02, generator=generator))


def make_batches(work: Work, vocab_size: int) -> list[dict[str, Tensor]]:
    """Random token rows, one dict per micro-batch: input_ids, attention_mask, labels, each [batch, length], int64.

    Padding is on the right, a quarter of the row.
    """
    generator = torch.Generator().manual_seed(work.seed)
    batches = []
    for _ in range(work.steps * work.accumulation):
        ids = torch.randint(0, vocab_size, (work.batch_size, work.length), generator=generator)
        mask = torch.ones_like(ids)
        if work.padded:
            mask[1::2, work.length - work.length // 4 :] = 0
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return batches


def one_by_one(micro_steps: Sequence[Callable[[], None]]) -> object:
    """Run micro-batches as an ordinary loop does."""
    return [step() for step in micro_steps]


def train(
    model: Any,
    layers: list[nn.Module],
    work: Work,
    device: torch.device,
    on_step: Callable[[], None] = lambda: None,
    accumulate: Accumulate = one_by_one,
    make_optimizer: MakeOptimizer = torch.optim.AdamW,
) -> Trace:
    """Run `training_steps` to the end and keep everything, on the CPU.

    Args:
        model, layers, work, device, accumulate, make_optimizer: As there.
        on_step: Called after each step.
    """
    trace = Trace()
    for part in training_steps(model, layers, work, device, accumulate, make_optimizer=make_optimizer):
        trace.tensors.update(part.tensors)
        on_step()
    return trace


def training_steps(
    model: Any,
    layers: list[nn.Module],
    work: Work,
    device: torch.device,
    accumulate: Accumulate = one_by_one,
    keep_on: torch.device | None = None,
    control: bool = False,
    make_optimizer: MakeOptimizer = torch.optim.AdamW,
) -> Iterator[Trace]:
    """The plain training loop of the gate, the same for stock and streamed, recorded on every surface.

    bf16 autocast, AdamW, clipping at norm 1. The model's adapters are trained from where they are.

    Args:
        model: A peft model.
        layers: Its decoder layers.
        work: What to do.
        device: Where the model computes.
        accumulate: Runs the micro-batches of a step; a streamed model may run them block by block.
        keep_on: Where the recorded tensors go; the CPU by default.
        make_optimizer: Makes AdamW; a streamed model may have one whose moments are in host memory.
        control: Whether to go on after the last step with one more, on the first batches, for a control arm.

    Yields:
        The trace of each step. The first one (and the control step) holds the layers' outputs before it as well, the
        last one the final states.
    """
    adapters = adapters_of(model)
    optimizer = make_optimizer(list(adapters.values()), lr=work.learning_rate)
    batches = make_batches(work, model.config.get_text_config().vocab_size)
    trace = Trace(keep_on=keep_on or CPU)

    marks = text_marks(causal_lm(model))

    def forward(batch: dict[str, Tensor]) -> Any:
        batch = {**batch, **{name: torch.zeros_like(batch["input_ids"]) for name in marks}}
        with torch.autocast(device.type, torch.bfloat16):
            return model(**{name: tensor.to(device) for name, tensor in batch.items()}, use_cache=False)

    def micro_step(step: int, micro: int, batch: dict[str, Tensor]) -> None:
        output = forward(batch)
        (output.loss / work.accumulation).backward()
        trace.record("loss", step, f"micro-batch {micro + 1}", output.loss)
        if step == 1 and micro == 0:
            trace.record("logits", step, "logits", output.logits)

    def look_at_layers() -> None:
        torch.manual_seed(work.seed)
        with torch.no_grad():
            record_layer_outputs(lambda: forward(batches[0]), layers, trace)

    model.train()
    look_at_layers()
    torch.manual_seed(work.seed)
    for step in range(1, work.steps + 1 + control):
        first = (step - 1) % work.steps * work.accumulation
        if step > work.steps:
            look_at_layers()
        optimizer.zero_grad(set_to_none=True)
        todo = batches[first : first + work.accumulation]
        accumulate([partial(micro_step, step, micro, batch) for micro, batch in enumerate(todo)])
        for name, parameter in adapters.items():
            gradient = gradient_of(optimizer, parameter)
            if gradient is not None:
                trace.record("gradients", step, name, gradient)
        norm = clip_gradients(optimizer, list(adapters.values()), 1.0)
        trace.record("gradient_norm", step, "gradient norm", norm)
        optimizer.step()
        for name, parameter in adapters.items():
            trace.record("adapters", step, name, parameter)
        if step == work.steps:
            _record_final_states(trace, adapters, optimizer, device, step)
        yield trace
        trace = Trace(keep_on=trace.keep_on)


def gradient_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Tensor | None:
    """A parameter's gradient; a streamed model's optimizer may know of another place than `grad`."""
    find = getattr(optimizer, "gradient", None)
    found: Tensor | None = parameter.grad if find is None else find(parameter)
    return found


def clip_gradients(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Clip by torch's function, or by the optimizer's own if it keeps the gradients."""
    clip = getattr(optimizer, "clip_grad_norm_", None)
    norm: Tensor = torch.nn.utils.clip_grad_norm_(parameters, max_norm) if clip is None else clip(max_norm)
    return norm


def _record_final_states(
    trace: Trace, adapters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, device: torch.device, step: int
) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # moments may be on their way to host memory
    for name, parameter in adapters.items():
        for key, value in optimizer.state[parameter].items():
            trace.record("optimizer_state", step, f"{name}.{key}", torch.as_tensor(value))
    trace.record("rng_state", step, "cpu", torch.get_rng_state())
    if device.type == "cuda":
        trace.record("rng_state", step, "cuda", torch.cuda.get_rng_state(device))
