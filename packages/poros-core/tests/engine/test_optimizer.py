"""AdamW with moments and gradients on the host: torch's numbers, and no silence where nobody would use a gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poros
from poros.config import LoraPart
from poros.engine.adapters import lora_config
from poros.engine.engine import engine_of
from poros.engine.gradients import HostGradients
from poros.engine.optimizer import HostAdamW, adamw_for
from poros.errors import ConfigError, StreamError, UnsupportedError
from poros.plugins import Plugins

CPU = torch.device("cpu")


def make_parameters(seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((8, 5), (3,), (64, 64), (1, 1), (7, 9))]


def steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for step in range(count):
        for number, parameter in enumerate(parameters):
            # The last one begins to learn later; the second one pauses.
            late = number == len(parameters) - 1 and step == 0
            pauses = number == 1 and step == 2
            parameter.grad = None if late or pauses else torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("piece_bytes", [1, 200, 10_000_000])
@pytest.mark.parametrize("how", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}])
def test_the_update_is_torchs(piece_bytes: int, how: dict[str, bool]) -> None:
    results = []
    for make in (torch.optim.AdamW, HostAdamW):
        parameters = make_parameters(0)
        groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 3e-2, "weight_decay": 0.0}]
        options: dict[str, Any] = {"piece_bytes": piece_bytes} if make is HostAdamW else {}
        optimizer = make(groups, lr=1e-2, betas=(0.8, 0.95), **how, **options)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        steps(optimizer, parameters, 3, 1)
        schedule.step()
        steps(optimizer, parameters, 3, 2)
        results.append((parameters, optimizer))
    for one, other in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(one, other)
        states = results[0][1].state[one], results[1][1].state[other]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("source", [torch.optim.AdamW, HostAdamW])
def test_a_state_is_taken_over(source: type[torch.optim.AdamW]) -> None:
    """Of its own class or of torch's: a run may be resumed with its moments elsewhere."""
    straight = make_parameters(0)
    first = source(straight, lr=1e-2)
    steps(first, straight, 3, 1)
    resumed = [nn.Parameter(parameter.detach().clone()) for parameter in straight]
    second = HostAdamW(resumed, lr=1e-3)
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["lr"] == 1e-2
    for one, other in ((straight, first), (resumed, second)):
        steps(other, one, 3, 2)  # type: ignore[arg-type]
    assert all(torch.equal(one, other) for one, other in zip(straight, resumed, strict=True))


def test_a_state_that_was_dropped_is_gone() -> None:
    ours, theirs = make_parameters(0), make_parameters(0)
    optimizers = HostAdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)
    for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
        steps(optimizer, parameters, 3, 1)
        fresh = optimizer.state_dict()
        del fresh["state"][2]
        optimizer.load_state_dict(fresh)
        steps(optimizer, parameters, 2, 2)
        optimizer.state.clear()
        steps(optimizer, parameters, 2, 3)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("piece_bytes", [1, 200, 10_000_000])
@pytest.mark.parametrize("max_norm", [1.0, 1e6, None])
def test_clipping_and_updating_with_gradients_on_the_host(piece_bytes: int, max_norm: float | None) -> None:
    kept = HostGradients(CPU)
    ours, theirs = make_parameters(0), make_parameters(0)
    optimizers = (
        HostAdamW(ours, lr=1e-2, piece_bytes=piece_bytes, gradients=kept),
        torch.optim.AdamW(theirs, lr=1e-2),
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        for _ in range(1 + step % 2):  # a loop over micro-batches adds gradients up
            fresh = [
                None if (step, n) == (2, 1) else torch.randn(p.shape, generator=generator) for n, p in enumerate(ours)
            ]
            kept.add(ours, fresh)
            for parameter, gradient in zip(theirs, fresh, strict=True):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        for one, other in zip(ours, theirs, strict=True):
            found = optimizers[0].gradient(one)
            assert (found is None) == (other.grad is None)
            assert found is None or torch.equal(found, other.grad)  # type: ignore[arg-type]
        if max_norm is not None:
            norms = optimizers[0].clip_grad_norm_(max_norm), torch.nn.utils.clip_grad_norm_(theirs, max_norm)
            assert torch.equal(*norms)
        for optimizer in optimizers:
            optimizer.step()
        optimizers[1].zero_grad()
        assert all(parameter not in kept for parameter in ours)  # used up
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_two_optimizers_over_one_store() -> None:
    kept = HostGradients(CPU)
    ours, theirs = make_parameters(0), make_parameters(0)
    pairs = [
        [HostAdamW(ours[:2], lr=1e-2, gradients=kept), HostAdamW(ours[2:], lr=1e-2, gradients=kept)],
        [torch.optim.AdamW(theirs[:2], lr=1e-2), torch.optim.AdamW(theirs[2:], lr=1e-2)],
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        fresh = [torch.randn(p.shape, generator=generator) for p in ours]
        kept.add(ours, fresh)
        for parameter, gradient in zip(theirs, fresh, strict=True):
            parameter.grad = gradient.clone()
        for optimizer in (*pairs[0], *pairs[1]):
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("variant", ["amsgrad", "maximize"])
def test_a_state_of_another_variant_is_refused(variant: str) -> None:
    parameters = make_parameters(0)
    other = torch.optim.AdamW(parameters, **{variant: True})  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=variant):
        HostAdamW(parameters).load_state_dict(other.state_dict())


def test_gradients_that_somebody_listens_to_stay(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    model = poros.load(
        checkpoint("qwen2", {}),
        lora=lora_config(LoraPart(rank=4)),
        device="cpu",
        plugins=plugins,
        optimizer="host",
        gradients="host",
    )
    ids = torch.arange(8).view(1, -1)
    with pytest.raises(StreamError, match="no optimizer was made"):
        model(input_ids=ids, labels=ids).loss.backward()
    adapters = [p for p in model.parameters() if p.requires_grad]
    adamw_for(engine_of(model))(adapters)
    adapters[0].register_hook(lambda gradient: None)
    with pytest.raises(StreamError, match="hook"):
        model(input_ids=ids, labels=ids).loss.backward()
    with pytest.raises(ConfigError, match="optimizer"):
        poros.load(checkpoint("qwen2", {}), device="cpu", plugins=plugins, gradients="host")
