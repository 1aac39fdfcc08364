"""Blocks whose layers leave tensors for later layers: keys and values that several layers share.

To autograd such a block is a function with more than one input and output. What earlier blocks have left goes in beside
the hidden states and comes out again, with what this block leaves. So gradients flow back through all blocks: to the
sum of those of later readers a block adds its own readers' one by one, the last layer's first, which is the order in
which autograd adds them in the stock model. (Added up block by block they would round differently.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from poros.engine.executor import Batch, EagerExecutor, Surroundings, hooks_silenced
from poros.stream.schedule import Phase

Shared = dict[str, tuple[Tensor, ...]]
"""What has been left so far: name -> tensors."""


class _SharingFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        executor: EagerExecutor,
        block: int,
        batch: Batch,
        surroundings: Surroundings,
        layout: dict[str, int],
        left: dict[str, int],
        hidden: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run a block.

        Args:
            layout: Name -> number of tensors, of what earlier blocks have left; these come first in `tensors`.
            left: Is filled in the same way with what this block leaves.

        Returns:
            The hidden states, what earlier blocks have left, and what this block leaves.
        """
        count = sum(layout.values())
        side, adapters = tensors[:count], tensors[count:]
        ctx.set_materialize_grads(False)
        ctx.executor, ctx.block, ctx.batch, ctx.surroundings, ctx.layout = executor, block, batch, surroundings, layout
        ctx.adapters = adapters
        ctx.boundary, ctx.below = executor.keep_boundary(block, hidden)
        ctx.away = executor.boundaries.away
        ctx.save_for_backward(*(() if ctx.away else (hidden,)), *tensors)
        with executor.visiting(block, Phase.FORWARD) as visit:
            ctx.signature = executor.signature(block)
            shared = _unflatten(layout, side)
            before = dict(shared)
            output = visit.forward_sharing(hidden, batch, surroundings, shared)
        fresh = {name: value for name, value in shared.items() if value is not before.get(name)}
        left.update({name: len(value) for name, value in fresh.items()})
        ctx.left = tuple(left)
        passed = (tensor.view_as(tensor) for tensor in side)
        return (output, *passed, *(tensor for value in fresh.values() for tensor in value))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        tensors = ctx.saved_tensors if ctx.away else ctx.saved_tensors[1:]
        hidden = ctx.boundary.take()
        if ctx.below is not None:
            ctx.below.start()
        count = sum(ctx.layout.values())
        ctx.batch.check_unchanged()
        needs = ctx.needs_input_grad[_HIDDEN : _HIDDEN + 1 + count]
        leaves = [
            tensor.detach().requires_grad_(need) for tensor, need in zip((hidden, *tensors[:count]), needs, strict=True)
        ]
        with ctx.executor.visiting(ctx.block, Phase.BACKWARD) as visit:
            ctx.executor.check_unchanged(ctx.block, ctx.signature)
            shared = _unflatten(ctx.layout, leaves[1:])
            output = visit.rerun_sharing(leaves[0], ctx.batch, ctx.surroundings, shared)
            # What autograd is given to start with comes before what it finds on its way.
            outputs = [output, *leaves[1:], *(tensor for name in ctx.left for tensor in shared[name])]
            roots = [
                (tensor, gradient)
                for tensor, gradient in zip(outputs, gradients, strict=True)
                if gradient is not None and tensor.requires_grad
            ]
            wanted = [leaf for leaf in leaves if leaf.requires_grad] + list(ctx.adapters)
            found: list[Tensor | None] = [None] * len(wanted)
            if roots and wanted:
                with hooks_silenced(ctx.adapters):
                    found = list(
                        torch.autograd.grad(
                            [tensor for tensor, _ in roots],
                            wanted,
                            [gradient for _, gradient in roots],
                            allow_unused=True,
                        )
                    )
        remaining = iter(found)
        of_leaves = [next(remaining) if leaf.requires_grad else None for leaf in leaves]
        return (*([None] * _HIDDEN), *of_leaves, *ctx.executor.hand_over(ctx.adapters, list(remaining)))


_HIDDEN = 6
"""Position of the hidden states among the arguments of `_SharingFunction.forward`."""


def _unflatten(layout: dict[str, int], tensors: Any) -> Shared:
    remaining = iter(tensors)
    return {name: tuple(next(remaining) for _ in range(number)) for name, number in layout.items()}


def run_sharing_block(executor: EagerExecutor, block: int, hidden: Tensor, batch: Batch, shared: Shared) -> Tensor:
    """The output of a block, differentiable with respect to its input, what it is left, and its adapters.

    Args:
        hidden: [batch, tokens, hidden].
        batch: From the executor's `prepare`.
        shared: What earlier blocks have left; what this one leaves is added.
    """
    layout = {name: len(value) for name, value in shared.items()}
    side = [tensor for value in shared.values() for tensor in value]
    left: dict[str, int] = {}
    output, *rest = _SharingFunction.apply(  # type: ignore[no-untyped-call]
        executor,
        block,
        batch,
        Surroundings.now(hidden.device),
        layout,
        left,
        hidden,
        *side,
        *executor.adapters(block),
    )
    shared.update(_unflatten(layout, rest))
    shared.update(_unflatten(left, rest[len(side) :]))
    result: Tensor = output
    return result
