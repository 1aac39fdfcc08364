"""The byte layout of the frozen tensors of a layer kind inside one contiguous slab.

Every frozen tensor of a layer is a field: packed codes, scales, the scales of the scales, the offset, both code tables,
biases, norms and persistent buffers. A layer that forgets one of them trains without an error and is wrong, so the list
is read from the module itself and never written by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from poros.dimensions import aligned
from poros.errors import CheckpointError


@dataclass(frozen=True)
class Field:
    """One tensor in a slab.

    Attributes:
        name: Path inside the layer, `self_attn.q_proj.weight.absmax` for instance.
        dtype, shape: Of the tensor.
        offset: First byte inside the slab.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without padding."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Packing:
    """The fields of a layer kind.

    Attributes:
        fields: In the order of the slab.
        nbytes: Bytes of a slab, a multiple of 256.
    """

    fields: tuple[Field, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> Packing:
        """Lay out tensors given as (name, dtype, shape), each aligned."""
        fields = []
        offset = 0
        for name, dtype, shape in tensors:
            field = Field(name, dtype, tuple(shape), offset)
            fields.append(field)
            offset += aligned(field.nbytes)
        return cls(tuple(fields), offset)

    def views(self, buffer: Tensor, start: int = 0) -> Iterator[Tensor]:
        """The fields as tensors that share the memory of a uint8 buffer in which a slab begins at byte `start`."""
        for field in self.fields:
            begin = start + field.offset
            yield buffer[begin : begin + field.nbytes].view(field.dtype).view(field.shape)

    def write(self, slab: Tensor, name: str, tensor: Tensor) -> None:
        """Copy a tensor into its place.

        Raises:
            CheckpointError: no field has that name, or its dtype or shape is another.
        """
        field = next((field for field in self.fields if field.name == name), None)
        if field is None:
            raise CheckpointError(f"a layer has no frozen tensor {name}")
        if tensor.dtype != field.dtype or tuple(tensor.shape) != field.shape:
            raise CheckpointError(
                f"{name} should be {field.dtype} {list(field.shape)}, but is {tensor.dtype} {list(tensor.shape)}"
            )
        view = slab[field.offset : field.offset + field.nbytes].view(field.dtype).view(field.shape)
        view.copy_(tensor)
