"""The surfaces on which two runs are compared, and the comparison: `torch.equal`, never a tolerance.

A `Trace` holds every tensor of a run that the promise speaks of. Comparing two traces first compares *what* they hold:
a surface that is empty, or that holds other tensors in one run than in the other, is an error, because a gate that
compares nothing passes everything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from poros.errors import PorosError

SURFACES = ("logits", "loss", "gradients", "gradient_norm", "adapters", "optimizer_state", "rng_state")
"""The surfaces of the promise, by the names used in receipts."""

LAYER_OUTPUTS = "layer_outputs"
"""Outputs of the decoder layers in a forward pass before training: they tell where a difference begins."""

CPU = torch.device("cpu")

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Key:
    """What one recorded tensor is.

    Attributes:
        surface: One of `SURFACES`, or `LAYER_OUTPUTS`.
        step: Optimizer step, from 1.
        name: Of the tensor; a micro-batch's number for losses.
        layer: The decoder layer it belongs to, if to one.
    """

    surface: str
    step: int
    name: str
    layer: int | None = None


@dataclass(frozen=True)
class Difference:
    """The first place at which two runs differ.

    Attributes:
        key: What differs.
        block: The block it belongs to, if to one.
        largest: Largest absolute difference of an element; NaN where a shape, dtype or NaN differs.
    """

    key: Key
    block: int | None
    largest: float

    def __str__(self) -> str:
        where = f" (block {self.block})" if self.block is not None else ""
        return f"{self.key.surface} at step {self.key.step}: {self.key.name}{where}, by at most {self.largest:.3g}"


@dataclass(frozen=True)
class Comparison:
    """What came of comparing two traces.

    Attributes:
        surfaces: Surface -> whether every tensor on it is equal; None for a surface left out on purpose.
        compared: How many tensors were compared.
        difference: The first difference of the surfaces, or None.
        first_block: The first block, in forward order, whose output differs in a forward pass before training.
    """

    surfaces: dict[str, bool | None]
    compared: int
    difference: Difference | None
    first_block: int | None

    @property
    def identical(self) -> bool:
        """Whether everything that was compared is equal."""
        return self.difference is None


@dataclass
class Trace:
    """The recorded tensors of a run, in the order in which they came about.

    Attributes:
        tensors: Copies of them.
        keep_on: Where the copies are.
    """

    tensors: dict[Key, Tensor] = field(default_factory=dict)
    keep_on: torch.device = CPU

    def record(self, surface: str, step: int, name: str, tensor: Tensor, layer: int | None = None) -> None:
        """Keep a copy of a tensor."""
        if layer is None and (match := _LAYER.search(f".{name}")):
            layer = int(match[1])
        key = Key(surface, step, name, layer)
        if key in self.tensors:
            raise PorosError(f"{key} was recorded twice")
        self.tensors[key] = tensor.detach().to(self.keep_on, copy=True)

    def surface(self, surface: str, steps: int | None = None) -> dict[Key, Tensor]:
        """The tensors of one surface, up to and with a step."""
        return {k: t for k, t in self.tensors.items() if k.surface == surface and (steps is None or k.step <= steps)}


def compare(
    reference: Trace,
    other: Trace,
    blocks: Sequence[Sequence[int]],
    surfaces: Sequence[str] = SURFACES,
    steps: int | None = None,
) -> Comparison:
    """Compare two traces tensor by tensor.

    Args:
        reference: The stock run.
        other: The run to judge.
        blocks: The layers of each block, to say where a difference lies.
        surfaces: Which surfaces to compare; the others come out as None.
        steps: Compare only up to this step.

    Raises:
        PorosError: a surface is empty, or the two hold different tensors on it.
    """
    block_of = {layer: index for index, block in enumerate(blocks) for layer in block}
    verdicts: dict[str, bool | None] = dict.fromkeys(SURFACES)
    differences: list[Difference] = []
    compared = 0
    for surface in surfaces:
        mine, theirs = reference.surface(surface, steps), other.surface(surface, steps)
        if not mine or set(mine) != set(theirs):
            raise PorosError(
                f"the gate can't compare {surface}: {len(mine)} tensors in the reference, {len(theirs)} in the other"
            )
        found = [
            Difference(key, block_of.get(key.layer) if key.layer is not None else None, _largest(tensor, theirs[key]))
            for key, tensor in mine.items()
            if not _same(tensor, theirs[key])
        ]
        compared += len(mine)
        verdicts[surface] = not found
        differences += found
    outputs = other.surface(LAYER_OUTPUTS)
    first_layer = next(
        (
            key.layer
            for key, tensor in reference.surface(LAYER_OUTPUTS).items()
            if key in outputs and not _same(tensor, outputs[key])
        ),
        None,
    )
    return Comparison(
        surfaces=verdicts,
        compared=compared,
        difference=min(differences, key=_rank) if differences else None,
        first_block=block_of.get(first_layer) if first_layer is not None else None,
    )


def _rank(difference: Difference) -> tuple[int, int, int]:
    """Order of occurrence: by step, then by surface, then along the backward pass, which meets the last layer first."""
    key = difference.key
    return key.step, SURFACES.index(key.surface), -(key.layer or 0)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _largest(one: Tensor, other: Tensor) -> float:
    if one.dtype != other.dtype or one.shape != other.shape or one.numel() == 0:
        return float("nan")
    return float((one.double() - other.double()).abs().max())


def record_layer_outputs(forward: Callable[[], Any], layers: Sequence[nn.Module], trace: Trace) -> None:
    """Record what each decoder layer gives in one forward pass.

    Args:
        forward: Runs the model once.
        layers: The decoder layers.
        trace: Where to.
    """

    def hook(index: int) -> Callable[..., None]:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            trace.record(LAYER_OUTPUTS, 1, f"layer {index}", tensor, layer=index)

        return record

    handles = [layer.register_forward_hook(hook(index)) for index, layer in enumerate(layers)]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
