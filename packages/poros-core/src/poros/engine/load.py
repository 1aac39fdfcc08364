"""`poros.load`: from a checkpoint on disk to a model that streams."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from poros.checkpoint.locate import find_prefix, read_config, resolve
from poros.checkpoint.reader import fill_outside, fill_store, four_bit_weights, plan_reading
from poros.checkpoint.shards import Shards
from poros.checkpoint.skeleton import build_skeleton, cut_layers, read_model_config
from poros.config import StreamConfig, StreamOptions, validated
from poros.engine.adapters import check_lora, check_targets, lora_part, narrowed, say_coverage, with_adapters
from poros.engine.budget import OWN_LOOP, limited, planned
from poros.engine.engine import Engine, check_trainable, start_streaming
from poros.engine.loss import check_loss
from poros.engine.parts import DecoderParts
from poros.engine.vocabulary import Vocabulary
from poros.errors import UnsupportedError
from poros.plan.search import Plan
from poros.plugins import Plugins, load_plugins
from poros.store.tiers import make_store
from poros.stream.transfer import Transfer

if TYPE_CHECKING:
    from peft import LoraConfig


def default_device() -> torch.device:
    """The current CUDA device where there is one, the CPU otherwise."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def load(
    model: str | Path,
    *,
    lora: LoraConfig | None = None,
    seed: int | None = None,
    revision: str | None = None,
    device: torch.device | str | None = None,
    num_layers: int | None = None,
    plugins: Plugins | None = None,
    transfer: Transfer | None = None,
    name: str | None = None,
    plan: Plan | None = None,
    padded: bool = True,
    progress: Callable[[int, int], None] | None = None,
    **stream: Unpack[StreamOptions],
) -> Any:
    """Load a checkpoint as a model whose frozen NF4 base streams.

    Everything that can be checked without reading a weight is checked first: the config, the files against their index,
    every tensor's shape and dtype, the adapters' targets.

    Args:
        model: A directory in Hugging Face format, or a hub id. Weights in bf16, fp16 or fp32 are quantised to NF4 with
            double quantisation; a checkpoint that bitsandbytes has quantised so already is taken as it is.
        lora: Adapters to create. Without them the result is the plain causal-LM model, ready for `get_peft_model`.
        seed: Seeds torch immediately before the adapters are created, so that their values depend on nothing else.
        revision: Branch, tag or commit of a hub id.
        device: Where to compute; the current CUDA device where there is one.
        num_layers: Load only the first layers: another model, but enough to check one on.
        plugins: Loaded plugins; all installed ones by default.
        transfer: How blocks travel; the device's usual way by default.
        name: What the adapter's config calls the base; `model` by default.
        plan: A plan that was made and is enforced by the caller; `stream` isn't looked at then.
        padded: Whether rows may be padded and differ in length. A plan counts with masks and with graphs of many batch
            shapes then, and lets no block keep its activations if there are too many of them.
        progress: Called with (bytes read, bytes in all).
        stream: What lives where, in the words of `stream` in a run's config: slots, resident, head and so on. With
            `vram` and `tokens` it is planned: `vram="12GB", tokens=2048`. The optimizer is your own; a plan counts with
            its moments on the device unless you say `optimizer="host"` and use `poros.HostAdamW`.

    Returns:
        A `PeftModel`, or the transformers model when `lora` is None. Both are in the state in which stock loading
        leaves them and are used in the same way.

    Raises:
        CheckpointError: the files are damaged, incomplete or don't fit the config.
        UnsupportedError: the family, the kind of checkpoint or the adapters can't be run.
        StreamError: the host memory can't be had.
        BudgetError: the model doesn't fit into `vram`.
    """
    config = validated(StreamConfig, stream, "") if plan is None else plan.stream
    where = torch.device(device) if device is not None else default_device()
    if where.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"Poros doesn't compute on {where.type!r} devices", "use cuda or cpu")
    if where == torch.device("cuda"):
        where = default_device()
    directory = resolve(str(model), revision)
    model_type = str(read_config(directory)["model_type"])
    architecture = (plugins or load_plugins()).architecture_for(model_type)
    model_config = read_model_config(directory, architecture)
    own = None
    if plan is None and config.vram is not None:
        values = read_config(directory)
        own = planned(
            config,
            architecture,
            values,
            lora_part(lora),
            num_layers=num_layers,
            padded=padded,
            device=where,
            fixed=OWN_LOOP,
        )
        if own is not None:
            plan, config = own, own.stream
    full = int(model_config.get_text_config().num_hidden_layers)
    if num_layers is not None and getattr(model_config.get_text_config(), "hidden_size_per_layer_input", None):
        raise UnsupportedError(
            "this checkpoint can't be cut to its first layers: the embeddings of all layers are one tensor",
            "check all of it, or a published shape, which may be cut",
        )
    cut_layers(model_config, num_layers)
    if lora is not None:
        check_lora(lora)
        lora = narrowed(lora, architecture, model_config.get_text_config())
    with limited(own, where), Shards.open(directory) as shards:
        prefix = find_prefix(
            shards.names, architecture.checkpoint_prefixes, f"{architecture.embedding}.weight", architecture.layers
        )
        stored = four_bit_weights(shards)
        # In the files a decoder's tensors begin with `prefix`, in the model with the decoder's path.
        quantised = {
            f"{architecture.decoder}.{name.removeprefix(prefix)}" for name in stored if name.startswith(prefix)
        }
        skeleton = build_skeleton(model_config, architecture, where, quantised if stored else None, directory)
        skeleton.model.name_or_path = skeleton.model.config._name_or_path = name or str(model)
        reading = plan_reading(skeleton, shards, prefix, architecture.layer_kinds(model_config.get_text_config()), full)
        streamed: nn.Module = skeleton.model
        if lora is not None:
            # Before any weight is read: what is wrong with the adapters comes out now, and the layers' names are known
            # by their modules, which peft leaves in place.
            check_targets(lora, skeleton.model)
            layers: Any = skeleton.decoder.get_submodule(architecture.layers)
            say_coverage(lora, list(layers), f"{architecture.decoder}.{architecture.layers}")
            if seed is not None:
                torch.manual_seed(seed)
            streamed = with_adapters(skeleton.model, lora)
            check_trainable(streamed, architecture)
        parts = DecoderParts.of(skeleton.model, architecture, where)
        if config.loss_rows is not None:
            check_loss(skeleton.model)
        vocabulary = Vocabulary.of(parts, architecture, config, bool(reading.tied))
        store = make_store([*reading.sizes, *vocabulary.slabs], config.tier, where)
        fill_outside(skeleton, shards, reading, where, vocabulary.tables(store))
        fill_store(skeleton, shards, reading, store, where, progress)
        engine = Engine(
            parts, architecture, skeleton.layers, reading.packings, store, config, vocabulary, transfer, plan
        )
    start_streaming(skeleton.model, skeleton.decoder, engine)
    return streamed
