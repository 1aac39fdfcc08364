"""Taking a block out of its slot at the begin of a visit.

A visit uses each 4-bit weight at least twice: in the recompute and in the backward pass. So it restores all of them
once, into bf16 buffers, and copies what little else lies in the slot (norms, biases). From then on the slot isn't read
any more and the next block may be copied into it, long before the visit is over. All blocks of a layout share the
buffers, so what is in them is the block that was taken out last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from poros.engine.kernels.linear import FusedLinear4bit, fused_layers
from poros.engine.replay import LayerCopy, bound
from poros.engine.signature import Signature
from poros.engine.template import Template
from poros.stream.slots import Slot

Buffers = dict[Signature, Tensor]


def put_outside(copies: Sequence[LayerCopy], buffers: Buffers) -> bool:
    """Let the copies of a block's layers read buffers instead of a slot.

    Args:
        copies: In the order of the block.
        buffers: Where each tensor is taken to; what is missing is added.

    Returns:
        Whether that was possible: every 4-bit weight must be one of a fused layer. If not, nothing was changed.
    """
    places = [place for made in copies for place in made.template.places]
    if not all(isinstance(place.owner, FusedLinear4bit) for place in places if place.is_four_bit):
        return False

    def buffer(position: int, name: str, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
        key = (position, name, shape, dtype)
        if key not in buffers:
            buffers[key] = torch.empty(shape, dtype=dtype, device=like.device)
        return buffers[key]

    for position, made in enumerate(copies):
        for place in made.template.places:
            tensor = place.get()
            if not place.is_four_bit:
                place.set(buffer(position, place.name, tuple(tensor.shape), tensor.dtype, tensor))
            elif not place.part:
                layer: Any = place.owner
                shape = (layer.out_features, layer.in_features)
                layer.restored = buffer(position, place.name, shape, torch.bfloat16, tensor)
        # The template returns to what it finds now whenever it was bound to a slot.
        made.template = Template(made.template.layer, made.template.places, made.template.packing)
        made.outside = True
    return True


def take_out(copies: Sequence[LayerCopy], slot: Slot) -> None:
    """Restore and copy everything that lies in a slot into the buffers of `copies`."""
    held = [(place, place.get()) for made in copies for place in made.template.places if not place.is_four_bit]
    with bound(copies, slot), torch.no_grad():
        for made in copies:
            for layer in fused_layers(made.template.layer):
                layer.restore()
        if held:
            torch._foreach_copy_([buffer for _, buffer in held], [place.get() for place, _ in held])
