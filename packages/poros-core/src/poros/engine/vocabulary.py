"""Vocabulary matrices in host memory: rows of an embedding are gathered there, a head passes through the device.

An embedding is only ever asked for the rows of a batch, and gathering them on the host gives the same numbers. The head
is needed whole, but only once a step and when no block is: it is brought like a block, to the memory that blocks have
at other times.

Both modules stay what they were to everybody who looks at them: a placeholder of the right shape, on the model's
device, takes the weight's place; see `poros.checkpoint.skeleton`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from poros.architecture import Architecture
from poros.checkpoint.skeleton import placeholder
from poros.config import StreamConfig
from poros.engine.executor import Surroundings
from poros.engine.parts import DecoderParts
from poros.errors import StreamError, UnsupportedError
from poros.store.store import HostStore
from poros.stream.schedule import Phase
from poros.stream.streamer import Streamer

TABLE = "_poros_table"
HEAD = "_poros_head"
RUNNING = "_poros_running"


class HostEmbedding(nn.Embedding):
    """Mixed into the class of an embedding whose table is in host memory."""

    def forward(self, input: Tensor) -> Tensor:
        """Rows of the table, [..., width], on the device of the model, for indices [...]."""
        table: Tensor = self.__dict__[TABLE]
        return functional.embedding(input.to(table.device), table).to(self.weight.device)


def keep_on_host(embedding: nn.Embedding, table: Tensor, device: torch.device) -> None:
    """Let an embedding gather its rows from a table in host memory.

    Args:
        embedding: Its class becomes a subclass; whatever its own class does with the rows stays as it is.
        table: [rows, width], on the CPU.
        device: Where the model computes.
    """
    stock = type(embedding)
    bases = (HostEmbedding,) if stock is nn.Embedding else (stock, HostEmbedding)
    embedding.__dict__[TABLE] = table
    embedding.weight = nn.Parameter(placeholder(table.dtype, tuple(table.shape), device), requires_grad=False)
    embedding.__class__ = type(stock.__name__, bases, {"__module__": stock.__module__})


@dataclass
class TravellingHead:
    """How a head's weight comes to the device.

    Args:
        streamer: Brings it.
        block: Its number among the blocks.
        shape, dtype: Of the weight.
    """

    streamer: Streamer
    block: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @contextmanager
    def bound(self, head: nn.Module, phase: Phase) -> Iterator[int]:
        """The head with its weight in place; gives the stamp of its arrival."""
        parameter: Any = head._parameters["weight"]
        empty = parameter.data
        with self.streamer.visit(self.block, phase) as lease:
            nbytes = empty.numel() * empty.element_size()
            # `data`: when it is overwritten, the stamp says so and not autograd's count of changes.
            parameter.data = lease.slot().buffer[:nbytes].data.view(self.dtype).view(self.shape)
            head.__dict__[RUNNING] = True
            try:
                yield lease.stamp
            finally:
                head.__dict__[RUNNING] = False
                parameter.data = empty


class HostHead(nn.Linear):
    """Mixed into the class of a head whose weight travels."""

    @property
    def weight(self) -> Any:  # type: ignore[override]
        """The weight while the head runs. Read at another time it would be a placeholder, and turn results into NaN.

        Raises:
            StreamError: the head isn't running.
        """
        if not self.__dict__.get(RUNNING):
            raise StreamError(
                "somebody reads the head's weight itself (a fused loss, a resized vocabulary), but it is on the host",
                "set stream.head to device",
            )
        return self._parameters["weight"]

    def forward(self, input: Tensor) -> Tensor:
        """Logits, [..., vocabulary], of finished hidden states [..., hidden]."""
        return _HeadFunction.apply(self, super().forward, input)  # type: ignore[no-untyped-call, no-any-return]


class _HeadFunction(torch.autograd.Function):
    """The head as one operation. Its graph is kept for the backward pass, which nearly always finds the weight still in
    place; where it doesn't, the head is run again."""

    @staticmethod
    def forward(ctx: Any, head: nn.Module, run: Any, hidden: Tensor) -> Tensor:
        ctx.head, ctx.run = head, run
        travelling: TravellingHead = head.__dict__[HEAD]
        with travelling.bound(head, Phase.FORWARD) as stamp:
            if not ctx.needs_input_grad[2]:
                return run(hidden)  # type: ignore[no-any-return]
            ctx.surroundings = Surroundings.now(hidden.device)
            ctx.save_for_backward(hidden)
            leaf, logits = _with_graph(run, hidden)
            ctx.kept = (stamp, leaf, logits)
            return logits.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (hidden,) = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None
        travelling: TravellingHead = ctx.head.__dict__[HEAD]
        with travelling.bound(ctx.head, Phase.BACKWARD) as stamp:
            if kept is None or kept[0] != stamp:
                with ctx.surroundings.autocasting():
                    kept = (stamp, *_with_graph(ctx.run, hidden))
            _, leaf, logits = kept
            return None, None, torch.autograd.grad(logits, leaf, gradient)[0]


