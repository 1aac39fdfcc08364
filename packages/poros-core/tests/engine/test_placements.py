"""Where things live changes nothing: every placement, alone and in pairs, on every surface."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

import poros
from poros.architecture import Architecture
from poros.config import LoraPart, StreamConfig, StreamOptions
from poros.engine.adapters import lora_config
from poros.engine.attach import attach
from poros.engine.attention import attention_path
from poros.engine.engine import engine_of
from poros.engine.optimizer import adamw_for
from poros.engine.parts import DecoderParts, causal_lm
from poros.engine.vocabulary import HostEmbedding, HostHead
from poros.errors import StreamError
from poros.parity.stock import Work, gradient_of, load_stock, make_adapters_count, train
from poros.parity.surfaces import SURFACES, Trace, compare
from poros.plugins import Plugins
from poros.testing.transfers import Adversary

CPU = torch.device("cpu")

CHOICES: dict[str, tuple[Any, ...]] = {
    "embedding": ("device", "host"),
    "head": ("device", "host"),
    "update": (("device", "device"), ("host", "device"), ("host", "host")),
    "boundaries": ("device", "host"),
    "loss_rows": (None, 16),
    "slots": (1, 2),
    "block_size": (1, 2),
    "resident": (0, 2, "all"),
    "recompute": (True, False),
    "accumulation": (1, 3),
    "dropout": (0.0, 0.1),
    "tied": (False, True),
    "padded": (False, True),
}
"""Every setting that says where something lives, and what could get in its way; `update` is optimizer and gradients."""


def pairwise(choices: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """A few combinations in which every pair of values of two settings occurs."""
    names = list(choices)
    missing = {
        (one, a, other, b)
        for one, other in itertools.combinations(names, 2)
        for a in choices[one]
        for b in choices[other]
    }
    chosen = []
    while missing:
        # Greedy: begin with a missing pair, then give each setting the value that brings the most missing pairs.
        one, a, other, b = min(missing, key=repr)
        case: dict[str, Any] = {one: a, other: b}
        for name in names:
            if name not in case:
                case[name] = max(choices[name], key=lambda value: len(missing & pairs({**case, name: value}, names)))
        missing -= pairs(case, names)
        chosen.append(case)
    return chosen


def pairs(case: dict[str, Any], names: list[str]) -> set[tuple[str, Any, str, Any]]:
    known = [name for name in names if name in case]
    return {(one, case[one], other, case[other]) for one, other in itertools.combinations(known, 2)}


CASES = pairwise(CHOICES)

OTHERS = ("optimizer", "gradients", "tier", "executor", "restore_once", "vram", "tokens")
"""Settings that are there by another name, or say nothing of places on a CPU."""


def test_every_pair_of_values_occurs() -> None:
    names = list(CHOICES)
    found = set().union(*(pairs(case, names) for case in CASES))
    for one, other in itertools.combinations(names, 2):
        assert {(one, a, other, b) for a in CHOICES[one] for b in CHOICES[other]} <= found
    placements = {name for name in StreamConfig.model_fields if name not in OTHERS}
    assert placements <= set(CHOICES)


def run(model: Any, architecture: Architecture, work: Work, streams: bool = False) -> Trace:
    make_adapters_count(model, work.seed)
    options: dict[str, Any] = {}
    if streams:
        engine = engine_of(model)
        options = {"accumulate": engine.accumulate, "make_optimizer": adamw_for(engine)}
    with attention_path("fused"):
        return train(model, DecoderParts.of(model, architecture).layers, work, CPU, **options)


@pytest.fixture(scope="module")
def reference(
    checkpoint: Callable[..., Path], families: dict[str, Architecture]
) -> Callable[[str, LoraConfig, Work, dict[str, Any]], Trace]:
    """Stock's trace, made once for each kind of work."""
    made: dict[str, Trace] = {}

    def make(family: str, lora: LoraConfig, work: Work, config: dict[str, Any]) -> Trace:
        key = repr((family, lora.lora_dropout, work, config))
        if key not in made:
            made[key] = run(load_stock(checkpoint(family, config), lora, work.seed, CPU), families[family], work)
        return made[key]

    return make


