"""The eager executor: runs a block's layers one after another, as ordinary Python.

Forward keeps nothing but the block's input. Backward runs the block again, with its weights in place and with gradients
on, and differentiates it before the slot is given up. The graph of a block therefore never outlives the visit in which
its weights were there: bitsandbytes keeps the packed weight outside autograd's saved tensors, so a graph that did would
silently read whatever lies in the slot by then. Only a block that stays in its slot for good may keep its graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from poros.engine.attention import allow_attention_backends, attention_backends
from poros.engine.boundaries import Boundaries, Boundary, DeviceBoundaries
from poros.engine.gradients import HostGradients
from poros.engine.prologue import Call
from poros.engine.signature import LayerSignature, tensors_of
from poros.engine.template import Template
from poros.errors import StreamError
from poros.stream.schedule import Phase
from poros.stream.streamer import Lease, Streamer


@dataclass(frozen=True)
class Surroundings:
    """What a recompute must find as it was in the forward pass.

    Attributes:
        rng: State of the device's generator.
        autocast: (device type, enabled, dtype).
        attention: Which attention backends are allowed: flash, memory-efficient, math, cuDNN.
        device: Whose generator.
    """

    rng: Tensor
    autocast: tuple[str, bool, torch.dtype]
    attention: tuple[bool, bool, bool, bool]
    device: torch.device

    @classmethod
    def now(cls, device: torch.device) -> Surroundings:
        """The surroundings at this moment."""
        kind = device.type
        autocast = (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        return cls(rng_state(device), autocast, attention_backends(), device)

    @contextmanager
    def autocasting(self) -> Iterator[None]:
        """The forward pass's autocast. Its weight cache is off: a cast that was cached without gradients would be used
        again with them, and the adapter behind it would get none."""
        kind, enabled, dtype = self.autocast
        with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False):
            yield

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Everything as in the forward pass; the caller's random state and switches come back afterwards."""
        outer, backends = rng_state(self.device), attention_backends()
        set_rng_state(self.rng, self.device)
        if backends != self.attention:
            allow_attention_backends(self.attention)
        try:
            with self.autocasting():
                yield
        finally:
            set_rng_state(outer, self.device)
            if backends != self.attention:
                allow_attention_backends(backends)


@dataclass(frozen=True)
class Batch:
    """One forward pass.

    Attributes:
        calls: The arguments of every layer.
        versions: The tensors among them, each with autograd's count of its changes.
    """

    calls: tuple[Call, ...]
    versions: tuple[tuple[Tensor, int], ...] = ()

    @classmethod
    def of(cls, calls: Sequence[Call], training: bool) -> Batch:
        """A forward pass with these arguments."""
        # Layers of a kind are called with the same objects, as a rule; each lot is looked through once.
        lots = {tuple(map(id, (*call.args, *call.kwargs.values()))): call for call in calls} if training else {}
        tensors = {id(tensor): tensor for call in lots.values() for tensor in tensors_of(call)}
        return cls(tuple(calls), tuple((tensor, tensor._version) for tensor in tensors.values()))

    def check_unchanged(self) -> None:
        """Refuse a recompute with other arguments than the forward pass had.

        Raises:
            StreamError: an argument was changed in place.
        """
        if any(tensor._version != version for tensor, version in self.versions):
            raise StreamError(
                "a tensor given to the layers (a mask, positions) was changed in place between forward and backward",
                "change a copy of it",
            )


BlockSignature = tuple[LayerSignature, ...]


@dataclass(frozen=True)
class Kept:
    """What a block has kept of its forward pass.

    Attributes:
        leaf: Its input, [batch, tokens, hidden].
        output: Its output, with the autograd graph between the two.
    """

    leaf: Tensor
    output: Tensor


