"""Making a model stream: the engine, and `poros.attach`.

The only thing that changes in the model is its text decoder, whose class becomes a subclass with another `forward` (as
FSDP2 does it). That forward runs the stock one as a prologue, streams the blocks, and hands the finished hidden states
back through the decoder's own final norm and output object. Head, soft-cap and loss are the stock causal-LM class's,
which never notices. Module tree and parameter names stay as they were.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from poros.checkpoint.frozen import FrozenTensor, frozen_tensors
from poros.checkpoint.packing import Packing
from poros.checkpoint.reader import make_packings
from poros.checkpoint.skeleton import placeholder
from poros.config import StreamConfig, validated
from poros.engine.accumulate import accumulate
from poros.engine.adapters import check_lora
from poros.engine.block import run_block
from poros.engine.executor import Batch, EagerExecutor
from poros.engine.graphs import GraphExecutor
from poros.engine.parts import DecoderParts, causal_lm, config_of
from poros.engine.prologue import SIDE_OUTPUT, Call, Prologue, Recording
from poros.engine.sharing import Shared, run_sharing_block
from poros.engine.template import Template
from poros.errors import StreamError, UnsupportedError
from poros.plugins import Plugins, load_plugins
from poros.store.store import HostStore
from poros.store.tiers import make_store
from poros.stream.schedule import evenly_spread
from poros.stream.slots import make_slots
from poros.stream.streamer import Streamer
from poros.stream.transfer import Transfer, make_transfer

if TYPE_CHECKING:
    from poros.architecture import Architecture

T = TypeVar("T")

ENGINE = "_poros_engine"
"""Attribute of a streamed decoder that holds its engine."""


class Engine:
    """Streams the layers of one decoder.

    Args:
        parts: The stock decoder, its frozen tensors already replaced by placeholders.
        architecture: The family.
        places: The frozen tensors of each layer.
        packings: Their layouts.
        store: Holds the slabs.
        config: Block size and slots.
        transfer: How blocks travel; the device's usual way by default.

    Attributes:
        store, streamer: Where the base is, and what brings it.
        executor: Runs the blocks.
        blocks: The layers of each block.
        device: Where the model computes.
        shares: Whether layers leave tensors for later ones, which makes every visit an eager one.
        draws: (block, shape of its input) -> how far it moves the random generator, where that is known.
    """

    def __init__(
        self,
        parts: DecoderParts,
        architecture: Architecture,
        places: Sequence[Sequence[FrozenTensor]],
        packings: Sequence[Packing],
        store: HostStore,
        config: StreamConfig,
        transfer: Transfer | None = None,
    ) -> None:
        self.store = store
        self.config = config
        self.packings = tuple(packings)
        layers = parts.layers
        size = config.block_size
        self.blocks = [tuple(range(start, min(start + size, len(layers)))) for start in range(0, len(layers), size)]
        nbytes = [sum(packings[layer].nbytes for layer in block) for block in self.blocks]
        count = len(self.blocks) if config.resident == "all" else config.resident
        resident = sorted(evenly_spread(count, len(self.blocks)))
        moving = [size for block, size in enumerate(nbytes) if block not in resident]
        sizes = [max(moving)] * min(config.slots, len(moving)) if moving else []
        slots = make_slots([*sizes, *(nbytes[block] for block in resident)], parts.device)
        homes = dict(zip(resident, slots[len(sizes) :], strict=True))
        transfer = transfer or make_transfer(parts.device, len(slots))
        self.streamer = Streamer(store, slots[: len(sizes)], transfer, self.blocks, homes)
        templates = [Template(*triple) for triple in zip(layers, places, packings, strict=True)]
        by_block = [[templates[i] for i in block] for block in self.blocks]
        keeping = () if config.recompute else resident
        self.executor = EagerExecutor(self.streamer, by_block, keeping)
        if config.executor == "graphs" or (config.executor == "auto" and parts.device.type == "cuda"):
            if parts.device.type != "cuda":
                raise UnsupportedError("CUDA graphs need a CUDA device", "set stream.executor to eager or auto")
            kinds = architecture.layer_kinds(config_of(parts.base))
            self.executor = GraphExecutor(self.streamer, by_block, kinds, keeping, config.restore_once)
        self.device = parts.device
        self.shares = bool(architecture.side_output) and architecture.has_side_outputs(config_of(parts.base))
        self.draws: dict[tuple[int, tuple[int, ...]], int | None] = {}
        self._interceptor: Callable[..., Any] | None = None
        self._base = weakref.ref(parts.base)
        self._architecture = architecture
        self._seen_adapters: tuple[int, ...] = ()
        self._layers = layers
        self._config = config_of(parts.base)
        self._norm = parts.decoder.get_submodule(architecture.norm)
        self._recording = Recording(parts.decoder, architecture.layers)

    def forward(self, stock_forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The decoder's forward: prologue, blocks, epilogue.

        Args:
            stock_forward: The stock decoder's own forward.
            args, kwargs: What the decoder was called with.

        Returns:
            The stock decoder's output object with the finished hidden states in it.
        """
        if self._interceptor is not None:
            return self._interceptor(stock_forward, args, kwargs)
        training = torch.is_grad_enabled()
        prologue = self.prologue(stock_forward, args, kwargs)
        hidden = prologue.hidden
        assert hidden is not None
        self.streamer.expect(self.streamer.training if training else self.streamer.inference)
        if training and self.shares:
            shared: Shared = {}
            plain = Batch.of(prologue.calls, training)
            for block in range(len(self.executor)):
                hidden = run_sharing_block(self.executor, block, hidden, plain, shared)
            return self.epilogue(prologue, hidden)
        batch = self.executor.prepare(hidden, prologue.calls, training)
        for block in range(len(self.executor)):
            hidden = run_block(self.executor, block, hidden, batch)
        return self.epilogue(prologue, hidden)

    def prologue(self, stock_forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prologue:
        """Run the stock decoder up to its first layer.

        Raises:
            UnsupportedError, StreamError: the call asks for what a streamed model can't give.
        """
        training = torch.is_grad_enabled()
        self._check(kwargs, training)
        prologue = self._recording.run(stock_forward, args, kwargs)
        if training:
            # The decoder may have made a cache, and masks that depend on having one. A block is run twice in training
            # and its second run would append again, so the layers don't get to see it.
            prologue.calls = [self._for_training(call) for call in prologue.calls]
            if isinstance(prologue.output, dict):
                for name in set(_CACHES) & set(prologue.output):
                    prologue.output[name] = None
        self._check_calls(prologue.calls, training)
        return prologue

    def epilogue(self, prologue: Prologue, hidden: Tensor) -> Any:
        """The decoder's output object with finished hidden states, [batch, tokens, hidden], behind its final norm."""
        output = prologue.output
        finished = self._norm(hidden)
        if isinstance(output, tuple):
            return (finished, *output[1:])
        output.last_hidden_state = finished
        return output

    def accumulate(self, micro_steps: Sequence[Callable[[], T]]) -> list[T]:
        """Run several micro-batches, each block visited once for all of them; see `poros.engine.accumulate`."""
        return accumulate(self, micro_steps)

    @contextmanager
    def intercepted(self, interceptor: Callable[..., Any]) -> Iterator[None]:
        """Let something else answer the decoder's calls for a while."""
        before, self._interceptor = self._interceptor, interceptor
        try:
            yield
        finally:
            self._interceptor = before

    def close(self) -> None:
        """Stop copying and give the host memory back. The model can't be run afterwards."""
        self.streamer.close()
        self.store.close()

    def _check_adapters(self) -> None:
        """Check adapters that were added since the last look; anybody may call `get_peft_model` on a loaded model."""
        base = self._base()
        configs = getattr(base, "peft_config", None)
        seen = tuple(map(id, configs.values())) if isinstance(configs, dict) else ()
        if base is None or seen == self._seen_adapters:
            return
        for config in configs.values():  # type: ignore[union-attr]
            check_lora(config)
        check_trainable(base, self._architecture)
        for layer in self._layers:
            frozen_tensors(layer)
        self._seen_adapters = seen

    def _check(self, kwargs: dict[str, Any], training: bool) -> None:
        self._check_adapters()
        for flag in ("output_hidden_states", "output_attentions"):
            asked = kwargs.get(flag)
            if asked or (asked is None and getattr(self._config, flag, False)):
                raise UnsupportedError(
                    f"{flag} is not available while the model streams", "the layers' outputs are not kept; leave it off"
                )
        if training and any(kwargs.get(name) is not None for name in ("past_key_values", "cache")):
            raise StreamError("a cache was passed to a forward pass with gradients", "use torch.no_grad() to generate")
        for layer in self._layers:
            # Every block is recomputed anyway; checkpointing inside it (TRL switches it on) would do it a third time.
            layer.__dict__["gradient_checkpointing"] = False

    def _for_training(self, call: Call) -> Call:
        """A layer's arguments, but no cache, and our own dict to leave tensors in for later layers."""
        kwargs = {name: None if name in _CACHES else value for name, value in call.kwargs.items()}
        if self._architecture.side_output in kwargs:
            kwargs[self._architecture.side_output] = SIDE_OUTPUT
        return Call(call.args, kwargs)

    def _check_calls(self, calls: Sequence[Any], training: bool) -> None:
        if not training:
            return
        for call in calls:
            for value in (*call.args, *call.kwargs.values()):
                if isinstance(value, Tensor) and value.requires_grad:
                    raise UnsupportedError(
                        "a layer is given a second input that needs a gradient",
                        "train only adapters of linear layers inside the decoder layers",
                    )


_CACHES = ("past_key_values", "past_key_value", "cache")


class StreamedDecoder(nn.Module):
    """Mixed into the class of a decoder that streams."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StreamError(
            "a model that streams can't be copied or pickled: its weights are in a store, not in the model",
            "save the adapter with save_pretrained, and load the model once more for a second one",
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        engine: Engine = self.__dict__[ENGINE]
        return engine.forward(super().forward, args, kwargs)


def start_streaming(base: Any, decoder: nn.Module, engine: Engine) -> None:
    """Give a decoder an engine and the class that uses it."""
    stock = type(decoder)
    quantizer = getattr(base, "hf_quantizer", None)
    if quantizer is not None:
        # The base's own save_pretrained would write placeholders; transformers refuses it when it hears this.
        quantizer.is_serializable = lambda *args, **kwargs: False
    # The name stays: transformers, peft and TRL look at class names.
    decoder.__dict__[ENGINE] = engine
    decoder.__class__ = type(stock.__name__, (StreamedDecoder, stock), {"__module__": stock.__module__})


def engine_of(model: nn.Module) -> Engine:
    """The engine of a streamed model (or of a peft model around it).

    Raises:
        StreamError: the model doesn't stream.
    """
    for module in model.modules():
        engine = module.__dict__.get(ENGINE)
        if isinstance(engine, Engine):
            return engine
    raise StreamError("this model does not stream", "make one with poros.load or poros.attach")


def attach(
    model: nn.Module,
    *,
    block_size: int = 1,
    slots: int = 2,
    tier: str = "auto",
    executor: str = "auto",
    resident: int | str = 0,
    recompute: bool = True,
    restore_once: bool = True,
    plugins: Plugins | None = None,
    transfer: Transfer | None = None,
) -> nn.Module:
    """Make a model that you have already built stream: one line on an existing peft script.

    Args:
        model: A causal-LM model loaded in NF4 with double quantisation, usually inside a `PeftModel`. Its adapters,
            their optimizer and their names stay as they are.
        block_size: Consecutive decoder layers that travel together.
        slots: Device buffers, each of one block.
        tier: "auto", "pinned" or "pageable" host memory.
        executor: "auto", "eager" or "graphs"; CUDA graphs on a GPU by default.
        resident: Blocks that stay on the device for good, evenly spread, or "all".
        recompute: Run resident blocks again for the backward pass instead of keeping their activations.
        restore_once: Restore a block's 4-bit weights once a visit: less GPU time, one block in bf16 more GPU memory.
        plugins: Loaded plugins; all installed ones by default.
        transfer: How blocks travel; the device's usual way by default.

    Returns:
        The same model.

    Raises:
        UnsupportedError: no installed family knows the model, or something in it can't stream.
        StreamError: it streams already.
    """
    config = stream_config(
        block_size=block_size,
        slots=slots,
        tier=tier,
        executor=executor,
        resident=resident,
        recompute=recompute,
        restore_once=restore_once,
    )
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
    places = [frozen_tensors(layer) for layer in parts.layers]
    packings = make_packings(places, architecture.layer_kinds(config_of(base)), mixed=True)
    store = make_store([packing.nbytes for packing in packings], config.tier, parts.device)
    for index, (layer_places, packing) in enumerate(zip(places, packings, strict=True)):
        for place in layer_places:
            tensor = place.get()
            packing.write(store.slab(index), place.name, tensor)
            place.set(placeholder(tensor.dtype, tuple(tensor.shape), tensor.device))
            if hasattr(place.owner, "support_avx512bf16_for_cpu"):
                place.owner.support_avx512bf16_for_cpu = False  # type: ignore[assignment]  # see checkpoint.skeleton
    start_streaming(base, parts.decoder, Engine(parts, architecture, places, packings, store, config, transfer))
    return model


def close(model: nn.Module) -> None:
    """Stop streaming and give slots and host memory back, without waiting for the model to be dropped.

    The model's base is gone afterwards: it can be saved, but not run.

    Raises:
        StreamError: the model doesn't stream.
    """
    engine_of(model).close()


def stream_config(**values: int | str | bool) -> StreamConfig:
    """The settings of a stream from plain values.

    Raises:
        ConfigError: with every value that is out of range.
    """
    return validated(StreamConfig, values, "")


def check_trainable(model: nn.Module, architecture: Architecture) -> None:
    """Refuse trainable parameters outside the decoder layers.

    Raises:
        UnsupportedError: naming the first few.
    """
    inside = f"{architecture.decoder}.{architecture.layers}."
    base = causal_lm(model)
    trainable = [name for name, p in base.named_parameters() if p.requires_grad]
    outside = [name for name in trainable if not name.startswith(inside)]
    if outside and not any("lora_" in name for name in trainable):
        raise UnsupportedError(
            "the base itself is trainable", "freeze it, or call peft.get_peft_model first, which does so"
        )
    if outside:
        raise UnsupportedError(
            f"trainable parameters outside the decoder layers: {', '.join(outside[:3])}"
            + (f" and {len(outside) - 3} more" if len(outside) > 3 else ""),
            "aim LoRA at linear layers inside the decoder layers; lm_head, embeddings and modules_to_save stay frozen",
        )
