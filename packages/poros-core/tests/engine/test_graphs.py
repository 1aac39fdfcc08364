"""The graph executor's bookkeeping, on a CPU; see `poros.testing.graphs`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer

import poros
from poros.architecture import Architecture
from poros.config import LoraPart
from poros.engine.adapters import lora_config
from poros.engine.attention import attention_path
from poros.engine.engine import engine_of
from poros.engine.executor import rng_state
from poros.engine.graphs import GraphExecutor
from poros.engine.optimizer import adamw_for
from poros.engine.parts import DecoderParts
from poros.engine.replay import Results
from poros.engine.unused import unused_values
from poros.errors import UnsupportedError
from poros.parity.stock import Work, load_stock, make_adapters_count, train
from poros.parity.surfaces import compare
from poros.plugins import Plugins
from poros.stream.slots import Slot
from poros.stream.streamer import Lease
from poros.testing.graphs import HostGraphs, evaluated, gradients, models, same, step, use_host_graphs
from poros.testing.transfers import Adversary, Procrastinator

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
@pytest.mark.parametrize(("block_size", "slots"), [(1, 1), (1, 2), (2, 2), (3, 1)])
def test_every_surface(
    family: str,
    block_size: int,
    slots: int,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
) -> None:
    architecture = families[family]
    work = Work(steps=3, length=16, accumulation=2, learning_rate=1e-2)
    stock, streamed, executor = models(
        checkpoint(family, {}), plugins, architecture, block_size=block_size, slots=slots
    )
    traces = []
    for model in (stock, streamed):
        with attention_path("fused"):
            traces.append(train(model, DecoderParts.of(model, architecture).layers, work, CPU))
    result = compare(*traces, engine_of(streamed).blocks)
    assert result.identical, str(result.difference)
    signatures = {key[:2] for key in next(iter(executor._shapes.values())).recorded}
    assert executor.num_recorded == 2 * len(signatures) * slots


def test_arguments_that_change_between_steps_are_put_in_place(
    checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    stock, streamed, _ = models(checkpoint("gemma3", {}), plugins, families["gemma3"])
    ids = torch.randint(3, 100, (2, 10))
    for padding in (1, 4, 0, 7):
        mask = torch.ones_like(ids)
        mask[1, 10 - padding :] = 0
        for position in (0, 5):
            inputs = {"attention_mask": mask, "position_ids": torch.arange(position, position + 10)[None].expand(2, -1)}
            assert same(step(stock, ids, **inputs), step(streamed, ids, **inputs)), (padding, position)


def test_switched_adapters_are_recorded_anew(
    checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    stock, streamed, executor = models(checkpoint("qwen2", {}), plugins, families["qwen2"], dropout=0.0)
    ids = torch.randint(3, 100, (1, 8))
    assert same(step(stock, ids), step(streamed, ids))
    before = executor.num_recorded
    for model in (stock, streamed):
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.scaling["default"] = 0.5
    # The first step notices at each visit and runs eagerly; the next one finds new graphs.
    for recorded_more in (False, True):
        assert same(step(stock, ids), step(streamed, ids))
        assert (executor.num_recorded > before) is recorded_more
    replays = executor.num_replays
    assert same(step(stock, ids), step(streamed, ids))
    assert executor.num_replays - replays == 2 * len(executor)


def test_retyped_adapters_are_recorded_anew(
    checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    """TRL casts adapters to bf16 after the model was made."""
    stock, streamed, _ = models(checkpoint("qwen2", {}), plugins, families["qwen2"], dropout=0.0)
    ids = torch.randint(3, 100, (1, 8))
    assert same(step(stock, ids), step(streamed, ids))
    for model in (stock, streamed):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    assert same(step(stock, ids), step(streamed, ids))


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
@pytest.mark.parametrize(
    ("block_size", "slots", "resident", "accumulation"),
    [(1, 1, 0, 1), (1, 2, 0, 1), (2, 2, 0, 2), (3, 1, 1, 1), (1, 2, 3, 3), (1, 2, "all", 1)],
)
def test_blocks_are_taken_out_of_their_slots(
    family: str,
    block_size: int,
    slots: int,
    resident: Any,
    accumulation: int,
    fusing: None,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
) -> None:
    """A slot is poisoned the moment it is given back; one pair of graphs serves all slots."""
    architecture = families[family]
    work = Work(steps=4, length=16, accumulation=accumulation, learning_rate=1e-2)
    poison = Adversary(seed=slots)
    stock, streamed, executor = models(
        checkpoint(family, {}),
        plugins,
        architecture,
        block_size=block_size,
        slots=slots,
        resident=resident,
        transfer=poison,
    )
    engine = engine_of(streamed)
    traces = []
    for model, more in ((stock, {}), (streamed, {"accumulate": engine.accumulate})):
        with attention_path("fused"):
            traces.append(train(model, DecoderParts.of(model, architecture).layers, work, CPU, **more))
    result = compare(*traces, engine.blocks)
    assert result.identical, str(result.difference)
    assert engine.streamer.held == 0
    recorded = next(iter(executor._shapes.values())).recorded
    assert recorded
    assert all(slot is None for _, _, slot in recorded)
    assert poison.poisoned > 0


@pytest.mark.parametrize("transfer", [Adversary, Procrastinator])
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
@pytest.mark.parametrize(("slots", "resident", "accumulation"), [(1, 0, 1), (2, 0, 3), (2, 1, 1), (3, 4, 2)])
def test_the_head_takes_the_place_of_what_was_taken_out(
    family: str,
    slots: int,
    resident: int,
    accumulation: int,
    transfer: Any,
    fusing: None,
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
) -> None:
    """Slots, restored weights and head share one piece of memory; an evaluation comes in between."""
    made = transfer()
    if isinstance(made, Procrastinator):
        # What is on its way when a block is taken out may end right after that.
        hold = Lease.hold

        def held(lease: Lease, take_out: Callable[[Slot], None], release: bool = True) -> None:
            hold(lease, lambda slot: (take_out(slot), made.catch_up())[0], release)

        monkeypatch.setattr(Lease, "hold", held)
    architecture = families[family]
    work = Work(steps=3, length=16, accumulation=accumulation, learning_rate=1e-2)
    stock, streamed, executor = models(
        checkpoint(family, {"vocab_size": 4096}),
        plugins,
        architecture,
        slots=slots,
        resident=resident,
        transfer=made,
        embedding="host",
        head="host",
        optimizer="host",
        gradients="host" if accumulation > 1 else "device",
        boundaries="host",
        loss_rows=16,
    )
    engine = engine_of(streamed)
    assert engine.arena is not None
    options = {"accumulate": engine.accumulate, "make_optimizer": adamw_for(engine)}
    traces = []
    for model, more in ((stock, {}), (streamed, options)):
        with attention_path("fused"):
            traces.append(train(model, DecoderParts.of(model, architecture).layers, work, CPU, **more))
    result = compare(*traces, engine.blocks)
    assert result.identical, str(result.difference)
    begin, end = engine.arena.buffer.data_ptr(), engine.arena.buffer.data_ptr() + engine.arena.buffer.numel()
    inside = [begin <= buffer.data_ptr() < end for buffer in executor.buffers._buffers.values()]
    assert inside and all(inside)
    ids = torch.randint(3, 100, (1, 9))
    for _ in range(2):
        assert torch.equal(evaluated(stock, ids), evaluated(streamed, ids))
        if engine.gradients is None:
            assert same(step(stock, ids), step(streamed, ids))


def test_the_head_does_not_come_while_a_block_is_recorded(
    fusing: None,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first block of its kind is the last one of all, and after that the head is next."""
    changes = {"layer_types": [*["sliding_attention"] * 4, "full_attention"], "num_hidden_layers": 5}
    stock, streamed, executor = models(
        checkpoint("gemma3", {**changes, "vocab_size": 4096}),
        plugins,
        families["gemma3"],
        embedding="host",
        head="host",
    )
    streamer, warm_up, seen = engine_of(streamed).streamer, HostGraphs._warm_up, []

    def looking(self: HostGraphs, run: Callable[[], Results]) -> Results:
        seen.append(streamer.head in streamer._contents)
        return warm_up(self, run)

    monkeypatch.setattr(HostGraphs, "_warm_up", looking)
    ids = torch.randint(3, 100, (1, 8))
    for _ in range(2):
        assert same(step(stock, ids), step(streamed, ids))
    assert len(seen) >= 2 * (2 + 2)  # per kind: two slots, forward and backward
    assert not any(seen)
    assert executor.num_eager == 0