class EagerExecutor:
    """Runs blocks.

    Args:
        streamer: Brings a block's bytes.
        blocks: The templates of each block's layers.
        keeping: Blocks whose activations are kept from the forward pass to the backward pass; they must be resident.
        boundaries: Where the inputs of blocks are kept; on the device by default.

    Attributes:
        gradients: Where the adapters' gradients go, if not to the adapters.
    """

    def __init__(
        self,
        streamer: Streamer,
        blocks: Sequence[Sequence[Template]],
        keeping: Collection[int] = (),
        boundaries: Boundaries | None = None,
    ) -> None:
        self.keeping = frozenset(keeping)
        self.boundaries = boundaries or DeviceBoundaries()
        self.gradients: HostGradients | None = None
        self._below: Boundary | None = None
        self._streamer = streamer
        self._blocks = [tuple(block) for block in blocks]
        starts = [0]
        for block in self._blocks:
            starts.append(starts[-1] + len(block))
        self._starts = starts

    def __len__(self) -> int:
        return len(self._blocks)

    def prepare(self, hidden: Tensor, calls: Sequence[Call], training: bool, repeated: bool = False) -> Batch:
        """Get ready for a forward pass.

        Args:
            hidden: Input of the first block, [batch, tokens, hidden].
            calls: The arguments of every layer.
            training: Whether a backward pass may follow.
            repeated: Whether a visit of a block will run it several times.
        """
        return Batch.of(calls, training)

    def keep_boundary(self, block: int, hidden: Tensor) -> tuple[Boundary, Boundary | None]:
        """Keep a block's input; gives it, and that of the block below, which is wanted after it."""
        boundary = self.boundaries.put(hidden)
        below = self._below if block else None
        self._below = boundary if self.boundaries.away and block + 1 < len(self) else None
        return boundary, below

    def hand_over(self, adapters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients for autograd to give to the adapters: none, if they go to the host."""
        if self.gradients is None:
            return list(gradients)
        self.gradients_to_host(adapters, gradients)
        return [None] * len(gradients)

    def gradients_to_host(self, adapters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
        """Take a block's gradients to the host. The first time, all adapters get their places, next to each other."""
        assert self.gradients is not None
        if any(not self.gradients.knows(parameter) for parameter in adapters):
            self.gradients.register([p for block in range(len(self)) for p in self.adapters(block)])
        self.gradients.add(adapters, gradients)

    def adapters(self, block: int) -> list[nn.Parameter]:
        """The trainable parameters of a block."""
        return [parameter for template in self._blocks[block] for parameter in template.adapters()]

    def signature(self, block: int) -> BlockSignature:
        """Everything about a block that its backward pass must find as it was."""
        return tuple(template.watch.signature() for template in self._blocks[block])

    @contextmanager
    def visiting(self, block: int, phase: Phase) -> Iterator[Visit]:
        """Use a block, for as long as that takes. Nobody else gets to change it meanwhile."""
        watches = [template.watch for template in self._blocks[block]]
        for watch in watches:
            watch.hold(True)
        try:
            with self._streamer.visit(block, phase) as lease, ExitStack() as bindings:
                yield self._visit(block, lease, bindings)
        finally:
            for watch in watches:
                watch.hold(False)

    def check_unchanged(self, block: int, signature: BlockSignature) -> None:
        """Refuse a backward pass through a block that isn't as it was in the forward pass.

        Raises:
            StreamError: mode, dropout or active adapters were changed in between.
        """
        if self.signature(block) != signature:
            raise StreamError(
                "train/eval mode, dropout or active adapters were changed between a forward pass and its backward pass",
                "the block is run again for the backward pass and must be as it was; change them after it",
            )

    def _visit(self, block: int, lease: Lease, bindings: ExitStack) -> Visit:
        return Visit(self._blocks[block], self._starts[block], lease, bindings)


class Visit:
    """A block that can be run any number of times.

    Args:
        templates: Of its layers.
        start: Index of its first layer.
        lease: Gives the slot in which its bytes lie.
        bindings: Undone when the visit ends.
    """

    def __init__(self, templates: Sequence[Template], start: int, lease: Lease, bindings: ExitStack) -> None:
        self._templates = templates
        self._start = start
        self._lease = lease
        self._bindings = bindings
        self._bound = False

    def forward(self, hidden: Tensor, batch: Batch, surroundings: Surroundings) -> Tensor:
        """The block's output, without gradients.

        Args:
            hidden: The block's input, [batch, tokens, hidden].
            batch: From `prepare`.
            surroundings: The autocast to run under. The random state is the generator's own.
        """
        self._bind()
        with torch.no_grad(), surroundings.autocasting():
            return self._run(hidden, batch)

    def forward_sharing(
        self, hidden: Tensor, batch: Batch, surroundings: Surroundings, shared: dict[str, Any]
    ) -> Tensor:
        """The block's output, without gradients, for layers that leave tensors for later ones.

        Args:
            hidden, batch, surroundings: As for `forward`.
            shared: What earlier blocks have left; what this one leaves is added.
        """
        self._bind()
        with torch.no_grad(), surroundings.autocasting():
            return self._run(hidden, batch, shared)

    def rerun_sharing(self, hidden: Tensor, batch: Batch, surroundings: Surroundings, shared: dict[str, Any]) -> Tensor:
        """The same once more, with gradients, for the backward pass; the weights are in place until the visit ends."""
        self._bind()
        with torch.enable_grad(), surroundings.restored():
            return self._run(hidden, batch, shared)

    def forward_keeping(
        self, hidden: Tensor, batch: Batch, surroundings: Surroundings, needs_hidden: bool
    ) -> tuple[Tensor, Any]:
        """The block's output, and what `backward` can use instead of running the block again.

        Only for a resident block: the kept graph reads the block's weights where they lie now.

        Args:
            hidden, batch, surroundings: As for `forward`.
            needs_hidden: Whether the gradient with respect to the input will be wanted.
        """
        self._bind()
        leaf = hidden.detach().requires_grad_(needs_hidden)
        with torch.enable_grad(), surroundings.autocasting():
            output = self._run(leaf, batch)
        return output.detach(), Kept(leaf, output)

    def backward(
        self,
        hidden: Tensor,
        batch: Batch,
        surroundings: Surroundings,
        adapters: Sequence[nn.Parameter],
        gradient: Tensor,
        needs_hidden: bool,
        kept: Any = None,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Differentiate the block, running it again first unless its activations were kept.

        Args:
            hidden: The block's input, as in the forward pass.
            batch: From `prepare`.
            surroundings: Of the forward pass.
            adapters: The block's trainable parameters.
            gradient: Of the loss with respect to the block's output, of the output's shape.
            needs_hidden: Whether the gradient with respect to the input is wanted.
            kept: From `forward_keeping`, with the same `needs_hidden`.

        Returns:
            That gradient (or None), and the gradient of each adapter (None for one that took no part).
        """
        self._bind()
        if not isinstance(kept, Kept):
            leaf = hidden.detach().requires_grad_(needs_hidden)
            with torch.enable_grad(), surroundings.restored():
                kept = Kept(leaf, self._run(leaf, batch))
        leaf, output = kept.leaf, kept.output
        wanted: list[Tensor] = [leaf, *adapters] if needs_hidden else list(adapters)
        with hooks_silenced(adapters):
            gradients: list[Tensor | None] = list(torch.autograd.grad(output, wanted, gradient, allow_unused=True))
        first = gradients.pop(0) if needs_hidden else None
        return first, gradients

    def _run(self, hidden: Tensor, batch: Batch, shared: dict[str, Any] | None = None) -> Tensor:
        for index, template in enumerate(self._templates, self._start):
            hidden = template.run(hidden, batch.calls[index], shared)
        return hidden

    def _bind(self) -> None:
        if self._bound:
            return
        slot = self._lease.slot()
        self._bound = True
        start = 0
        for template in self._templates:
            self._bindings.enter_context(template.bound(slot, start))
            start += template.packing.nbytes


@contextmanager
def hooks_silenced(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Keep hooks on the adapters' gradients quiet inside the recompute; they are called when the gradients come out."""
    silenced = [(hooks, dict(hooks)) for parameter in parameters if (hooks := parameter._backward_hooks)]
    for hooks, _ in silenced:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in silenced:
            hooks.update(kept)


def rng_state(device: torch.device) -> Tensor:
    """The state of a device's generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_rng_state(state: Tensor, device: torch.device) -> None:
    """Put a device's generator into a state."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