def settings(case: dict[str, Any]) -> StreamOptions:
    named = {name: value for name, value in case.items() if name in StreamConfig.model_fields}
    optimizer, gradients = case["update"]
    return {**named, "optimizer": optimizer, "gradients": gradients}  # type: ignore[return-value, typeddict-item]


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_every_pair_of_placements(
    family: str,
    number: int,
    reference: Callable[..., Trace],
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
) -> None:
    case = CASES[number]
    lora = lora_config(LoraPart(rank=4, alpha=8, dropout=case["dropout"]))
    work = Work(
        steps=3, length=24, padded=case["padded"], accumulation=case["accumulation"], learning_rate=1e-2, batch_size=2
    )
    config = {"tie_word_embeddings": case["tied"]}
    adversary = Adversary(seed=number)
    model = poros.load(
        checkpoint(family, config),
        lora=lora,
        seed=0,
        device="cpu",
        plugins=plugins,
        transfer=adversary,
        **settings(case),
    )
    result = compare(
        reference(family, lora, work, config), run(model, families[family], work, streams=True), engine_of(model).blocks
    )
    assert result.identical, f"{case}: {result.difference}"
    assert result.surfaces == dict.fromkeys(SURFACES, True)
    assert adversary.poisoned > 0 or case["resident"] == "all"


ALL_ON_HOST: StreamOptions = {
    "embedding": "host",
    "head": "host",
    "optimizer": "host",
    "gradients": "host",
    "boundaries": "host",
    "loss_rows": 16,
}


@pytest.mark.parametrize("series", [{}, {"num_kv_shared_layers": 3, "hidden_size_per_layer_input": 8}])
def test_soft_cap_and_tables_per_layer(
    series: dict[str, Any],
    reference: Callable[..., Trace],
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
) -> None:
    if series:
        series = {**series, "attention_k_eq_v": False, "num_global_key_value_heads": None, "num_key_value_heads": 1}
    lora = lora_config(LoraPart(rank=4, alpha=8, dropout=0.1))
    work = Work(steps=3, length=24, learning_rate=1e-2)
    directory = checkpoint("gemma4", series)
    model = poros.load(directory, lora=lora, seed=0, device="cpu", plugins=plugins, **ALL_ON_HOST)
    tables = [module for module in model.modules() if isinstance(module, HostEmbedding)]
    assert len(tables) == (2 if series else 1)
    stock = load_stock(directory, engine_lora(lora, families["gemma4"], model), 0, CPU)
    expected = run(stock, families["gemma4"], work)
    result = compare(expected, run(model, families["gemma4"], work, streams=True), engine_of(model).blocks)
    assert result.identical, str(result.difference)


def engine_lora(lora: LoraConfig, architecture: Architecture, model: Any) -> LoraConfig:
    from poros.engine.adapters import narrowed
    from poros.engine.parts import config_of

    return narrowed(lora, architecture, config_of(causal_lm(model)))


@pytest.mark.parametrize("tied", [True, False])
def test_attach_takes_the_weights_to_the_host(
    tied: bool,
    reference: Callable[..., Trace],
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
) -> None:
    lora = lora_config(LoraPart(rank=4, alpha=8))
    work = Work(steps=3, length=24, learning_rate=1e-2)
    config = {"tie_word_embeddings": tied}
    stock = load_stock(checkpoint("qwen2", config), lora, 0, CPU)
    model: Any = attach(stock, plugins=plugins, **ALL_ON_HOST)
    base = causal_lm(model)
    weights = [module._parameters["weight"] for module in (base.lm_head, base.model.embed_tokens)]
    assert all(weight.untyped_storage().nbytes() == 2 for weight in weights)  # placeholders
    assert (weights[0] is weights[1]) == tied
    with pytest.raises(StreamError, match="reads the head's weight"):
        base.lm_head.weight.sum()
    with pytest.raises(StreamError, match="resized"):
        base.resize_token_embeddings(200)
    parameters = sum(p.numel() for p in load_stock(checkpoint("qwen2", config), lora, 0, CPU).parameters())
    assert sum(p.numel() for p in model.parameters()) == parameters
    result = compare(
        reference("qwen2", lora, work, config),
        run(model, families["qwen2"], work, streams=True),
        engine_of(model).blocks,
    )
    assert result.identical, str(result.difference)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_blocks_without_adapters(
    accumulation: int, checkpoint: Callable[..., Path], families: dict[str, Architecture], plugins: Plugins
) -> None:
    """In between, below and above: their boundaries are brought back only where a gradient goes on."""
    lora = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], layers_to_transform=[1, 3], task_type="CAUSAL_LM"
    )
    work = Work(steps=3, length=24, accumulation=accumulation, learning_rate=1e-2)
    directory = checkpoint("qwen2", {"tie_word_embeddings": False})
    expected = run(load_stock(directory, lora, 0, CPU), families["qwen2"], work)
    model = poros.load(directory, lora=lora, seed=0, device="cpu", plugins=plugins, **ALL_ON_HOST)
    result = compare(expected, run(model, families["qwen2"], work, streams=True), engine_of(model).blocks)
    assert result.identical, str(result.difference)


