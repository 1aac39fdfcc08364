"""`poros.attach`: a model that is there already is made to stream."""

from __future__ import annotations

from typing import Unpack

from torch import nn

from poros.checkpoint.frozen import frozen_tensors
from poros.checkpoint.reader import make_packings
from poros.checkpoint.skeleton import placeholder
from poros.config import StreamConfig, StreamOptions, validated
from poros.engine.adapters import lora_there, put_side_by_side
from poros.engine.budget import OWN_LOOP, check_room, planned, set_limit
from poros.engine.engine import ENGINE, Engine, check_trainable, engine_of, start_streaming
from poros.engine.loss import check_loss
from poros.engine.measured import bytes_on, towers_of
from poros.engine.parts import DecoderParts, causal_lm, config_of
from poros.engine.vocabulary import Vocabulary
from poros.errors import StreamError, UnsupportedError
from poros.plan.search import Plan
from poros.plugins import Plugins, load_plugins
from poros.store.tiers import make_store
from poros.stream.transfer import Transfer


def attach(
    model: nn.Module,
    *,
    plugins: Plugins | None = None,
    transfer: Transfer | None = None,
    plan: Plan | None = None,
    padded: bool = True,
    **stream: Unpack[StreamOptions],
) -> nn.Module:
    """Make a model that you have already built stream: one line on an existing peft script.

    Args:
        model: A causal-LM model loaded in NF4 with double quantisation, usually inside a `PeftModel`. Its adapters,
            their optimizer and their names stay as they are.
        plugins: Loaded plugins; all installed ones by default.
        transfer: How blocks travel; the device's usual way by default.
        plan: A plan that was made and is enforced by the caller; `stream` isn't looked at then.
        padded: Whether rows may be padded and differ in length. A plan counts with masks and with graphs of many batch
            shapes then, and lets no block keep its activations if there are too many of them.
        stream: What lives where, in the words of `stream` in a run's config: slots, resident, head and so on. With
            `vram` and `tokens` it is planned: `vram="12GB", tokens=2048`. The optimizer is your own; a plan counts with
            its moments on the device unless you say `optimizer="host"` and use `poros.HostAdamW`.

    Returns:
        The same model.

    Raises:
        UnsupportedError: no installed family knows the model, or something in it can't stream.
        StreamError: it streams already.
        BudgetError: the model doesn't fit into `vram`.
    """
    config = validated(StreamConfig, stream, "") if plan is None else plan.stream
    base = causal_lm(model)
    if not hasattr(getattr(base, "config", None), "model_type"):
        raise UnsupportedError(f"{type(base).__name__} is not a transformers model", "pass a causal-LM or a PeftModel")
    architecture = (plugins or load_plugins()).architecture_for(base.config.model_type)
    refusal = architecture.refusal(base.config)
    if refusal is not None:
        raise UnsupportedError(f"{refusal.name} is not supported ({base.config.model_type})", refusal.hint)
    parts = DecoderParts.of(model, architecture)
    if ENGINE in parts.decoder.__dict__:
        raise StreamError("this model streams already")
    check_trainable(model, architecture)
    own = None
    if plan is None and config.vram is not None:
        frozen = [(name, p) for name, p in base.named_parameters() if not p.requires_grad and "lora_" not in name]
        wide = [name for name, p in frozen if p.dtype.itemsize > 2]
        if wide:
            raise UnsupportedError(
                f"{wide[0]} is in float32, and a plan counts with 16 bit",
                "leave prepare_model_for_kbit_training out, or choose slots and placements instead of vram",
            )
        lora = lora_there(parts.layers)
        own = planned(
            config,
            architecture,
            base.config.to_dict(),
            lora,
            padded=padded,
            device=parts.device,
            fixed=OWN_LOOP,
            towers=bytes_on(parts.device, towers_of(base, architecture)),
        )
        if own is not None:
            plan, config = own, own.stream
    places = [frozen_tensors(layer) for layer in parts.layers]
    packings = make_packings(places, architecture.layer_kinds(config_of(base)), mixed=True)
    if config.loss_rows is not None:
        check_loss(base)
    if own is not None:
        # Now, while the model is as it was: its weights leave the device, or stay where the plan counts them.
        check_room(own, parts.device, bytes_on(parts.device, model.modules()))
    vocabulary = Vocabulary.of(parts, architecture, config)
    store = make_store([*(packing.nbytes for packing in packings), *vocabulary.slabs], config.tier, parts.device)
    vocabulary.take_weights(store)
    for index, (layer_places, packing) in enumerate(zip(places, packings, strict=True)):
        for place in layer_places:
            tensor = place.get()
            packing.write(store.slab(index), place.name, tensor)
            place.set(placeholder(tensor.dtype, tuple(tensor.shape), tensor.device))
            if hasattr(place.owner, "support_avx512bf16_for_cpu"):
                place.owner.support_avx512bf16_for_cpu = False  # type: ignore[assignment]  # see checkpoint.skeleton
    put_side_by_side([parameter for parameter in model.parameters() if parameter.requires_grad])
    engine = Engine(parts, architecture, places, packings, store, config, vocabulary, transfer, plan)
    start_streaming(base, parts.decoder, engine)
    if own is not None:
        set_limit(own, parts.device)
    return model


def close(model: nn.Module) -> None:
    """Stop streaming and give slots and host memory back, without waiting for the model to be dropped.

    The model's base is gone afterwards: it can be saved, but not run.

    Raises:
        StreamError: the model doesn't stream.
    """
    engine_of(model).close()
