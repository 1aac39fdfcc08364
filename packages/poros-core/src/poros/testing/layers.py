"""What the conformance suite looks at in single layers: their fields, bytes that count, and what isn't a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from poros.checkpoint.frozen import FrozenTensor
from poros.checkpoint.packing import Field, Packing

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
    scales = next(other for other in packing.fields if other.name == field.name.replace("nested_quant_map", "absmax"))
    used = slab[scales.offset : scales.offset + scales.nbytes].int()
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