def _with_graph(run: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = hidden.detach().requires_grad_()
        return leaf, run(leaf)


def let_travel(head: nn.Module, travelling: TravellingHead, device: torch.device) -> None:
    """Make a head bring its weight for each use.

    Args:
        head: A linear layer without a bias; its class becomes a subclass.
        travelling: How it comes.
        device: Where the model computes.
    """
    stock = type(head)
    bases = (HostHead,) if stock is nn.Linear else (stock, HostHead)
    head.__dict__[HEAD] = dataclasses.replace(travelling)
    empty = placeholder(travelling.dtype, travelling.shape, device)
    head._parameters["weight"] = nn.Parameter(empty, requires_grad=False)
    head.__class__ = type(stock.__name__, bases, {"__module__": stock.__module__})


@dataclass(frozen=True)
class Vocabulary:
    """What lies outside the layers and lives in host memory.

    Attributes:
        base: The causal-LM model.
        embeddings: Name of the weight -> embedding; the per-layer embeddings of some families are among them.
        head: The head, if it travels.
        head_name: Name of its weight.
        tied_to: Name of the embedding's weight, if the head's is the same one.
    """

    base: Any
    embeddings: dict[str, nn.Embedding]
    head: nn.Module | None
    head_name: str
    tied_to: str | None
    _tables: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, parts: DecoderParts, architecture: Architecture, config: StreamConfig, tied: bool | None = None
    ) -> Vocabulary:
        """What a config puts into host memory.

        Args:
            parts: Of the model.
            architecture: Its family.
            config: Says what lives where.
            tied: Whether head and embedding are one; seen by their being one tensor by default.

        Raises:
            UnsupportedError: the head can't travel.
        """
        head = parts.base.get_submodule(architecture.head)
        name = f"{architecture.decoder}.{architecture.embedding}.weight"
        embedding = parts.decoder.get_submodule(architecture.embedding)
        if tied is None:
            tied = head.weight is embedding.weight
        blocks = -(-len(parts.layers) // config.block_size)
        # Where nothing travels the head would have its memory for itself, and gain nothing.
        travels = config.head == "host" and (config.resident != "all" and config.resident < blocks)
        if tied and config.embedding != "host":
            travels = False
        if travels and (
            not isinstance(head, nn.Linear) or isinstance(head, bnb.nn.Linear4bit) or head.bias is not None
        ):
            raise UnsupportedError(f"a head of class {type(head).__name__} can't travel", "set stream.head to device")
        embeddings: dict[str, nn.Embedding] = {}
        if config.embedding == "host":
            inside = f"{architecture.layers}."
            embeddings = {
                f"{architecture.decoder}.{path}.weight": module
                for path, module in parts.decoder.named_modules()
                if isinstance(module, nn.Embedding) and not path.startswith(inside)
            }
            if tied and not travels:
                embeddings.pop(name)
        return cls(
            parts.base, embeddings, head if travels else None, f"{architecture.head}.weight", name if tied else None
        )

    @property
    def head_bytes(self) -> int:
        """Bytes of a head that travels; 0 if it doesn't."""
        return 0 if self.head is None else _weight(self.head).numel() * _weight(self.head).element_size()

    @property
    def slabs(self) -> list[int]:
        """Bytes that are needed in the store beside the layers."""
        return [self.head_bytes] if self.head is not None else []

    def tables(self, store: HostStore) -> dict[str, Tensor]:
        """Name of each weight that goes to host memory -> where it goes. A tied one has its place in the store."""
        tables: dict[str, Tensor] = {}
        if self.head is not None:
            weight, slab = _weight(self.head), store.slab(store.num_slabs - 1)
            tables[self.head_name] = slab.view(weight.dtype).view(weight.shape)
        for name, module in self.embeddings.items():
            if self.head is not None and name == self.tied_to:
                tables[name] = tables[self.head_name]
            else:
                tables[name] = torch.empty(module.weight.shape, dtype=module.weight.dtype)
        self._tables.update(tables)
        return tables

    def take_weights(self, store: HostStore) -> None:
        """Copy the weights that are there now to host memory."""
        modules = {**self.embeddings, **({self.head_name: self.head} if self.head is not None else {})}
        for name, table in self.tables(store).items():
            table.copy_(_weight(modules[name]).data)

    def install(self, streamer: Streamer, device: torch.device) -> None:
        """Let the modules use what is in host memory."""
        if self.embeddings or self.head is not None:
            self.base.resize_token_embeddings = _refuse_to_resize
        for name, module in self.embeddings.items():
            keep_on_host(module, self._tables[name], device)
        if self.head is not None:
            table = self._tables[self.head_name]
            assert streamer.head is not None
            let_travel(self.head, TravellingHead(streamer, streamer.head, tuple(table.shape), table.dtype), device)
            if self.tied_to is not None:
                self.head._parameters["weight"] = self.embeddings[self.tied_to]._parameters["weight"]


def _refuse_to_resize(*args: Any, **kwargs: Any) -> Any:
    raise StreamError(
        "the vocabulary can't be resized while its matrices are on the host",
        "resize the model before it is attached, or set stream.embedding and stream.head to device",
    )


def _weight(module: nn.Module) -> Tensor:
    assert isinstance(module.weight, Tensor)
    return module.weight
