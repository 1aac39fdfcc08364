"""Block-major accumulation: the numbers of a plain loop, and the copies of a single micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

import poros
from poros.architecture import Architecture
from poros.config import LoraPart
from poros.engine.accumulate import _advanced, _draws
from poros.engine.adapters import lora_config
from poros.engine.attention import attention_path
from poros.engine.engine import engine_of
from poros.engine.parts import DecoderParts
from poros.errors import StreamError
from poros.parity.stock import Work, load_stock, make_adapters_count, train
from poros.parity.surfaces import compare
from poros.plugins import Plugins

CPU = torch.device("cpu")


def pair(directory: Path, plugins: Plugins, dropout: float = 0.0, **options: Any) -> tuple[Any, Any]:
    lora = lora_config(LoraPart(rank=4, dropout=dropout))
    stock = load_stock(directory, lora, 0, CPU)
    streamed = poros.load(directory, lora=lora, seed=0, device="cpu", plugins=plugins, **options)
    for model in (stock, streamed):
        make_adapters_count(model, 0)
        model.train()
    return stock, streamed


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("block_size", "slots", "accumulation"), [(1, 2, 2), (2, 1, 4), (1, 5, 3)])
def test_every_surface(
    family: str,
    dropout: float,
    block_size: int,
    slots: int,
    accumulation: int,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
) -> None:
    work = Work(steps=4, length=16, accumulation=accumulation, learning_rate=1e-2)
    stock, streamed = pair(checkpoint(family, {}), plugins, dropout, block_size=block_size, slots=slots)
    engine = engine_of(streamed)
    with attention_path("fused"):
        reference = train(stock, DecoderParts.of(stock, families[family]).layers, work, CPU)
        trace = train(
            streamed, DecoderParts.of(streamed, families[family]).layers, work, CPU, accumulate=engine.accumulate
        )
    result = compare(reference, trace, engine.blocks)
    assert result.identical, str(result.difference)


def micro_steps(model: Any, lengths: Sequence[int]) -> list[Callable[[], torch.Tensor]]:
    """One function per micro-batch, each of another length."""

    def step(length: int) -> torch.Tensor:
        ids = torch.arange(3, 3 + length)[None]
        loss = model(input_ids=ids, labels=ids).loss / len(lengths)
        loss.backward()
        return loss.detach()

    return [lambda length=length: step(length) for length in lengths]  # type: ignore[misc]


def gradients(model: Any) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_unequal_micro_batches_and_gradients_that_were_there(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    stock, streamed = pair(checkpoint("gemma3", {}), plugins)
    for _ in range(2):  # the second time onto the gradients of the first
        expected = [step() for step in micro_steps(stock, (12, 5, 9))]
        found = engine_of(streamed).accumulate(micro_steps(streamed, (12, 5, 9)))
        assert same(expected, found)
        assert same(gradients(stock), gradients(streamed))


@pytest.mark.parametrize("layers", [[0], [2, 3], [4], [1, 3]])
def test_adapters_in_some_layers_only(
    layers: list[int], checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], layers_to_transform=layers, task_type="CAUSAL_LM")
    directory = checkpoint("qwen2", {})
    stock = load_stock(directory, lora, 0, CPU)
    streamed = poros.load(directory, lora=lora, seed=0, device="cpu", plugins=plugins)
    for model in (stock, streamed):
        make_adapters_count(model, 0)
        model.train()
    expected = [step() for step in micro_steps(stock, (8, 5))]
    assert same(expected, engine_of(streamed).accumulate(micro_steps(streamed, (8, 5))))
    assert same(gradients(stock), gradients(streamed))
    assert len(gradients(stock)) == 4 * len(layers)


def test_the_base_travels_once_for_all(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    _, streamed = pair(checkpoint("qwen2", {}), plugins, slots=2)
    engine = engine_of(streamed)
    for _ in range(3):
        before = engine.streamer.counts.copies
        engine.accumulate(micro_steps(streamed, (8,) * 6))
    assert engine.streamer.counts.copies - before == 2 * 5 - 2 * 2


def test_with_dropout_on_a_cpu_only_the_backward_pass_is_block_major(
    checkpoint: Callable[..., Path], plugins: Plugins
) -> None:
    _, streamed = pair(checkpoint("qwen2", {}), plugins, dropout=0.1, slots=1)
    engine = engine_of(streamed)
    for _ in range(3):
        before = engine.streamer.counts.visits
        engine.accumulate(micro_steps(streamed, (8,) * 4))
    assert engine.streamer.counts.visits - before == 4 * 5 + 5


def test_dropout_that_is_switched_on_later_is_noticed(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    """The number of random numbers a block draws is remembered, and checked each time."""
    stock, streamed = pair(checkpoint("qwen2", {}), plugins)
    engine_of(streamed).accumulate(micro_steps(streamed, (8, 8)))
    for model in (stock, streamed):
        model.zero_grad()
        for module in model.modules():
            if type(module) is torch.nn.Identity:
                continue
            dropouts = getattr(module, "lora_dropout", None)
            if dropouts is not None:
                dropouts["default"] = torch.nn.Dropout(0.3)
    found = []
    for model in (stock, streamed):
        torch.manual_seed(3)
        steps = micro_steps(model, (8, 8))
        found.append([step() for step in steps] if model is stock else engine_of(streamed).accumulate(steps))
        found.append(gradients(model))
    assert same(found[0], found[2])
    assert same(found[1], found[3])


def test_noise_on_the_embedding_means_a_plain_loop(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    """NEFTune draws random numbers before the layers, in an order that only a plain loop has."""
    found = []
    stock, streamed = pair(checkpoint("qwen2", {}), plugins, dropout=0.1)
    for model in (stock, streamed):
        model.get_input_embeddings().register_forward_hook(lambda m, i, output: output + torch.rand_like(output))
        torch.manual_seed(5)
        steps = micro_steps(model, (8, 8))
        found.append([step() for step in steps] if model is stock else engine_of(streamed).accumulate(steps))
        found.append(gradients(model))
        found.append([torch.get_rng_state()])
    assert same(found[0], found[3])
    assert same(found[1], found[4])
    assert same(found[2], found[5])


def test_hooks_on_adapters_are_called(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    stock, streamed = pair(checkpoint("qwen2", {}), plugins)
    for model in (stock, streamed):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient * 2)
    expected = [step() for step in micro_steps(stock, (8, 5))]
    assert same(expected, engine_of(streamed).accumulate(micro_steps(streamed, (8, 5))))
    assert same(gradients(stock), gradients(streamed))


def test_a_change_under_way_is_noticed(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    _, streamed = pair(checkpoint("qwen2", {}), plugins)
    ids = torch.arange(3, 11)[None]

    def step() -> None:
        streamed(input_ids=ids, labels=ids).loss.backward()
        with torch.no_grad():
            next(p for p in streamed.parameters() if p.requires_grad).add_(1)

    with pytest.raises(StreamError, match="changed while micro-batches were under way"):
        engine_of(streamed).accumulate([step, step])


def test_one_micro_batch_is_an_ordinary_step(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    stock, streamed = pair(checkpoint("qwen2", {}), plugins)
    assert same(
        [step() for step in micro_steps(stock, (8,))], engine_of(streamed).accumulate(micro_steps(streamed, (8,)))
    )
    assert same(gradients(stock), gradients(streamed))


def test_a_micro_batch_without_a_backward_pass_adds_nothing(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    stock, streamed = pair(checkpoint("qwen2", {}), plugins)
    ids = torch.arange(3, 11)[None]
    stock(input_ids=ids, labels=ids).loss.backward()
    steps: list[Callable[[], Any]] = [
        lambda: streamed(input_ids=ids, labels=ids).loss.backward(),
        lambda: streamed(input_ids=ids, labels=ids).loss,
    ]
    engine_of(streamed).accumulate(steps)
    assert same(gradients(stock), gradients(streamed))


@pytest.mark.parametrize("kind", ["never", "twice", "random"])
def test_functions_that_do_not_fit_are_refused(kind: str, checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    _, streamed = pair(checkpoint("qwen2", {}), plugins)
    ids = torch.arange(3, 11)[None]

    def step() -> None:
        if kind == "never":
            return
        loss = streamed(input_ids=ids, labels=ids).loss
        if kind == "twice":
            loss = loss + streamed(input_ids=ids, labels=ids).loss
        if kind == "random":
            loss = loss * torch.rand(())
        loss.backward()

    words = {"never": "didn't run the streamed model", "twice": "ran the model 2 times", "random": "random numbers"}
    with pytest.raises(StreamError, match=words[kind]):
        engine_of(streamed).accumulate([step, step])
    # The model is usable afterwards.
    streamed(input_ids=ids, labels=ids).loss.backward()


def test_the_arithmetic_of_a_cuda_generators_state() -> None:
    state = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 4, 1, 0, 0, 0, 0, 0, 0], dtype=torch.uint8)
    further = _advanced(state, 300)
    assert _draws(state, further) == 300
    assert torch.equal(further[:8], state[:8])
    assert _draws(state, state) == 0
    assert torch.equal(_advanced(state, 0), state)
    assert _draws(state, torch.cat([state[8:], state[:8]])) is None
    assert _draws(torch.zeros(5056, dtype=torch.uint8), torch.ones(5056, dtype=torch.uint8)) is None