@pytest.mark.parametrize(("family", "unused"), [("qwen2", {"mlp.down_proj"}), ("gemma3", set())])
def test_values_that_no_gradient_needs_are_found(
    family: str,
    unused: set[str],
    fusing: None,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Qwen2's layers end in down_proj and a residual connection; Gemma3's norm in between needs the value."""
    from poros.engine import graphs

    found: list[Any] = []
    right = graphs.unused_values

    def spy(*args: Any) -> Any:
        found.append(right(*args))
        return found[-1]

    monkeypatch.setattr(graphs, "unused_values", spy)
    stock, streamed, executor = models(checkpoint(family, {}), plugins, families[family])
    ids = torch.randint(3, 100, (2, 8))
    for _ in range(3):
        assert same(step(stock, ids), step(streamed, ids))
    assert found
    recorded = next(iter(executor._shapes.values())).recorded
    assert len(recorded) == len(found)
    for layers, graphs_of_block in zip(found, recorded.values(), strict=True):
        layer = graphs_of_block.copy.layers[0].template.layer
        assert graphs_of_block.copy.unused == layers
        names = {name for name, module in layer.named_modules() if module in layers}
        assert {name.removesuffix(".base_layer") for name in names} == unused


def test_a_value_that_is_used_is_never_taken_for_unused() -> None:
    weights = torch.tensor([1.0, 2.0], requires_grad=True)

    def differentiate(layers: Any) -> Results:
        value = torch.tensor(float("nan") if layers else 3.0)
        return [*torch.autograd.grad((weights * value).sum(), [weights]), None]

    layer: Any = object()
    assert unused_values([layer], differentiate) == []
    assert unused_values([layer], lambda layers: [torch.ones(2), None]) == [layer]
    assert unused_values([layer], lambda layers: [torch.tensor(float("inf"))]) == []


def test_one_layer_that_can_not_be_fused_keeps_its_block_in_the_slot(
    fusing: None,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from poros.engine import copies

    right = copies.matches
    monkeypatch.setattr(
        copies, "matches", lambda layer, rows, dtype: layer.in_features == 64 and right(layer, rows, dtype)
    )
    stock, streamed, executor = models(checkpoint("qwen2", {}), plugins, families["qwen2"])
    ids = torch.randint(3, 100, (1, 8))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert same(step(stock, ids), step(streamed, ids))
    assert "the fused kernel differs from bitsandbytes" in caplog.text
    recorded = next(iter(executor._shapes.values())).recorded
    assert recorded
    assert all(slot is not None for _, _, slot in recorded)
    assert engine_of(streamed).streamer.held is None


def test_blocks_without_adapters(
    checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    """Only one layer in the middle has any."""
    lora = lora_config(LoraPart(rank=4, dropout=0.1))
    lora.layers_to_transform = [2]
    stock = load_stock(checkpoint("qwen2", {}), lora, 0, CPU)
    streamed = poros.load(checkpoint("qwen2", {}), lora=lora, seed=0, device="cpu", plugins=plugins)
    for model in (stock, streamed):
        make_adapters_count(model, 0)
        model.train()
    executor = use_host_graphs(streamed, families["qwen2"])
    ids = torch.randint(3, 100, (1, 8))
    for _ in range(2):
        assert same(step(stock, ids), step(streamed, ids))
    assert executor.num_replays > 0


@pytest.mark.parametrize("kind", ["lora_A", "lower layers"])
def test_frozen_adapters_are_their_own_layers(
    kind: str, checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    """An adapter that takes part but isn't trained differs from layer to layer like any other."""
    stock, streamed, _ = models(checkpoint("qwen2", {}), plugins, families["qwen2"], dropout=0.0)
    for model in (stock, streamed):
        for name, parameter in model.named_parameters():
            if ("lora_A" in name) if kind == "lora_A" else (".layers.0." in name or ".layers.1." in name):
                parameter.requires_grad_(False)
    ids = torch.randint(3, 100, (1, 8))
    for _ in range(2):
        assert same(step(stock, ids), step(streamed, ids))


def test_another_attention_path_is_recorded_anew(
    checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    """A graph holds the kernels of the path on which it was recorded; the gate caught one replayed on another."""
    stock, streamed, executor = models(checkpoint("qwen2", {}), plugins, families["qwen2"])
    ids = torch.randint(3, 100, (1, 8))
    recorded = []
    for path in ("fused", "math", "default", "fused"):
        with attention_path(path):
            assert same(step(stock, ids), step(streamed, ids))
        recorded.append(executor.num_recorded)
    assert recorded[0] < recorded[1] < recorded[2] == recorded[3]


def test_repeated_visits_have_graphs_of_their_own(
    checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    """A visit that runs a block several times restores weights once for all; single runs must not pay for that."""
    stock, streamed, executor = models(checkpoint("qwen2", {}), plugins, families["qwen2"], dropout=0.0)
    executor._restore_once = False
    ids = torch.randint(3, 100, (1, 8))
    for order in ("plain", "block-major", "plain", "block-major"):
        for model in (stock, streamed):
            model.zero_grad()
        for _ in range(2):
            stock(input_ids=ids, labels=ids).loss.backward()
        steps = [lambda: streamed(input_ids=ids, labels=ids).loss.backward()] * 2
        if order == "plain":
            [step() for step in steps]
        else:
            engine_of(streamed).accumulate(steps)
        assert same(*([p.grad for p in model.parameters() if p.grad is not None] for model in (stock, streamed)))
    assert sorted(shape.restore_once for shape in executor._shapes.values()) == [False, True]


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("order", ["ABA", "BAB", "AB", "BA"])
@pytest.mark.parametrize("why", ["no room", "autocast"])
def test_eager_and_replayed_micro_batches_in_one_visit(
    why: str,
    order: str,
    slots: int,
    fusing: None,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
) -> None:
    """A slot must not be given back while layers of the visit are bound to it."""
    stock, streamed, executor = models(
        checkpoint("qwen2", {}), plugins, families["qwen2"], dropout=0.0, slots=slots, transfer=Adversary(seed=1)
    )
    rows = {"A": torch.randint(3, 100, (1, 8)), "B": torch.randint(3, 100, (1, 12))}

    def run(model: Any, name: str) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast"):  # its backward pass runs eagerly
            model(input_ids=rows[name], labels=rows[name]).loss.backward()

    if why == "no room":
        executor.room = False
        engine_of(streamed).accumulate([partial(run, streamed, "A")] * 2)
        executor.room = True
    for model in (stock, streamed):
        model.zero_grad()
    for name in order:
        run(stock, name)
    engine_of(streamed).accumulate([partial(run, streamed, name) for name in order])
    assert executor.num_replays > 0
    assert same(gradients(stock), gradients(streamed))


def test_micro_batches_that_set_a_state_of_their_own(
    checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    stock, streamed, _ = models(checkpoint("qwen2", {}), plugins, families["qwen2"], dropout=0.0)
    ids = torch.randint(3, 100, (1, 8))

    def run(model: Any, scaling: float) -> None:
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.scaling["default"] = scaling
        model(input_ids=ids, labels=ids).loss.backward()

    for scaling in (0.5, 2.0, 0.5):
        run(stock, scaling)
    engine_of(streamed).accumulate([partial(run, streamed, scaling) for scaling in (0.5, 2.0, 0.5)])
    assert same(gradients(stock), gradients(streamed))


def test_a_block_that_changes_the_dtype_runs_eagerly(
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What it gives would be rounded where graphs leave it."""
    from poros.engine.copies import BlockCopy

    stock, streamed, executor = models(checkpoint("qwen2", {}), plugins, families["qwen2"])
    run = BlockCopy.run
    monkeypatch.setattr(BlockCopy, "run", lambda self, *args: run(self, *args).double())
    ids = torch.randint(3, 100, (1, 8))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert same(step(stock, ids), step(streamed, ids))
    assert executor.num_recorded == executor.num_replays == 0
    assert caplog.text.count("running eagerly: a block makes torch.float64") == 1


def test_a_planned_engine_says_so_to_its_graphs(
    checkpoint: Callable[..., Path], plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    from poros.engine.engine import Engine

    monkeypatch.setattr(Engine, "_takes_graphs", staticmethod(lambda *args: True))
    for options in ({}, {"vram": "1GB", "tokens": 64}):
        model = poros.load(checkpoint("qwen2", {}), device="cpu", plugins=plugins, **options)  # type: ignore[arg-type]
        executor = engine_of(model).executor
        assert isinstance(executor, GraphExecutor)
        assert executor.bounded == bool(options)


def test_graphs_of_adapters_as_they_were_do_not_pile_up(
    checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    _, streamed, executor = models(checkpoint("qwen2", {}), plugins, families["qwen2"], dropout=0.0)
    ids = torch.randint(3, 100, (1, 8))
    for number in range(12):
        for module in streamed.modules():
            if isinstance(module, LoraLayer):
                module.scaling["default"] = 0.5 + number
        for _ in range(2):
            step(streamed, ids)
    assert len(executor._copies) <= 6
    assert all(len(shape.recorded) <= 12 for shape in executor._shapes.values())


def test_anomaly_detection_runs_eagerly(
    fusing: None, checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    stock, streamed, executor = models(checkpoint("qwen2", {}), plugins, families["qwen2"], dropout=0.0)
    ids = torch.randint(3, 100, (1, 8))
    with torch.autograd.set_detect_anomaly(True):
        assert same(step(stock, ids), step(streamed, ids))
    assert executor.num_recorded == 0


def test_what_can_not_be_recorded_runs_eagerly(
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stock, streamed, executor = models(checkpoint("qwen2", {}), plugins, families["qwen2"])
    ids = torch.randint(3, 100, (1, 8))
    with caplog.at_level(logging.WARNING):
        assert same(step(stock, ids, unknown=object()), step(streamed, ids, unknown=object()))
    assert "running eagerly: a layer is given a object" in caplog.text
    assert executor.num_recorded == 0


def test_recording_leaves_the_random_state_alone(
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, streamed, executor = models(checkpoint("qwen2", {}), plugins, families["qwen2"])
    torch.manual_seed(4)
    before = rng_state(CPU)
    right = HostGraphs.prepare
    seen: list[bool] = []

    def prepare(self: HostGraphs, *args: Any) -> Any:
        made = right(self, *args)
        seen.append(torch.equal(rng_state(CPU), before))
        return made

    monkeypatch.setattr(HostGraphs, "prepare", prepare)
    streamed(input_ids=torch.randint(3, 100, (1, 8), generator=torch.Generator().manual_seed(0)))
    assert executor.num_recorded > 0
    assert seen == [True]


@pytest.mark.parametrize("resident", [0, "all"])
def test_a_block_with_a_hook_runs_eagerly(
    resident: Any,
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A graph would not call the hook. The other blocks are replayed."""
    stock, streamed, executor = models(
        checkpoint("qwen2", {}), plugins, families["qwen2"], resident=resident, recompute=False
    )
    ids = torch.randint(3, 100, (1, 8))
    heard: list[int] = []
    layer = DecoderParts.of(streamed, families["qwen2"]).layers[2]
    handle = layer.register_forward_hook(lambda *args: heard.append(1))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert same(step(stock, ids), step(streamed, ids))
    assert len(heard) == (2 if resident else 4)
    assert executor.num_replays == 2 * 2 * (len(executor) - 1)
    assert caplog.text.count("block 2 runs eagerly: a hook is registered") == 1
    handle.remove()
    for _ in range(2):
        assert same(step(stock, ids), step(streamed, ids))
    assert len(heard) == (2 if resident else 4)


def test_graphs_on_a_cpu_are_refused(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    with pytest.raises(UnsupportedError, match="need a CUDA device"):
        poros.load(checkpoint("qwen2", {}), device="cpu", plugins=plugins, executor="graphs")