def test_a_wrong_byte_of_head_or_table_is_told_apart(
    reference: Callable[..., Trace],
    checkpoint: Callable[..., Path],
    families: dict[str, Architecture],
    plugins: Plugins,
) -> None:
    """The control arm of this file."""
    lora = lora_config(LoraPart(rank=4, alpha=8))
    work = Work(steps=1, length=24, learning_rate=1e-2)
    config = {"tie_word_embeddings": False}
    for what in ("head", "embedding"):
        model = poros.load(checkpoint("qwen2", config), lora=lora, seed=0, device="cpu", plugins=plugins, **ALL_ON_HOST)
        engine = engine_of(model)
        if what == "head":
            engine.store.slab(engine.store.num_slabs - 1)[1] ^= 0x80
        else:
            causal_lm(model).model.embed_tokens.__dict__["_poros_table"].neg_()
        result = compare(
            reference("qwen2", lora, work, config), run(model, families["qwen2"], work, streams=True), engine.blocks
        )
        assert not result.identical, what


def test_the_head_shares_the_memory_of_the_slots(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    model = poros.load(checkpoint("qwen2", {}), device="cpu", plugins=plugins, head="host", slots=2)
    engine = engine_of(model)
    assert engine.arena is not None
    head, slots = 128 * 64 * 2, sum(slot.buffer.numel() for slot in engine.streamer.slots)
    assert engine.arena.buffer.numel() == max(head, slots)
    begin = engine.arena.buffer.data_ptr()
    assert all(begin <= slot.buffer.data_ptr() < begin + engine.arena.buffer.numel() for slot in engine.streamer.slots)


@pytest.mark.parametrize(
    ("options", "tied", "embeddings", "travels"),
    [
        ({"embedding": "host", "head": "device"}, False, 1, False),
        ({"embedding": "device", "head": "host"}, False, 0, True),
        ({"embedding": "host", "head": "host"}, True, 1, True),
        ({"embedding": "host", "head": "device"}, True, 0, False),  # one matrix: on the host only if both are
        ({"embedding": "device", "head": "host"}, True, 0, False),
        ({"head": "host", "resident": "all"}, False, 0, False),  # it would gain nothing
    ],
)
def test_where_the_vocabulary_ends_up(
    options: StreamOptions,
    tied: bool,
    embeddings: int,
    travels: bool,
    checkpoint: Callable[..., Path],
    plugins: Plugins,
) -> None:
    model = poros.load(checkpoint("qwen2", {"tie_word_embeddings": tied}), device="cpu", plugins=plugins, **options)
    assert sum(isinstance(module, HostEmbedding) for module in model.modules()) == embeddings
    assert isinstance(model.lm_head, HostHead) == travels
    assert (engine_of(model).streamer.head is not None) == travels


def test_a_second_backward_pass_and_one_after_an_evaluation(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    """The head isn't in place any more then, and is brought and run again."""
    gradients = []
    for options in ({}, ALL_ON_HOST):
        model = poros.load(
            checkpoint("qwen2", {}),
            lora=lora_config(LoraPart(rank=4)),
            seed=0,
            device="cpu",
            plugins=plugins,
            **options,  # type: ignore[arg-type]
        )
        make_adapters_count(model, 0)
        adapters = [p for p in model.parameters() if p.requires_grad]
        optimizer = adamw_for(engine_of(model))(adapters)
        ids = torch.arange(24).view(1, -1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
            with torch.no_grad():
                model(input_ids=ids.flip(-1))
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append([found for p in adapters if (found := gradient_of(optimizer, p)) is not None])
    assert len(gradients[0]) == 2 * 7 * 5
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_generating_with_a_travelling_head(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    directory = checkpoint("gemma3", {})
    texts = []
    for options in ({}, ALL_ON_HOST):
        model = poros.load(directory, device="cpu", plugins=plugins, **options)  # type: ignore[arg-type]
        texts.append(model.generate(torch.tensor([[2, 5, 9]]), max_new_tokens=8, do_sample=False))
    assert torch.equal(*texts)


def test_the_options_are_the_configs() -> None:
    assert set(StreamOptions.__annotations__) == set(StreamConfig.model_fields)
