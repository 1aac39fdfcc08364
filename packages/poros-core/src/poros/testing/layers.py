"""What the conformance suite looks at in single layers (fields, bytes that count, what isn't a tensor) and outside."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from poros.checkpoint.frozen import FrozenTensor
from poros.checkpoint.packing import Field, Packing
from poros.checkpoint.skeleton import Skeleton

NUMBERS = frozenset({"layer_idx"})
"""Attributes that number a layer and change nothing in it."""


def restored_fields(places: Sequence[FrozenTensor], packing: Packing) -> Iterator[tuple[Field, tuple[int, int] | None]]:
    """The fields of a layer that are there once its weights are restored, with the shape of each such weight."""
    for place, field in zip(places, packing.fields, strict=True):
        if not place.is_four_bit:
            yield field, None
        elif not place.part:
            owner: Any = place.owner
            yield field, (owner.out_features, owner.in_features)


def outer_elements(skeleton: Skeleton, linears: Mapping[str, tuple[int, int]], tied: bool) -> int:
    """Elements of all parameters outside the layers: of weights in 4 bit before they are packed, of a tied head none.

    Args:
        skeleton: Without the parts that text never reaches, which count as none.
        linears: Linear layers outside the layers, the head apart: name -> (out, in).
        tied: Whether head and embedding are one.
    """
    architecture, elements = skeleton.architecture, 0
    for name, parameter in skeleton.model.named_parameters():
        if f".{architecture.layers}." in name or (tied and name == f"{architecture.head}.weight"):
            continue
        shape = next((shape for key, shape in linears.items() if f".{key}." in name), None)
        elements += parameter.numel() if shape is None else math.prod(shape)
    return elements


def byte_that_counts(field: Field, packing: Packing, slab: Tensor) -> int:
    """A byte of a field whose highest bit changes what is computed: of a float the sign, of packed codes the code.

    Args:
        field: In the packing.
        packing: Of the layer.
        slab: The layer's bytes.
    """
    if not field.name.endswith(".nested_quant_map"):
        return field.dtype.itemsize - 1
    # Of the table of nested scales only some entries are used: the one that is farthest from the middle counts most.
    # On processors with AVX-512, bitsandbytes 0.49 and 0.50 don't read the last scales of a weight whose rows aren't
    # multiples of 64 long.
    scales = next(other for other in packing.fields if other.name == field.name.replace("nested_quant_map", "absmax"))
    used = slab[scales.offset : scales.offset + -(-scales.nbytes // 2)].int()
    return 4 * int(used[(used - 127).abs().argmax()]) + 3


def plain_attributes(layer: nn.Module, inert: Sequence[str] = ()) -> dict[str, Any]:
    """What a layer's modules hold beside tensors and modules, by which two layers of one kind might differ.

    Args:
        layer: A decoder layer.
        inert: Attributes that don't matter.
    """
    return {
        f"{path}.{name}": value
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in NUMBERS and name not in inert and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
