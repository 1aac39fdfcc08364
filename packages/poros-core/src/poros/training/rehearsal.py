"""A rehearsal: one step's passes at the longest row, before a planned run begins.

It finds out in seconds whether the plan holds, instead of hours later when the longest row comes up, and it records the
graphs of the largest shape. Nothing of it stays: no gradient, no random number drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from poros.engine.engine import engine_of
from poros.engine.executor import rng_state, set_rng_state
from poros.engine.graphs import GraphExecutor
from poros.errors import BudgetError


def rehearse(
    model: Any,
    micro_step: Callable[[Mapping[str, Tensor]], None],
    rows: int,
    tokens: int,
    micro_batches: int,
    *,
    padded: bool = True,
    marks: Sequence[str] = (),
) -> bool:
    """Run the forward and backward passes of one optimizer step, with full rows and, if there are any, padded ones.

    Args:
        model: A streamed peft model.
        micro_step: Runs both passes of a micro-batch, given the model's inputs, just as training will.
        rows: Of a micro-batch.
        tokens: Of the longest row, padding included.
        micro_batches: Per optimizer step.
        padded: Whether rows may be padded.
        marks: Further inputs that the class must be given; zeros.

    Returns:
        Whether there was room for the graphs, if there were to be any. Without them the run is slower.

    Raises:
        BudgetError: it takes more memory than it may.
    """
    engine = engine_of(model)
    device = engine.device
    ids = torch.zeros(rows, tokens, dtype=torch.int64, device=device)
    inputs = {"input_ids": ids, "labels": ids, **dict.fromkeys(marks, ids)}
    # Full rows get no mask from transformers, padded ones do: other kernels, and other graphs.
    full, shorter = torch.ones_like(ids), torch.ones_like(ids)
    shorter[:, 1:][:, -1:] = 0

    states = {where: rng_state(where) for where in {torch.device("cpu"), device}}
    was_training = model.training
    model.train()
    if engine.gradients is not None:
        engine.gradients.claim()  # the Trainer's optimizer isn't there yet
    try:
        # Room for what the optimizer will have from its first step on.
        moments = 0 if engine.plan is None else engine.plan.device["moments"]
        reserved = torch.empty(moments, dtype=torch.uint8, device=device)
        for mask in (full, shorter) if padded else (full,):
            engine.accumulate([partial(micro_step, {**inputs, "attention_mask": mask})] * micro_batches)
        del reserved
    except torch.OutOfMemoryError as error:
        plan = engine.plan
        planned = "" if plan is None else f"; {plan.device_bytes / 1e9:.1f} GB were planned"
        raise BudgetError(
            f"a step with {micro_batches} x {rows} rows of {tokens} tokens takes more GPU memory than it may{planned}",
            "give a larger vram, or lower data.max_length or training.batch_size; please report a plan that is wrong",
        ) from error
    finally:
        model.zero_grad(set_to_none=True)
        if engine.gradients is not None:
            engine.gradients.clear()
        model.train(was_training)
        for where, state in states.items():
            set_rng_state(state, where)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return not (isinstance(engine.executor, GraphExecutor) and engine.executor.num_without_room)
