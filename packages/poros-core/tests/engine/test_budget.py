"""From `vram` to placements: planned, kept to, and said no to before a weight is read."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import poros
from poros.architecture import Architecture, Unsupported
from poros.checkpoint.shards import Shards
from poros.config import LEAST, LoraPart, StreamConfig, parse_size
from poros.engine import attach as attaching
from poros.engine import budget, load
from poros.engine.adapters import lora_config, narrowed
from poros.engine.attach import attach
from poros.engine.budget import budget_bytes, card_of, host_bytes_free, planned, process_bytes
from poros.engine.engine import engine_of
from poros.engine.measured import allocated_components, bytes_on, plan_record, towers_of
from poros.errors import BudgetError, ConfigError, StreamError, UnsupportedError
from poros.parity.stock import Work, load_stock
from poros.plan.fit import dimensions_of
from poros.plugins import Plugins

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("12GB", 12 * 10**9),
        ("11.5 GiB", round(11.5 * 2**30)),
        ("800mb", 800 * 10**6),
        ("16", 16 * 10**9),
        (8, 8 * 10**9),
        ("512MiB", 512 * 2**20),
    ],
)
def test_sizes(text: Any, nbytes: int) -> None:
    assert parse_size(text) == nbytes
    assert StreamConfig(vram=text).vram == str(text)


@pytest.mark.parametrize("text", ["", "GB", "-3GB", "0", "3 bananas", "1e3GB", "12GB please"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_no_budget_means_no_plan(families: dict[str, Architecture]) -> None:
    assert planned(StreamConfig(), families["qwen2"], {}, LoraPart(), device=CPU) is None


def test_a_plan_is_followed(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    model = poros.load(
        checkpoint("qwen2", {}),
        lora=lora_config(LoraPart(rank=4)),
        device="cpu",
        plugins=plugins,
        vram="0.9MB",
        tokens=64,
    )
    engine = engine_of(model)
    assert engine.plan is not None
    assert engine.config == engine.plan.stream
    assert engine.plan.device_bytes <= 900_000
    assert engine.config.vram == "0.9MB"
    assert engine.config.optimizer == engine.config.head == "device"  # optimizer and loss are the caller's own
    model.train()
    ids = torch.arange(65).view(1, -1)
    with pytest.raises(StreamError, match="65 tokens"):
        model(input_ids=ids, labels=ids)
    model(input_ids=ids[:, :64], labels=ids[:, :64]).loss.backward()
    record = plan_record(model)
    assert record is not None
    assert record["vram_budget_gb"] == 0.0009
    assert record["measured_components"]["adapters"] == record["components"]["adapters"]
    roomy = poros.load(checkpoint("qwen2", {}), device="cpu", plugins=plugins, vram="1GB", tokens=64)
    assert engine_of(roomy).config.resident in ("all", 5)


def test_attach_plans_too(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    stock = load_stock(checkpoint("gemma3", {}), lora_config(LoraPart(rank=4)), 0, CPU)
    model: Any = attach(stock, plugins=plugins, vram="1GB", tokens=64, slots=1)
    assert engine_of(model).plan is not None
    assert engine_of(model).config.slots == 1


@pytest.mark.parametrize("family", ["gemma3_multimodal", "gemma4_multimodal"])
def test_the_towers_of_an_attached_model_are_in_its_plan(
    family: str, checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    """They stay on the device, which a plan from the text part of `config.json` knows nothing of."""
    architecture, lora = families[family], lora_config(LoraPart(rank=4))
    directory = checkpoint(family, {})
    config = AutoConfig.from_pretrained(directory)

    def stock() -> Any:
        return load_stock(directory, narrowed(lora, architecture, config.get_text_config()), 0, CPU)

    def tower_parameters(model: Any) -> int:
        inside = tuple(f"{path}." for path in architecture.absent)
        return sum(p.nbytes for name, p in model.get_base_model().named_parameters() if name.startswith(inside))

    attached: Any = attach(stock(), plugins=plugins, vram="1GB", tokens=64)
    loaded: Any = poros.load(directory, lora=lora, device="cpu", plugins=plugins, vram="1GB", tokens=64)
    with_towers, without = engine_of(attached).plan, engine_of(loaded).plan
    assert with_towers is not None
    assert without is not None
    # Scales and code tables of what is in 4 bit, and buffers, beside the parameters.
    assert 0 < tower_parameters(attached) <= with_towers.device["towers"] == allocated_components(attached)["towers"]
    assert without.device["towers"] == allocated_components(loaded)["towers"] == 0
    found = [allocated_components(model) for model in (attached, loaded)]
    for name in ("embedding", "head", "outside the layers", "adapters"):
        assert found[0][name] == found[1][name], name

    # A budget that holds the text part alone is too small for both: refused, and nothing has changed.
    least = engine_of(poros.load(directory, lora=lora, device="cpu", plugins=plugins, vram=LEAST, tokens=64)).plan
    assert least is not None
    small = f"{(least.device_bytes + with_towers.device['towers'] // 2) / 1e6:.6f}MB"
    poros.load(directory, lora=lora, device="cpu", plugins=plugins, vram=small, tokens=64)
    model = stock()
    with pytest.raises(BudgetError, match="64 tokens at a time need at least"):
        attach(model, plugins=plugins, vram=small, tokens=64)
    attach(model, plugins=plugins, vram="1GB", tokens=64)


def test_towers_on_another_device_take_nothing(
    checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    architecture, directory = families["gemma3_multimodal"], checkpoint("gemma3_multimodal", {})
    model = load_stock(directory, narrowed(lora_config(LoraPart(rank=4)), architecture, None), 0, CPU)
    towers = towers_of(model.get_base_model(), architecture)
    assert bytes_on(CPU, towers) > 0
    assert bytes_on(torch.device("cuda", 0), towers) == 0


def test_attach_refuses_before_it_changes_anything(
    checkpoint: Callable[..., Path], plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the process holds beside the model is in the way; the model's own weights are not."""
    gpu = torch.device("cuda", 0)
    check_room, seen = budget.check_room, []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    stock = load_stock(checkpoint("qwen2", {}), lora_config(LoraPart(rank=4)), 0, CPU)
    ids = torch.arange(8).view(1, -1)
    stock.train()  # in eval mode bitsandbytes repacks a resident model's weights on some processors
    before = stock(input_ids=ids).logits

    def as_on_a_gpu(plan: Any, device: Any, own: int) -> None:
        seen.append(own)
        check_room(plan, gpu, own)

    monkeypatch.setattr(attaching, "check_room", as_on_a_gpu)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: seen[-1] + 2 * 10**9)
    with pytest.raises(BudgetError, match=r"holds 2\.0 GB of GPU memory already"):
        attach(stock, plugins=plugins, vram="1GB", tokens=64)
    assert torch.equal(stock(input_ids=ids).logits, before)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: seen[-1] + 10**6)
    attach(stock, plugins=plugins, vram="1GB", tokens=64)
    assert seen[0] == seen[1] >= sum(parameter.nbytes for parameter in stock.parameters() if parameter.requires_grad)
    assert torch.equal(stock(input_ids=ids).logits, before)


