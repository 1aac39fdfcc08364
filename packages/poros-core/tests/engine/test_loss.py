"""The loss in pieces is stock's loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from poros.config import LoraPart
from poros.engine.adapters import lora_config
from poros.engine.attach import attach
from poros.engine.loss import PiecewiseLoss
from poros.engine.parts import causal_lm
from poros.errors import UnsupportedError
from poros.parity.stock import load_stock
from poros.plugins import Plugins

CPU = torch.device("cpu")


@pytest.mark.parametrize("vocabulary", [128, 1001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_items", [None, 37, torch.tensor(37)])
@pytest.mark.parametrize("rows", [16, 32, 1024])
def test_the_loss_is_stocks(vocabulary: int, dtype: torch.dtype, num_items: Any, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(2, 45, vocabulary, generator=generator)).to(dtype)
    labels = torch.randint(0, vocabulary, (2, 45), generator=generator)
    labels[1, 30:] = -100
    found = []
    for loss_function in (ForCausalLMLoss, PiecewiseLoss(rows)):
        leaf = logits.clone().requires_grad_()
        loss = loss_function(logits=leaf, labels=labels, vocab_size=vocabulary, num_items_in_batch=num_items)
        (loss * 0.5).backward()
        found.append((loss.detach(), leaf.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))  # type: ignore[arg-type]


def test_a_loss_of_ones_own_is_not_replaced(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    model = load_stock(checkpoint("qwen2", {}), lora_config(LoraPart(rank=4)), 0, CPU)
    causal_lm(model).loss_function = lambda logits, labels, **kwargs: logits.sum()
    with pytest.raises(UnsupportedError, match="not the one"):
        attach(model, plugins=plugins, loss_rows=16)
    ids = torch.arange(8).view(1, -1)
    assert torch.isfinite(model(input_ids=ids).logits).all()  # nothing was taken from it
