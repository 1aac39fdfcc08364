"""A streamed model is an ordinary model to everybody else."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, VeraConfig, get_peft_model

import poros
from poros.config import LoraPart
from poros.engine.adapters import lora_config
from poros.engine.attach import attach
from poros.engine.engine import engine_of
from poros.errors import ConfigError, StreamError, UnsupportedError
from poros.parity.stock import adapters_of, load_stock, make_adapters_count
from poros.plugins import Plugins

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 9, 33, 7, 2, 8, 41, 3]])


def lora(**values: Any) -> LoraConfig:
    return lora_config(LoraPart(rank=4, **values))


def pair(directory: Path, plugins: Plugins, dropout: float = 0.0, **options: Any) -> tuple[Any, Any]:
    """A stock and a streamed model with the same adapters."""
    stock = load_stock(directory, lora(dropout=dropout), 0, CPU)
    streamed = poros.load(directory, lora=lora(dropout=dropout), seed=0, device="cpu", plugins=plugins, **options)
    for model in (stock, streamed):
        make_adapters_count(model, 0)
        model.train()  # in eval mode bitsandbytes may choose another kernel for a resident model on a CPU
    return stock, streamed


def gradients(model: Any, **inputs: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS, **inputs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_names_and_types_are_stocks(family: str, checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    stock, streamed = pair(checkpoint(family, {}), plugins)
    assert isinstance(streamed, PeftModel)
    assert list(streamed.state_dict()) == list(stock.state_dict())
    assert [(n, type(m).__name__) for n, m in streamed.named_modules()] == [
        (n, type(m).__name__) for n, m in stock.named_modules()
    ]
    assert streamed.get_nb_trainable_parameters() == stock.get_nb_trainable_parameters()
    assert streamed.config.to_dict() == stock.config.to_dict()
    assert streamed.training == stock.training


def test_without_autocast_too(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    assert_same(*(gradients(model) for model in pair(checkpoint("qwen2", {}), plugins)))


def test_backward_inside_the_autocast_context(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    """Autocast's cache of casts must not hand a cast made without gradients to the recompute."""
    found = []
    for model in pair(checkpoint("gemma3", {}), plugins):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(gradients(model))
    assert_same(*found)


