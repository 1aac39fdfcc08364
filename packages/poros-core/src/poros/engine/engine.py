"""The engine: what a streamed decoder does in place of its own forward.

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
from poros.config import StreamConfig
from poros.dimensions import aligned
from poros.engine.accumulate import accumulate
from poros.engine.adapters import check_lora
from poros.engine.block import run_block
from poros.engine.boundaries import HostBoundaries
from poros.engine.budget import lift
from poros.engine.executor import Batch, EagerExecutor
from poros.engine.gradients import HostGradients
from poros.engine.graphs import GraphExecutor
from poros.engine.loss import PiecewiseLoss
from poros.engine.outside import outside_bytes
from poros.engine.parts import DecoderParts, causal_lm, config_of
from poros.engine.prologue import SIDE_OUTPUT, Call, Prologue, Recording
from poros.engine.sharing import Shared, run_sharing_block
from poros.engine.template import Template
from poros.engine.vocabulary import Vocabulary
from poros.errors import StreamError, UnsupportedError
from poros.plan.graphs import MOST_GRAPHS
from poros.plan.search import Plan
from poros.store.store import HostStore
from poros.stream.schedule import evenly_spread
from poros.stream.slots import Arena, Slot, make_slots
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
        store: Holds the slabs: of the layers, and of the head if it travels.
        config: What lives where.
        vocabulary: What is outside the layers and in host memory.
        transfer: How blocks travel; the device's usual way by default.
        plan: By which the placements were chosen, if they were planned.

    Attributes:
        store, streamer: Where the base is, and what brings it.
        executor: Runs the blocks.
        blocks: The layers of each block.
        device: Where the model computes.
        architecture: The family.
        shares: Whether layers leave tensors for later ones, which makes every visit an eager one.
        boundaries, gradients: What is kept in host memory, if it is.
        arena: The memory that head and blocks have by turns, if the head travels.
        plan: By which the placements were chosen, if they were planned.
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
        vocabulary: Vocabulary,
        transfer: Transfer | None = None,
        plan: Plan | None = None,
    ) -> None:
        self.store = store
        self.config = config
        self.packings = tuple(packings)
        layers = parts.layers
        size = config.block_size
        self.blocks = [tuple(range(start, min(start + size, len(layers)))) for start in range(0, len(layers), size)]
        nbytes = [sum(packings[layer].nbytes for layer in block) for block in self.blocks]
        resident = sorted(resident_blocks(config, len(self.blocks)))
        moving = [size for block, size in enumerate(nbytes) if block not in resident]
        sizes = [max(moving)] * min(config.slots, len(moving)) if moving else []
        templates = [Template(*triple) for triple in zip(layers, places, packings, strict=True)]
        by_block = [[templates[i] for i in block] for block in self.blocks]
        self.shares = bool(architecture.side_output) and architecture.has_side_outputs(config_of(parts.base))
        graphs = self._takes_graphs(config, parts.device) and not self.shares
        head_bytes = vocabulary.head_bytes
        self.arena: Arena | None = None
        if head_bytes:
            beside = outside_bytes(by_block) if graphs and config.restore_once else 0
            self.arena = Arena(max(head_bytes, sum(map(aligned, sizes)) + beside), parts.device)
        slots = make_slots(sizes, parts.device, self.arena)
        rest = make_slots([nbytes[block] for block in resident], parts.device, first=len(slots))
        head = Slot(len(slots) + len(rest), self.arena.buffer[:head_bytes]) if self.arena is not None else None
        transfer = transfer or make_transfer(parts.device, len(slots) + len(rest) + (head is not None))
        slabs = [*self.blocks, *([(len(layers),)] if head is not None else [])]
        self.streamer = Streamer(store, slots, transfer, slabs, dict(zip(resident, rest, strict=True)), head)
        vocabulary.install(self.streamer, parts.device)
        keeping = () if config.recompute else resident
        self.boundaries = HostBoundaries(parts.device, config.tier) if config.boundaries == "host" else None
        if config.loss_rows is not None:
            parts.base.loss_function = PiecewiseLoss(config.loss_rows)
        self.executor = EagerExecutor(self.streamer, by_block, keeping, self.boundaries)
        if graphs:
            kinds = architecture.layer_kinds(config_of(parts.base))
            self.executor = GraphExecutor(
                self.streamer,
                by_block,
                kinds,
                keeping,
                self.boundaries,
                restore_once=config.restore_once,
                arena=self.arena,
                max_graphs=MOST_GRAPHS if plan is None else plan.max_graphs,
                bounded=plan is not None,
            )
        self.gradients = HostGradients(parts.device, config.tier) if config.gradients == "host" else None
        self.executor.gradients = self.gradients
        self.device = parts.device
        self.plan = plan
        # The limit goes with the model, however that goes.
        self._lift = weakref.finalize(self, lift, parts.device, plan) if plan is not None else None
        if self._lift is not None:
            self._lift.atexit = False
        self.draws: dict[tuple[int, tuple[int, ...]], int | None] = {}
        self._interceptor: Callable[..., Any] | None = None
        self._base = weakref.ref(parts.base)
        self.architecture = architecture
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
        if self.shares and "logits_to_keep" in kwargs:
            # The decoder would drop the other tokens between two of its layers, which recorders can't see.
            kwargs = {**kwargs, "logits_to_keep": 0}
        prologue = self._recording.run(stock_forward, args, kwargs)
        assert prologue.hidden is not None
        planned = None if self.plan is None else self.plan.tokens
        here = prologue.hidden.shape[0] * prologue.hidden.shape[1]
        if training and planned is not None and here > planned:
            raise StreamError(
                f"a micro-batch of {here} tokens, padding included, but {planned} were planned for",
                "give more `tokens` with vram, or shorter or fewer rows at a time",
            )
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
        if self.boundaries is not None:
            self.boundaries.close()
        if self.gradients is not None:
            self.gradients.close()
        self.store.close()
        if self._lift is not None:
            self._lift()

    @staticmethod
    def _takes_graphs(config: StreamConfig, device: torch.device) -> bool:
        if config.executor == "graphs" and device.type != "cuda":
            raise UnsupportedError("CUDA graphs need a CUDA device", "set stream.executor to eager or auto")
        return config.executor != "eager" and device.type == "cuda"

    def _check_adapters(self) -> None:
        """Check adapters that were added since the last look; anybody may call `get_peft_model` on a loaded model."""
        base = self._base()
        configs = getattr(base, "peft_config", None)
        seen = tuple(map(id, configs.values())) if isinstance(configs, dict) else ()
        if base is None or seen == self._seen_adapters:
            return
        for config in configs.values():  # type: ignore[union-attr]
            check_lora(config)
        check_trainable(base, self.architecture)
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
        if self.architecture.side_output in kwargs:
            kwargs[self.architecture.side_output] = SIDE_OUTPUT
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


def resident_blocks(config: StreamConfig, num_blocks: int) -> frozenset[int]:
    """Which blocks a config keeps on the device for good."""
    return evenly_spread(num_blocks if config.resident == "all" else config.resident, num_blocks)


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
