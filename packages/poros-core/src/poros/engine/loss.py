"""Cross-entropy in pieces of rows, over whole logits.

Stock turns the logits into float32, takes a log-softmax and keeps the result for the backward pass: three matrices of
[tokens, vocabulary] in float32, which is more than everything else that a step needs once the base streams. Each row
stands for itself, though. So a few rows are worked out at a time, forward and once more backward, and what is summed up
over all rows (the mean of the picked log-probabilities) is summed up by torch's own loss over all of them. The numbers
are stock's, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.loss.loss_utils import ForCausalLMLoss

from poros.errors import UnsupportedError

ALIGNED_ROWS = 16
"""Pieces begin at multiples of this, so that a row lies as it would in the whole: kernels read aligned vectors."""


def check_loss(model: Any) -> None:
    """Refuse a model whose loss isn't the one that can be worked out in pieces.

    Raises:
        UnsupportedError: the model has another loss.
    """
    if model.loss_function is not ForCausalLMLoss:
        raise UnsupportedError(
            f"the loss of {type(model).__name__} is not the one that Poros can work out in pieces",
            "leave stream.loss_rows out",
        )


class PiecewiseLoss:
    """Takes the place of transformers' `ForCausalLMLoss`.

    Args:
        rows: Tokens at a time, rounded up to a multiple of 16.
    """

    def __init__(self, rows: int) -> None:
        self.rows = -(-rows // ALIGNED_ROWS) * ALIGNED_ROWS

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The loss, with the arguments of stock's: logits [batch, tokens, vocabulary], labels [batch, tokens]."""
        if shift_labels is None:
            padded = functional.pad(labels, (0, 1), value=ignore_index)
            shift_labels = padded[..., 1:].contiguous()
        target = shift_labels.view(-1).to(logits.device)
        rows = logits.view(-1, vocab_size)
        picked: Tensor = _Picked.apply(rows, target, ignore_index, self.rows)  # type: ignore[no-untyped-call]
        # One class only: the loss of a row is its picked log-probability, unless it is ignored.
        chosen = torch.where(target == ignore_index, ignore_index, 0)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = functional.nll_loss(picked, chosen, ignore_index=ignore_index, reduction=reduction)
        if num_items_in_batch is not None:
            if torch.is_tensor(num_items_in_batch):
                num_items_in_batch = num_items_in_batch.to(loss.device)
            loss = loss / num_items_in_batch
        return loss


class _Picked(torch.autograd.Function):
    """The log-probability of each row's target, [rows, 1] in float32; 0 where the target is ignored."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignored: int, rows: int) -> Tensor:
        ctx.save_for_backward(logits, target)
        ctx.ignored, ctx.rows = ignored, rows
        picked = torch.zeros(len(target), 1, dtype=torch.float32, device=logits.device)
        for start in range(0, len(target), rows):
            piece = slice(start, start + rows)
            index, counts = _index(target[piece], ignored)
            found = torch.log_softmax(logits[piece].float(), -1).gather(1, index)
            picked[piece] = torch.where(counts, found, 0.0)
            del found
        return picked

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logits, target = ctx.saved_tensors
        result = torch.empty_like(logits)
        for start in range(0, len(target), ctx.rows):
            piece = slice(start, start + ctx.rows)
            index, _ = _index(target[piece], ctx.ignored)
            with torch.enable_grad():
                leaf = logits[piece].float().detach().requires_grad_()
                probabilities = torch.log_softmax(leaf, -1)
            # As torch's own loss hands it down: zero but for the picked ones. nll_loss gives ignored rows zero.
            of_picked = torch.zeros_like(probabilities).scatter_(1, index, gradient[piece])
            (of_leaf,) = torch.autograd.grad(probabilities, leaf, of_picked)
            result[piece] = of_leaf
            del leaf, probabilities, of_picked, of_leaf  # before the next piece takes as much again
        return result, None, None, None


def _index(target: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    counts = (target != ignored).unsqueeze(1)
    return torch.where(counts, target.unsqueeze(1), 0), counts
