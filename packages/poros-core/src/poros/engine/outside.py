"""Taking a block out of its slot at the begin of a visit.

A visit uses each 4-bit weight at least twice: in the recompute and in the backward pass. So it restores all of them
once, into bf16 buffers, and copies what little else lies in the slot (norms, biases). From then on the slot isn't read
any more and the next block may be copied into it, long before the visit is over. All blocks of a layout share the
buffers, so what is in them is the block that was taken out last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from poros.dimensions import aligned
from poros.engine.kernels.linear import FusedLinear4bit
from poros.engine.signature import Signature
from poros.engine.template import Template
from poros.stream.slots import Arena, Slot

if TYPE_CHECKING:
    from poros.engine.copies import BlockCopy


class Buffers:
    """Where tensors are taken to: one buffer for all that are alike, made when it is first asked for.

    Args:
        arena: Holds them, as far as there is room in it.
    """

    def __init__(self, arena: Arena | None = None) -> None:
        self._arena = arena
        self._buffers: dict[Signature, Tensor] = {}

    def get(self, position: int, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer for a tensor of the layer at a position of a block."""
        key = (position, name, shape, dtype)
        if key not in self._buffers:
            memory = None if self._arena is None else self._arena.take(math.prod(shape) * dtype.itemsize)
            self._buffers[key] = (
                torch.empty(shape, dtype=dtype, device=device) if memory is None else memory.view(dtype).view(shape)
            )
        return self._buffers[key]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(aligned(buffer.nbytes) for buffer in self._buffers.values())

    def forget(self) -> None:
        """Give up their memory, but for what is in the arena."""
        if self._arena is None:
            self._buffers.clear()


def outside_bytes(blocks: Sequence[Sequence[Template]]) -> int:
    """Bytes of all the buffers that taking out these blocks needs."""
    sizes = {
        (position, *kind): aligned(math.prod(kind[1]) * kind[2].itemsize)
        for block in blocks
        for position, template in enumerate(block)
        for kind in _kinds(template)
    }
    return sum(sizes.values())


def _kinds(template: Template) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """Name, shape and dtype of each tensor of a layer when it has been taken out."""
    for place in template.places:
        if not place.is_four_bit:
            yield place.name, tuple(place.get().shape), place.get().dtype
        elif not place.part:
            owner: Any = place.owner
            yield place.name, (owner.out_features, owner.in_features), torch.bfloat16


def put_outside(block: BlockCopy, buffers: Buffers) -> None:
    """Let the copies of a block's layers read buffers instead of a slot, if that is possible.

    Every 4-bit weight must be one of a fused layer for that; if not, nothing is changed.

    Args:
        block: The copies.
        buffers: Where each tensor is taken to.
    """
    places = [place for made in block.layers for place in made.template.places]
    if not all(isinstance(place.owner, FusedLinear4bit) for place in places if place.is_four_bit):
        return

    for position, made in enumerate(block.layers):
        for place in made.template.places:
            tensor = place.get()
            if not place.is_four_bit:
                place.set(buffers.get(position, place.name, tuple(tensor.shape), tensor.dtype, tensor.device))
            elif not place.part:
                layer: Any = place.owner
                shape = (layer.out_features, layer.in_features)
                layer.restored = buffers.get(position, place.name, shape, torch.bfloat16, tensor.device)
        # The template returns to what it finds now whenever it was bound to a slot.
        made.template = Template(made.template.layer, made.template.places, made.template.packing)
    block.outside = True


def take_out(block: BlockCopy, slot: Slot) -> None:
    """Restore and copy everything that lies in a slot into the buffers of a block's copies."""
    held = [(place, place.get()) for made in block.layers for place in made.template.places if not place.is_four_bit]
    with block.bound(slot), torch.no_grad():
        for layer in block.fused():
            layer.restore()
        if held:
            torch._foreach_copy_([buffer for _, buffer in held], [place.get() for place, _ in held])