def test_gradient_checkpointing_changes_nothing(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    """TRL switches it on by default; every block is recomputed anyway."""
    stock, streamed = pair(checkpoint("qwen2", {}), plugins)
    streamed.gradient_checkpointing_enable({"use_reentrant": False})
    streamed.enable_input_require_grads()
    runs: list[int] = []
    layer = streamed.get_base_model().model.layers[2]
    handle = layer.self_attn.register_forward_hook(lambda *args: runs.append(1))
    assert_same(gradients(stock), gradients(streamed))
    handle.remove()
    assert len(runs) == 2  # forward and recompute; checkpointing inside the recompute would make it three


def test_hooks_on_gradients_are_called_once(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    found = []
    for model in pair(checkpoint("qwen2", {}), plugins):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient * 3)
        found.append(gradients(model))
    assert_same(*found)


def test_two_forward_passes_before_one_backward_pass(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    """As preference losses do: two graphs are alive at a time, over the same slots."""
    found = []
    for model in pair(checkpoint("qwen2", {}), plugins, dropout=0.1):
        torch.manual_seed(1)
        first = model(input_ids=IDS).logits
        second = model(input_ids=IDS.flip(1)).logits
        (first.float().logsumexp(-1).sum() - second.float().logsumexp(-1).sum()).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert_same(*found)


def test_the_same_graph_backward_twice(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    found = []
    for model in pair(checkpoint("qwen2", {}), plugins):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward(retain_graph=True)
        loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert_same(*found)


def test_an_evaluation_between_forward_and_backward(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    stock, streamed = pair(checkpoint("qwen2", {}), plugins, dropout=0.1)
    torch.manual_seed(1)
    expected = gradients(stock)
    torch.manual_seed(1)
    streamed.zero_grad()
    loss = streamed(input_ids=IDS, labels=IDS).loss
    with torch.no_grad():
        streamed.eval()
        streamed(input_ids=IDS.flip(1))
        streamed.train()
    loss.backward()
    assert_same(expected, {name: p.grad.clone() for name, p in streamed.named_parameters() if p.grad is not None})


def test_disabled_adapters_give_the_base_model(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    stock, streamed = pair(checkpoint("qwen2", {}), plugins)
    with torch.no_grad(), stock.disable_adapter(), streamed.disable_adapter():
        base = streamed(input_ids=IDS).logits
        assert torch.equal(stock(input_ids=IDS).logits, base)
    with torch.no_grad():
        assert not torch.equal(streamed(input_ids=IDS).logits, base)


def test_generation_with_a_cache(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    _, streamed = pair(checkpoint("gemma3", {}), plugins)
    streamed.eval()
    cached = streamed.generate(input_ids=IDS, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert cached.shape == (1, IDS.shape[1] + 6)
    ids = IDS
    with torch.no_grad():
        for _ in range(6):
            ids = torch.cat([ids, streamed(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(cached, ids)


def test_eval_mode_leaves_the_store_as_it_is(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    """bitsandbytes repacks CPU weights in place when a layer in eval mode runs; a slot's weight must stay."""
    model = attach(load_stock(checkpoint("qwen2", {}), lora(), 0, CPU), plugins=plugins)
    make_adapters_count(model, 0)
    model.train()
    before = gradients(model)
    model.eval()
    with torch.no_grad():
        model(input_ids=IDS)
    model.train()
    assert_same(before, gradients(model))


def test_adapters_are_checked_for_change_between_forward_and_backward(
    checkpoint: Callable[..., Path], plugins: Plugins
) -> None:
    _, model = pair(checkpoint("qwen2", {}), plugins)
    loss = model(input_ids=IDS, labels=IDS).loss
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_adapters_made_after_loading(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    """The other order: load the bare model, then peft as in anybody's script."""
    stock, _ = pair(checkpoint("qwen2", {}), plugins)
    bare = poros.load(checkpoint("qwen2", {}), device="cpu", plugins=plugins)
    torch.manual_seed(0)
    model = get_peft_model(bare, lora())
    make_adapters_count(model, 0)
    model.train()
    assert_same(gradients(stock), gradients(model))


@pytest.mark.parametrize(
    ("flag", "where"),
    # transformers itself refuses output_attentions in the config of a model with sdpa
    [("output_hidden_states", "call"), ("output_attentions", "call"), ("output_hidden_states", "config")],
)
def test_outputs_of_layers_are_refused(
    flag: str, where: str, checkpoint: Callable[..., Path], plugins: Plugins
) -> None:
    model = poros.load(checkpoint("qwen2", {}), device="cpu", plugins=plugins)
    if where == "config":
        setattr(model.config, flag, True)
    with pytest.raises(UnsupportedError, match=f"{flag} is not available"):
        model(input_ids=IDS, **({flag: True} if where == "call" else {}))


def test_a_cache_with_gradients_is_refused(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    from transformers import DynamicCache

    _, model = pair(checkpoint("qwen2", {}), plugins)
    with pytest.raises(StreamError, match="a cache was passed"):
        model(input_ids=IDS, past_key_values=DynamicCache(config=model.config))


def test_a_second_input_that_needs_a_gradient_is_refused(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    _, model = pair(checkpoint("qwen2", {}), plugins)
    mask = torch.zeros(1, 1, 8, 8, requires_grad=True)
    with pytest.raises(UnsupportedError, match="second input that needs a gradient"):
        model(input_ids=IDS, attention_mask=mask)


def test_a_failure_in_the_prologue_puts_the_layers_back(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    stock, model = pair(checkpoint("qwen2", {}), plugins)
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[10_000]]))
    assert_same(gradients(stock), gradients(model))


def test_closed_engines_say_so(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    model = poros.load(checkpoint("qwen2", {}), device="cpu", plugins=plugins)
    poros.close(model)
    with pytest.raises(StreamError, match="no longer streams"):
        model(input_ids=IDS)


# -- state that changes between a forward pass and its backward pass ---------------------------------------------------


def loss_of(model: Any, **inputs: Any) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=IDS, labels=IDS, **inputs).loss
    return loss


def test_a_mode_that_was_changed_before_backward_is_noticed(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    _, model = pair(checkpoint("qwen2", {}), plugins, dropout=0.3)
    loss = loss_of(model)
    model.eval()
    with pytest.raises(StreamError, match="changed between a forward pass and its backward pass"):
        loss.backward()
    model.train()
    loss_of(model).backward()


def test_adapters_that_were_switched_before_backward_are_noticed(
    checkpoint: Callable[..., Path], plugins: Plugins
) -> None:
    _, model = pair(checkpoint("qwen2", {}), plugins)
    with model.disable_adapter():
        base = model.get_input_embeddings()(IDS).requires_grad_()
        loss = model(inputs_embeds=base, labels=IDS).loss
    with pytest.raises(StreamError, match="changed between"):
        loss.backward()


def test_attention_switches_of_the_forward_pass_hold_in_the_recompute(
    checkpoint: Callable[..., Path], plugins: Plugins
) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    found = []
    for model in pair(checkpoint("qwen2", {}), plugins):
        with sdpa_kernel(SDPBackend.MATH):
            loss = loss_of(model)
        loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert_same(*found)


def test_an_argument_that_was_changed_before_backward_is_noticed(
    checkpoint: Callable[..., Path], plugins: Plugins
) -> None:
    _, model = pair(checkpoint("qwen2", {}), plugins)
    positions = torch.arange(8)[None]
    loss = loss_of(model, position_ids=positions)
    positions += 1
    with pytest.raises(StreamError, match="changed in place"):
        loss.backward()


def test_packed_positions_and_the_default_cache(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    """With a cache transformers doesn't look for packed sequences; streaming must not change which mask it makes."""
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    for options in ({}, {"use_cache": False}, {"use_cache": True}):
        stock, streamed = pair(checkpoint("qwen2", {}), plugins)
        found = [gradients(model, position_ids=positions, **options) for model in (stock, streamed)]
        assert_same(*found)


# -- what a streamed model can't do -----------------------------------------------------------------------------------


@pytest.mark.parametrize("merge", ["merge_adapter", "merge_and_unload"])
@pytest.mark.filterwarnings("ignore:Merge lora")
def test_a_merged_base_is_noticed(merge: str, checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    _, model = pair(checkpoint("qwen2", {}), plugins)
    merged = getattr(model, merge)() or model
    with pytest.raises(StreamError, match="was replaced by another one"), torch.no_grad():
        merged(input_ids=IDS)


def test_saving_the_base_is_refused(checkpoint: Callable[..., Path], plugins: Plugins, tmp_path: Path) -> None:
    _, model = pair(checkpoint("qwen2", {}), plugins)
    with pytest.raises(ValueError, match="not serializable"):
        model.get_base_model().save_pretrained(tmp_path / "base")


@pytest.mark.parametrize("copying", [copy.deepcopy, pickle.dumps])
def test_copies_and_pickles_are_refused(
    copying: Callable[[Any], Any], checkpoint: Callable[..., Path], plugins: Plugins
) -> None:
    _, model = pair(checkpoint("qwen2", {}), plugins)
    with pytest.raises(StreamError, match="can't be copied or pickled"):
        copying(model)


@pytest.mark.parametrize(
    "config",
    [
        {"use_dora": True},
        {"modules_to_save": ["input_layernorm"]},
        {"bias": "all"},
        {"alora_invocation_tokens": [7, 2]},
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_adapters_made_after_loading_are_checked_too(
    config: dict[str, Any], checkpoint: Callable[..., Path], plugins: Plugins
) -> None:
    bare = poros.load(checkpoint("qwen2", {}), device="cpu", plugins=plugins)
    model = get_peft_model(bare, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **config))
    with pytest.raises(UnsupportedError):
        model.get_base_model()(input_ids=IDS)


def test_memory_is_given_back_with_the_model(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    gc.collect()
    gc.disable()
    try:
        model = poros.load(checkpoint("qwen2", {}), device="cpu", plugins=plugins)
        engine = weakref.ref(engine_of(model))
        model(input_ids=IDS)
        del model
        assert engine() is None
    finally:
        gc.enable()


def test_two_models_stream_at_once(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    stock, one = pair(checkpoint("qwen2", {}), plugins)
    other_stock, other = pair(checkpoint("gemma3", {}), plugins)
    losses = loss_of(one), loss_of(other)
    for loss in losses:
        loss.backward()
    for model, reference in ((one, stock), (other, other_stock)):
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert_same(gradients(reference), found)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_an_optimizer_made_before_attaching_goes_on(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    """The adapters are moved in memory, but stay the same parameters."""
    model = load_stock(checkpoint("qwen2", {}), lora(), 0, CPU)
    make_adapters_count(model, 0)
    adapters = adapters_of(model)
    values = {name: parameter.detach().clone() for name, parameter in adapters.items()}
    optimizer = torch.optim.SGD(adapters.values(), lr=0.1)
    poros.attach(model.train(), plugins=plugins)
    for name, parameter in adapters_of(model).items():
        assert parameter is adapters[name]
        assert torch.equal(parameter, values[name])
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert any(not torch.equal(parameter, values[name]) for name, parameter in adapters.items())


def test_attaching_twice_is_refused(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    model = poros.load(checkpoint("qwen2", {}), device="cpu", plugins=plugins)
    with pytest.raises(StreamError, match="streams already"):
        attach(model, plugins=plugins)


def test_attaching_a_model_that_is_not_in_four_bit_streams_it_in_sixteen(
    checkpoint: Callable[..., Path], plugins: Plugins
) -> None:
    """The frozen tensors are read from the module, whatever their dtype."""
    from transformers import AutoModelForCausalLM

    def make() -> Any:
        plain = AutoModelForCausalLM.from_pretrained(checkpoint("qwen2", {}), dtype=torch.bfloat16)
        torch.manual_seed(0)
        model = get_peft_model(plain, lora())
        make_adapters_count(model, 0)
        return model.train()

    assert_same(gradients(make()), gradients(attach(make(), plugins=plugins)))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_modules": ["q_proj"], "use_dora": True}, "use_dora"),
        ({"target_modules": ["q_proj"], "bias": "all"}, "bias"),
        ({"target_modules": ["q_proj"], "init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"target_modules": ["q_proj"], "init_lora_weights": "olora"}, "init_lora_weights"),
        ({"target_modules": ["q_proj"], "alora_invocation_tokens": [7, 2]}, "alora_invocation_tokens"),
        ({"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"}, "init_lora_weights"),
        ({"target_modules": ["q_proj"], "layer_replication": [(0, 2), (1, 3)]}, "layer_replication"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_adapters_outside_the_layers_are_refused_before_a_weight_is_read(
    config: dict[str, Any],
    words: str,
    checkpoint: Callable[..., Path],
    plugins: Plugins,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("poros.checkpoint.shards.Shards.read", refuse)
    with pytest.raises(UnsupportedError, match=words) as caught:
        poros.load(
            checkpoint("qwen2", {}),
            lora=LoraConfig(r=4, task_type="CAUSAL_LM", **config),
            device="cpu",
            plugins=plugins,
        )
    assert caught.value.hint


def test_other_kinds_of_adapters_are_refused(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    with pytest.raises(UnsupportedError, match="VeraConfig"):
        poros.load(checkpoint("qwen2", {}), lora=VeraConfig(), device="cpu", plugins=plugins)  # type: ignore[arg-type]


@pytest.mark.parametrize("targets", [("no_such_proj",), ("q_proj", "no_such_proj")])
def test_targets_that_match_nothing_are_refused(
    targets: tuple[str, ...], checkpoint: Callable[..., Path], plugins: Plugins
) -> None:
    with pytest.raises(UnsupportedError, match="no_such_proj"):
        poros.load(checkpoint("qwen2", {}), lora=lora(targets=targets), device="cpu", plugins=plugins)


def test_a_base_without_adapters_is_refused_with_a_way_out(plugins: Plugins) -> None:
    with pytest.raises(UnsupportedError, match="is not a transformers model"):
        attach(torch.nn.Linear(2, 2), plugins=plugins)


@pytest.mark.parametrize("options", [{"slots": 0}, {"block_size": 0}, {"tier": "tape"}, {"executor": "magic"}])
def test_settings_out_of_range_are_refused(
    options: dict[str, Any], checkpoint: Callable[..., Path], plugins: Plugins
) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        poros.load(checkpoint("qwen2", {}), device="cpu", plugins=plugins, **options)


def test_attach_refuses_trainable_base_parameters(checkpoint: Callable[..., Path], plugins: Plugins) -> None:
    model = load_stock(checkpoint("qwen2", {}), lora(), 0, CPU)
    model.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(UnsupportedError, match=r"outside the decoder layers: model\.norm\.weight"):
        attach(model, plugins=plugins)
