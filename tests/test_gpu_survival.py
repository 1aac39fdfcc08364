"""What a training loop on a GPU lives through: late copies, poisoned slots, new shapes, evaluations, no room, Ctrl-C.

pytest -m gpu tests/test_gpu_survival.py
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from peft import get_peft_model
from transformers.loss.loss_utils import ForCausalLMLoss

import poros
from poros.config import LoraPart, StreamConfig
from poros.engine.adapters import lora_config
from poros.engine.attach import attach
from poros.engine.attention import attention_path
from poros.engine.boundaries import HostBoundaries
from poros.engine.engine import engine_of
from poros.engine.graphs import GraphExecutor
from poros.engine.loss import PiecewiseLoss
from poros.engine.optimizer import HostAdamW, adamw_for
from poros.engine.parts import DecoderParts
from poros.parity.fit import cut_to_fit
from poros.parity.gate import check
from poros.parity.resident import random_resident
from poros.parity.source import Setting, find_published
from poros.parity.stock import Work, make_adapters_count, train
from poros.parity.surfaces import Comparison, compare
from poros.plugins import Plugins, load_plugins
from poros.stream.transfer import Arrival, CudaTransfer, Piece

pytestmark = pytest.mark.gpu

LAYERS = 6


@pytest.fixture(autouse=True)
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda", 0)


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins()


def model(
    plugins: Plugins, device: torch.device, dropout: float = 0.1, shape: str = "qwen2.5-0.5b", tied: bool = True
) -> Any:
    found = find_published(shape, plugins)
    assert found is not None
    config = {**found[1].config, "tie_word_embeddings": tied}
    base = random_resident(found[0], config, device, LAYERS)
    torch.manual_seed(0)
    made = get_peft_model(base, lora_config(LoraPart(dropout=dropout)))
    make_adapters_count(made, 0)
    return made.train()


def compared(
    plugins: Plugins, device: torch.device, work: Work, block_major: bool = True, tied: bool = True, **options: Any
) -> Comparison:
    stock, streamed = (model(plugins, device, tied=tied) for _ in range(2))
    architecture = plugins.architecture_for("qwen2")
    attach(streamed, plugins=plugins, **options)
    engine = engine_of(streamed)
    with attention_path("fused"):
        one = train(stock, DecoderParts.of(stock, architecture).layers, work, device)
        more: dict[str, Any] = {"make_optimizer": adamw_for(engine)}
        more |= {"accumulate": engine.accumulate} if block_major else {}
        other = train(streamed, DecoderParts.of(streamed, architecture).layers, work, device, **more)
    result = compare(one, other, engine.blocks)
    poros.close(streamed)
    return result


class Poison(CudaTransfer):
    """Fills a slot with NaN the moment it may be written, and keeps the computation busy before it reads one."""

    def __init__(self, device: torch.device, num_slots: int, patient: bool = True) -> None:
        super().__init__(device, num_slots)
        self.patient = patient
        self.poisoned = 0

    def copy(self, slot: int, pieces: Sequence[Piece]) -> Arrival:
        if self.patient:
            self._stream.wait_event(self._departures[slot])
        else:
            self._departures[slot] = torch.cuda.Event()  # the broken one: nothing to wait for
        with torch.cuda.stream(self._stream):
            for _, target in pieces:
                target.fill_(0xFF)
        self.poisoned += 1
        arrival = super().copy(slot, pieces)

        class Slow:
            def wait(self) -> None:
                arrival.wait()
                torch.cuda._sleep(30_000_000)

        return Slow()


@pytest.mark.parametrize("executor", ["graphs", "eager"])
@pytest.mark.parametrize(("slots", "accumulation"), [(1, 1), (2, 1), (2, 3), (3, 1)])
def test_late_copies_into_poisoned_slots(
    executor: str, slots: int, accumulation: int, gpu: torch.device, plugins: Plugins
) -> None:
    poison = Poison(gpu, slots)
    work = Work(steps=3, batch_size=2, length=64, accumulation=accumulation)
    result = compared(plugins, gpu, work, slots=slots, executor=executor, transfer=poison)
    assert result.identical, str(result.difference)
    assert poison.poisoned > 3 * LAYERS


ON_HOST: dict[str, Any] = {
    "embedding": "host",
    "head": "host",
    "optimizer": "host",
    "gradients": "host",
    "boundaries": "host",
    "loss_rows": 32,
}


@pytest.mark.parametrize("executor", ["graphs", "eager"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("slots", "accumulation", "resident", "recompute"),
    [(1, 1, 0, True), (2, 3, 0, True), (2, 1, 2, False), (3, 2, 3, True)],
)
def test_everything_on_the_host_with_late_copies(
    executor: str,
    tied: bool,
    slots: int,
    accumulation: int,
    resident: int,
    recompute: bool,
    gpu: torch.device,
    plugins: Plugins,
) -> None:
    """Head, slots and restored weights in the same memory, boundaries and moments on their way."""
    work = Work(steps=4, batch_size=2, length=96, accumulation=accumulation)
    options = {**ON_HOST, "slots": slots, "resident": resident, "recompute": recompute, "executor": executor}
    poison = Poison(gpu, slots + resident + 1)
    result = compared(plugins, gpu, work, tied=tied, transfer=poison, **options)
    assert result.identical, str(result.difference)
    assert poison.poisoned > 3 * (LAYERS - resident)
    result = compared(plugins, gpu, work, tied=tied, **options)
    assert result.identical, str(result.difference)


@pytest.mark.parametrize("name", [*ON_HOST, "restore_once"])
def test_each_placement_alone(name: str, gpu: torch.device, plugins: Plugins) -> None:
    options = {name: ON_HOST.get(name, False), **({"optimizer": "host"} if name == "gradients" else {})}
    for accumulation in (1, 3):
        work = Work(steps=4, batch_size=2, length=96, accumulation=accumulation)
        result = compared(plugins, gpu, work, tied=False, **options)
        assert result.identical, str(result.difference)


def test_boundaries_under_a_slow_computation(gpu: torch.device) -> None:
    """Put and taken while the computation lags far behind the host: nothing is overtaken."""
    boundaries = HostBoundaries(gpu)
    for _ in range(3):
        kept = []
        for number in range(24):
            torch.cuda._sleep(3_000_000)
            kept.append(boundaries.put(torch.full((1, 512, 1024), float(number), device=gpu, dtype=torch.bfloat16)))
        taken = []
        while kept:
            boundary = kept.pop()
            hidden = boundary.take()
            if kept:
                kept[-1].start()
            torch.cuda._sleep(3_000_000)
            taken.append(hidden.sum())
        wanted = [float(number) * 512 * 1024 for number in reversed(range(24))]
        assert [float(value) for value in taken] == wanted
    boundaries.close()


@pytest.mark.parametrize("how", [{}, {"fused": True}, {"foreach": False}])
@pytest.mark.parametrize("piece_bytes", [100_000, 16_000_000])
def test_moments_on_the_host(how: dict[str, bool], piece_bytes: int, gpu: torch.device) -> None:
    results = []
    for make, more in ((torch.optim.AdamW, {}), (HostAdamW, {"piece_bytes": piece_bytes})):
        generator = torch.Generator(gpu).manual_seed(0)
        sizes = [(64, 64), (3, 1000), (1,), (5000, 300), (7, 9)]
        parameters = [torch.nn.Parameter(torch.randn(size, device=gpu, generator=generator)) for size in sizes]
        optimizer = make(parameters, lr=1e-2, **how, **more)  # type: ignore[arg-type]
        for _ in range(6):
            torch.cuda._sleep(5_000_000)
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, device=gpu, generator=generator)
            optimizer.step()
        torch.cuda.synchronize()
        results.append((parameters, [optimizer.state[parameter] for parameter in parameters]))
    for one, other in zip(*(result[0] for result in results), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(*(result[1] for result in results), strict=True):
        assert all(torch.equal(one[key].cpu(), other[key].cpu()) for key in ("exp_avg", "exp_avg_sq", "step"))
    assert other["exp_avg"].device.type == "cpu"


@pytest.mark.parametrize("vocabulary", [151936, 262144, 1001])
@pytest.mark.parametrize("num_items", [None, 300])
def test_the_loss_in_pieces(vocabulary: int, num_items: int | None, gpu: torch.device) -> None:
    generator = torch.Generator(gpu).manual_seed(0)
    logits = (4 * torch.randn(2, 190, vocabulary, device=gpu, generator=generator)).bfloat16()
    labels = torch.randint(0, vocabulary, (2, 190), device=gpu, generator=generator)
    labels[1, 150:] = -100
    found = []
    with attention_path("fused"):
        for loss_function in (ForCausalLMLoss, PiecewiseLoss(16), PiecewiseLoss(128), PiecewiseLoss(10_000)):
            leaf = logits.clone().requires_grad_()
            loss = loss_function(logits=leaf, labels=labels, vocab_size=vocabulary, num_items_in_batch=num_items)
            (loss * 0.5).backward()
            found.append((loss.detach(), leaf.grad))
    for other in found[1:]:
        assert torch.equal(found[0][0], other[0])
        assert torch.equal(found[0][1], other[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("vram", ["least", "3GB"])
def test_a_budget_is_kept(vram: str, gpu: torch.device, plugins: Plugins) -> None:
    """Identical within the smallest budget, enforced; and the process takes no more than that."""
    from poros.engine.budget import card_of, process_bytes
    from poros.plan.fit import dimensions_of, make_job
    from poros.plan.search import smallest_plan

    family, shape = find_published("qwen2.5-0.5b", plugins) or pytest.fail("no such shape")
    work = Work(steps=3, batch_size=1, length=512, accumulation=1)
    if vram == "least":
        dimensions = dimensions_of(family, shape.config)
        job = make_job(dimensions, LoraPart(dropout=0.1), 512, 1, StreamConfig(), graphs=True)
        vram = f"{smallest_plan(job, card_of(gpu)).device_bytes / 1e6 + 1:.0f}MB"
    result = check("qwen2.5-0.5b", lora_config(LoraPart(dropout=0.1)), work, stream=StreamConfig(vram=vram))
    assert result.verdict == "identical", str(result.streamed.difference)
    assert result.executor == "graphs"
    assert result.plan is not None
    assert result.reserved_bytes is not None
    print(vram, result.plan["predicted_vram_gb"], result.reserved_bytes / 1e9, result.process_bytes)
    assert result.reserved_bytes / 1e9 <= result.plan["vram_budget_gb"]
    assert process_bytes(gpu) is None or result.process_bytes is not None


@pytest.mark.parametrize("executor", ["graphs", "eager"])
def test_a_copy_that_does_not_wait_is_caught(executor: str, gpu: torch.device, plugins: Plugins) -> None:
    work = Work(steps=3, batch_size=2, length=64, accumulation=1)
    result = compared(plugins, gpu, work, slots=2, executor=executor, transfer=Poison(gpu, 2, patient=False))
    assert not result.identical


def step(made: Any, ids: torch.Tensor, **inputs: Any) -> list[torch.Tensor]:
    made.zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cuda", torch.bfloat16):
        loss = made(input_ids=ids, labels=ids, use_cache=False, **inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in made.parameters() if p.grad is not None)]


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) > 1 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def rows(count: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 1000, (count, length), generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.fixture
def pair(gpu: torch.device, plugins: Plugins) -> Any:
    made = []

    def make(**options: Any) -> tuple[Any, Any, GraphExecutor]:
        stock, streamed = (model(plugins, gpu) for _ in range(2))
        attach(streamed, plugins=plugins, **options)
        made.append(streamed)
        executor = engine_of(streamed).executor
        assert isinstance(executor, GraphExecutor)
        return stock, streamed, executor

    with attention_path("fused"):
        yield make
    for one in made:
        poros.close(one)


@pytest.mark.parametrize("options", [{}, {"resident": "all", "recompute": False}, {"resident": 3, "recompute": False}])
def test_shapes_never_seen_before_and_evaluations_between(options: Any, pair: Callable[..., Any]) -> None:
    stock, streamed, executor = pair(**options)
    for count, length in ((1, 64), (2, 64), (1, 96), (1, 64), (3, 40), (1, 33), (1, 34), (2, 64)):
        ids = rows(count, length)
        mask = torch.ones_like(ids)
        mask[0, -5:] = 0
        for inputs in ({}, {"attention_mask": mask}):
            assert same(step(stock, ids, **inputs), step(streamed, ids, **inputs)), (count, length, list(inputs))
        for one in (stock, streamed):
            one.eval()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            logits = [one(input_ids=ids, attention_mask=mask, use_cache=False).logits for one in (stock, streamed)]
        assert torch.equal(*logits)
        for one in (stock, streamed):
            one.train()
    assert executor.num_replays > 0


def test_generating_between_steps(pair: Callable[..., Any]) -> None:
    stock, streamed, _ = pair()
    ids = rows(1, 16)
    for _ in range(2):
        assert same(step(stock, ids), step(streamed, ids))
        with torch.autocast("cuda", torch.bfloat16):
            texts = [one.eval().generate(input_ids=ids, max_new_tokens=5, do_sample=False) for one in (stock, streamed)]
        assert torch.equal(*texts)
        for one in (stock, streamed):
            one.train()


@pytest.mark.parametrize("options", [{}, {"resident": "all", "recompute": False}])
def test_no_room_for_the_graphs(
    options: Any, pair: Callable[..., Any], caplog: pytest.LogCaptureFixture, gpu: torch.device
) -> None:
    """Out of memory while recording: such batches run eagerly and say so; smaller ones go on being replayed."""
    stock, streamed, executor = pair(restore_once=False, **options)
    small, large = rows(1, 32), rows(8, 1024)
    assert same(step(stock, small), step(streamed, small))
    expected = step(stock, large)
    stock.zero_grad()
    streamed.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    right = executor._record

    def short_of_memory(run: Any, pool: Any) -> Any:
        total = torch.cuda.mem_get_info(gpu)[1]
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved(gpu) / total)
        try:
            return right(run, pool)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    executor._record = short_of_memory  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        assert same(expected, step(streamed, large))
    assert "no room to record graphs for 8 x 1024" in caplog.text
    executor._record = right  # type: ignore[method-assign]
    replays = executor.num_replays
    assert same(step(stock, small), step(streamed, small))
    assert executor.num_replays > replays
    assert same(expected, step(streamed, large))


def test_interrupted_in_the_middle_of_a_step(pair: Callable[..., Any]) -> None:
    """The next step is right, and closing gives everything back."""
    stock, streamed, _ = pair()
    ids = rows(1, 64)
    engine = engine_of(streamed)
    assert same(step(stock, ids), step(streamed, ids))
    visits = 0
    right = engine.streamer._transfer.copy

    def interrupt(slot: int, pieces: Sequence[Piece]) -> Arrival:
        nonlocal visits
        visits += 1
        if visits == 5:
            raise KeyboardInterrupt
        return right(slot, pieces)

    engine.streamer._transfer.copy = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        step(streamed, ids)
    engine.streamer._transfer.copy = right  # type: ignore[method-assign]
    assert same(step(stock, ids), step(streamed, ids))
    poros.close(streamed)
    with pytest.raises(IndexError):
        engine.store.slab(0)


def test_dropping_the_model_gives_its_memory_back(gpu: torch.device, plugins: Plugins) -> None:
    left = []
    for _ in range(3):
        streamed = model(plugins, gpu)
        attach(streamed, plugins=plugins)
        step(streamed, rows(1, 64))
        streamed.zero_grad()
        del streamed
        gc.collect()
        left.append(torch.cuda.memory_allocated(gpu))
    assert left[1] == left[2], left  # the first one leaves the libraries' own workspaces


def test_a_card_that_holds_only_some_layers(gpu: torch.device, plugins: Plugins) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(gpu)
    ballast = torch.empty(int(free - 5e9), dtype=torch.uint8, device=gpu)
    try:
        work = Work(steps=1, batch_size=1, length=128, accumulation=1)
        setting = cut_to_fit(
            "qwen2.5-7b", None, Setting(lora_config(LoraPart()), 0, StreamConfig(), gpu, plugins), work
        )
        assert setting.num_layers is not None
        assert 1 <= setting.num_layers < 28
        result = check("qwen2.5-7b", lora_config(LoraPart()), work, plugins=plugins)
        assert result.verdict == "identical"
        assert f"first {setting.num_layers} layers" in result.model
    finally:
        del ballast


SHAPES = [(1, 1), (1, 63), (3, 5), (7, 64), (65, 63), (129, 128), (896, 151), (1000, 777), (4864, 896), (27648, 5120)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_fused_kernel_restores_every_bit(shape: tuple[int, int], gpu: torch.device) -> None:
    from poros.engine.kernels.nf4 import dequantise

    weight = torch.randn(shape, device=gpu, dtype=torch.bfloat16, generator=torch.Generator(gpu).manual_seed(1))
    weight[0, 0] = 0.0
    codes, state = bnb.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    right = bnb.functional.dequantize_4bit(codes, state)
    assert torch.equal(dequantise(codes, state), right)
    into = torch.full(shape, float("nan"), device=gpu, dtype=torch.bfloat16)
    assert torch.equal(dequantise(codes, state, into), right)
