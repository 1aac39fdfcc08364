"""Copies of layers, which are recorded in place of the model's own.

A graph reads adapters at fixed addresses, and the model's own are somewhere else in every block. So a block is recorded
with copies of its layers whose adapters are static buffers. Blocks that are alike share them, and so do all batch
shapes.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from poros.checkpoint.frozen import frozen_tensors
from poros.engine.executor import Surroundings
from poros.engine.kernels.linear import FusedLinear4bit, can_fuse, fused_layers, matches
from poros.engine.outside import Buffers, put_outside
from poros.engine.prologue import Call
from poros.engine.signature import Signature, switches_signature
from poros.engine.template import Template
from poros.stream.slots import Slot

log = logging.getLogger(__name__)

OLD_LOTS = 4
"""Sorts of blocks that were, and may come back (adapters that are switched to and fro), whose copies are kept."""


@dataclass
class LayerCopy:
    """A copy of a layer that is recorded in its place.

    Attributes:
        template: Over the copy.
        adapters: Its trainable parameters, static buffers.
        kind: The layer kind, which says with which arguments it is called.
    """

    template: Template
    adapters: list[nn.Parameter]
    kind: str

    @classmethod
    def of(cls, template: Template, kind: str) -> LayerCopy:
        """A copy of a template's layer."""
        layer = copy.deepcopy(template.layer)
        adapters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        return cls(Template(layer, frozen_tensors(layer), template.packing), adapters, kind)


@dataclass(eq=False)
class BlockCopy:
    """Copies of the layers of a block.

    Attributes:
        layers: In the order of the block.
        outside: Whether everything in the block's slot is taken out at the begin of a visit: 4-bit weights are restored
            into buffers, the rest is copied. It is recorded without a slot then.
        unused: The fused layers whose product nobody uses in a recompute; None if that hasn't been tried yet.
    """

    layers: Sequence[LayerCopy]
    outside: bool = False
    unused: Sequence[FusedLinear4bit] | None = None

    @cached_property
    def adapters(self) -> list[nn.Parameter]:
        """The static buffers of adapters that are trained."""
        return [parameter for made in self.layers for parameter in made.adapters]

    @cached_property
    def loose(self) -> list[nn.Parameter]:
        """The static buffers of all adapters, trained or not."""
        return [parameter for made in self.layers for parameter in made.template.loose()]

    def fused(self) -> list[FusedLinear4bit]:
        """The fused linear layers."""
        return [layer for made in self.layers for layer in fused_layers(made.template.layer)]

    def run(self, hidden: Tensor, calls: dict[str, Call]) -> Tensor:
        """The block's output, [batch, tokens, hidden], with the arguments of each layer kind."""
        for made in self.layers:
            hidden = made.template.run(hidden, calls[made.kind])
        return hidden

    @contextmanager
    def bound(self, slot: Slot | None) -> Iterator[None]:
        """Every layer bound to its place in a slot; without one, as they are."""
        with bound([made.template for made in self.layers] if slot is not None else [], slot):
            yield


class Copies:
    """Makes copies of blocks and knows those it has made.

    Args:
        buffers: Where blocks are taken out to.
        fuse: Whether to restore weights with Poros's own kernel where it gives the same bits.
    """

    def __init__(self, buffers: Buffers, fuse: bool) -> None:
        self._buffers = buffers
        self._fuse = fuse
        self._made: dict[Signature, dict[Signature, BlockCopy]] = {}
        self._tried: dict[Signature, bool] = {}

    def get(
        self,
        lot: Signature,
        templates: Sequence[Template],
        kinds: Sequence[str],
        slot: Slot,
        hidden: Tensor,
        surroundings: Surroundings,
        restore_once: bool,
    ) -> BlockCopy:
        """The copy for all blocks of a lot, made when it is first asked for.

        Args:
            lot: What those blocks have in common.
            templates, kinds: The layers of one of them, and of which kind they are.
            slot: In which that one lies.
            hidden: An input of the shape that the copy is for.
            surroundings: In which it will run.
            restore_once: Whether it is to be taken out of its slot, if that can be done.
        """
        fusable = self._fusable(templates, slot, hidden, surroundings)
        of_lot = self._made.setdefault(lot, {})
        key = (restore_once, *fusable)
        if key not in of_lot:
            of_lot[key] = _made(templates, kinds, fusable)
            if restore_once:
                put_outside(of_lot[key], self._buffers)
        return of_lot[key]

    def another(
        self,
        templates: Sequence[Template],
        kinds: Sequence[str],
        slot: Slot,
        hidden: Tensor,
        surroundings: Surroundings,
    ) -> BlockCopy:
        """A copy that nobody else has; arguments as for `get`."""
        return _made(templates, kinds, self._fusable(templates, slot, hidden, surroundings))

    def forget_old(self, current: Collection[Signature]) -> list[Signature]:
        """Drop copies of blocks as they once were, but for the latest.

        Args:
            current: The lots of all blocks as they are.

        Returns:
            The lots that were dropped.
        """
        old = [lot for lot in self._made if lot not in current]
        gone = old[: max(0, len(old) - OLD_LOTS)]
        for lot in gone:
            del self._made[lot]
        return gone

    def forget(self) -> None:
        """Drop all copies."""
        self._made.clear()

    def __len__(self) -> int:
        return len(self._made)

    def _fusable(
        self, templates: Sequence[Template], slot: Slot, hidden: Tensor, surroundings: Surroundings
    ) -> tuple[bool, ...]:
        """For each 4-bit linear layer that the kernel understands: whether, with the weights in this slot, the
        fused one gives the same bits."""
        if not self._fuse:
            return ()
        rows, dtype = hidden.numel() // hidden.shape[-1], hidden.dtype
        switches = switches_signature(hidden.device)
        fusable = []
        with bound(templates, slot), surroundings.autocasting():
            for layer in _candidates(templates):
                key = (layer.out_features, layer.in_features, layer.bias is not None, rows, dtype, *switches)
                if key not in self._tried:
                    self._tried[key] = matches(layer, rows, dtype)
                    if not self._tried[key]:
                        log.warning("the fused kernel differs from bitsandbytes at %s; not used there", key[:2])
                fusable.append(self._tried[key])
        return tuple(fusable)


def _candidates(templates: Sequence[Template]) -> list[nn.Module]:
    return [layer for template in templates for layer in template.layer.modules() if can_fuse(layer)]


def _made(templates: Sequence[Template], kinds: Sequence[str], fusable: Sequence[bool]) -> BlockCopy:
    layers = [LayerCopy.of(template, kind) for template, kind in zip(templates, kinds, strict=True)]
    for layer, fused in zip(_candidates([made.template for made in layers]) if fusable else (), fusable, strict=True):
        if fused:
            layer.__class__ = FusedLinear4bit
    return BlockCopy(layers)


@contextmanager
def bound(templates: Sequence[Template], slot: Slot | None) -> Iterator[None]:
    """Every template of a block bound to its place in a slot."""
    with ExitStack() as bindings:
        start = 0
        for template in templates:
            assert slot is not None
            bindings.enter_context(template.bound(slot, start))
            start += template.packing.nbytes
        yield
