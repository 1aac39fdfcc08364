"""One block as a function of autograd: its input and its adapters go in, their gradients come out.

To the rest of the world a block is a single differentiable operation. That is what lets a hand-written loop, the
Trainer of transformers and TRL drive a streamed model without knowing it: gradients reach the adapters through
`AccumulateGrad` as in any model, hooks and accumulation included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from poros.engine.executor import Batch, EagerExecutor, Surroundings
from poros.stream.schedule import Phase

_HIDDEN = 4
"""Position of the hidden states among the arguments of `_BlockFunction.forward`."""


class _BlockFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        executor: EagerExecutor,
        block: int,
        batch: Batch,
        surroundings: Surroundings,
        hidden: Tensor,
        *adapters: nn.Parameter,
    ) -> Tensor:
        ctx.executor, ctx.block, ctx.batch, ctx.surroundings = executor, block, batch, surroundings
        ctx.adapters = adapters
        ctx.boundary, ctx.below = executor.keep_boundary(block, hidden)
        # Saved only for autograd's check that nothing changed them before the backward pass.
        ctx.save_for_backward(*(() if executor.boundaries.away else (hidden,)), *adapters)
        with executor.visiting(block, Phase.FORWARD) as visit:
            ctx.signature = executor.signature(block)
            ctx.kept = None
            if block not in executor.keeping:
                return visit.forward(hidden, batch, surroundings)
            output, ctx.kept = visit.forward_keeping(hidden, batch, surroundings, ctx.needs_input_grad[_HIDDEN])
            return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _ = ctx.saved_tensors  # asking for them makes autograd check; a block without adapters has none
        hidden = ctx.boundary.take()
        if ctx.below is not None and ctx.needs_input_grad[_HIDDEN]:
            ctx.below.start()
        ctx.batch.check_unchanged()
        with ctx.executor.visiting(ctx.block, Phase.BACKWARD) as visit:
            ctx.executor.check_unchanged(ctx.block, ctx.signature)
            first, gradients = visit.backward(
                hidden,
                ctx.batch,
                ctx.surroundings,
                ctx.adapters,
                gradient,
                needs_hidden=ctx.needs_input_grad[_HIDDEN],
                kept=ctx.kept,
            )
        ctx.kept = None
        return None, None, None, None, first, *ctx.executor.hand_over(ctx.adapters, gradients)


def run_block(executor: EagerExecutor, block: int, hidden: Tensor, batch: Batch) -> Tensor:
    """The output of a block, differentiable with respect to its input and its adapters.

    Args:
        hidden: [batch, tokens, hidden].
        batch: From the executor's `prepare`.
    """
    surroundings = Surroundings.now(hidden.device)
    if not torch.is_grad_enabled():
        with executor.visiting(block, Phase.FORWARD) as visit:
            return visit.forward(hidden, batch, surroundings)
    output: Tensor = _BlockFunction.apply(  # type: ignore[no-untyped-call]
        executor, block, batch, surroundings, hidden, *executor.adapters(block)
    )
    return output