def test_attach_refuses_to_plan_for_a_widened_model(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    from peft import prepare_model_for_kbit_training

    stock = load_stock(checkpoint("qwen2", {}), lora_config(LoraPart(rank=4)), 0, CPU)
    prepare_model_for_kbit_training(stock)
    with pytest.raises(UnsupportedError, match="float32"):
        attach(stock, plugins=plugins, vram="1GB", tokens=64)


def test_too_small_a_budget_is_refused_before_a_weight_is_read(
    checkpoint: Callable[..., Path], plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Shards, "read", lambda *args: pytest.fail("a weight was read"))
    monkeypatch.setattr(load, "build_skeleton", lambda *args: pytest.fail("a model was built"))
    with pytest.raises(BudgetError, match="at least"):
        poros.load(checkpoint("qwen2", {}), device="cpu", plugins=plugins, vram="0.1MB", tokens=64)


def test_a_budget_needs_tokens(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    with pytest.raises(ConfigError, match="tokens"):
        poros.load(checkpoint("qwen2", {}), device="cpu", plugins=plugins, vram="1GB")
    with pytest.raises(ConfigError, match="is not a size"):
        poros.load(checkpoint("qwen2", {}), device="cpu", plugins=plugins, vram="lots", tokens=64)


def test_auto_needs_a_gpu() -> None:
    with pytest.raises(BudgetError, match="no GPU"):
        budget_bytes("auto", CPU)
    assert budget_bytes("3GB", CPU) == 3 * 10**9


def test_what_can_not_be_planned_is_said(families: dict[str, Architecture]) -> None:
    with pytest.raises(UnsupportedError, match="hidden_size"):
        dimensions_of(families["qwen2"], {"model_type": "qwen2"})
    with pytest.raises(UnsupportedError, match="can't be planned"):
        dimensions_of(dataclasses.replace(families["qwen2"], dimensions=None), {})


def test_a_predicate_that_needs_a_value_names_it(families: dict[str, Architecture]) -> None:
    """Plans know `config.json` alone; a config of transformers has a default for all that it leaves out."""
    item = Unsupported(name="many experts", applies=lambda config: config.num_experts > 1, example={"num_experts": 4})
    family = dataclasses.replace(families["qwen2"], unsupported=(item,))
    values = family.tiny_config
    for config in (values, {"model_type": "outer", "text_config": values}):
        with pytest.raises(
            UnsupportedError, match=r"config\.json has no num_experts, by which the family qwen2"
        ) as caught:
            dimensions_of(family, config)
        assert "getattr(config, 'num_experts'" in caught.value.hint
    assert dimensions_of(family, {**values, "num_experts": 0}).hidden == values["hidden_size"]
    wrong = dataclasses.replace(item, applies=lambda config: config.hidden_size.nonsense)
    with pytest.raises(AttributeError, match="nonsense"):  # no value is missing: the predicate is wrong
        dimensions_of(dataclasses.replace(family, unsupported=(wrong,)), values)


def test_a_cpu_has_no_context_and_no_process_bytes() -> None:
    assert card_of(CPU).context_gb == 0.0
    assert process_bytes(CPU) is None
    assert 10**8 < host_bytes_free() < 10**13


def test_the_limit_is_set_and_lifted(
    checkpoint: Callable[..., Path], plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU torch is told how much it may take beside the context."""
    told: list[float] = []
    held = [0]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: held[0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * 10**9, 10 * 10**9))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, device: told.append(part))
    model = poros.load(checkpoint("qwen2", {}), device="cpu", plugins=plugins, vram="2GB", tokens=64)
    plan = engine_of(model).plan
    assert plan is not None
    gpu = torch.device("cuda", 0)
    budget.enforce(plan, gpu)
    budget.lift(gpu)
    budget.lift(gpu)
    assert told == [0.2, 1.0]
    budget.enforce(plan, CPU)
    assert len(told) == 2
    held[0] = 3 * 10**9
    with pytest.raises(BudgetError, match=r"holds 3\.0 GB of GPU memory already"):
        budget.enforce(plan, gpu)
    assert len(told) == 2
    held[0] = 0
    graphs = dataclasses.replace(plan, device={**plan.device, "context": 3 * 10**8, "recorded graphs": 10**8})
    budget.enforce(graphs, gpu)
    assert told[2:] == [pytest.approx(0.16)], "the driver's part is no part of torch's"
    budget.lift(gpu)


def test_a_limit_goes_with_its_model_and_leaves_those_of_others(
    checkpoint: Callable[..., Path], plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    from poros.engine import engine as engines

    told: list[float] = []
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * 10**9, 10 * 10**9))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, device: told.append(part))
    monkeypatch.setattr(engines, "lift", lambda device, plan: budget.lift(gpu, plan))

    def planned_model(vram: str) -> Any:
        model = poros.load(checkpoint("qwen2", {}), device="cpu", plugins=plugins, vram=vram, tokens=64)
        plan = engine_of(model).plan
        assert plan is not None
        budget.enforce(plan, gpu)
        return model

    first, second, third = planned_model("2GB"), planned_model("4GB"), planned_model("2GB")
    assert told == [0.2, 0.4, 0.2]
    del second  # without being closed
    gc.collect()
    assert told[3:] == [0.2]
    for model, part in ((third, 0.2), (first, 1.0)):
        engine_of(model).close()
        assert told[-1] == part
    del first, third, model
    gc.collect()
    assert len(told) == 6


def test_the_gate_runs_a_plan(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    from poros.parity.gate import check, receipt_of

    result = check(
        str(checkpoint("qwen2", {"tie_word_embeddings": False})),
        lora_config(LoraPart(rank=4, dropout=0.1)),
        Work(steps=2, length=24, accumulation=1),
        stream=StreamConfig(vram="0.85MB"),
        device=CPU,
        plugins=plugins,
    )
    assert result.verdict == "identical"
    receipt = receipt_of(result, LoraPart(rank=4, dropout=0.1))
    assert receipt.plan is not None
    assert receipt.plan["placements"] == receipt.config["stream"]
    assert receipt.config["stream"]["vram"] == "0.85MB"


def test_a_streamed_arm_without_room_is_said(
    checkpoint: Callable[..., Path], plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    from poros.engine.engine import Engine
    from poros.errors import PorosError
    from poros.parity.gate import check

    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("made up")

    monkeypatch.setattr(Engine, "accumulate", full)
    with pytest.raises(PorosError, match="more memory than it was given"):
        check(
            str(checkpoint("qwen2", {})),
            lora_config(LoraPart(rank=4)),
            Work(steps=1, length=16, accumulation=1),
            stream=StreamConfig(vram="1GB"),
            device=CPU,
            plugins=plugins,
        )
