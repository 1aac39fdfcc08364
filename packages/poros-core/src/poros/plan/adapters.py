"""Which linear layers have adapters, and of which rank: by the rules of peft, from a config alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from poros.config import LoraPart
from poros.dimensions import ModelDimensions
from poros.errors import UnsupportedError

Ranks = tuple[Mapping[str, int], ...]
"""For each layer, the name of each adapted linear -> rank."""


class PeftPart(LoraPart):
    """Adapters of a peft config, which can say more than a run's config, or of a model that has them already.

    Attributes:
        pattern: A regular expression in place of `targets`.
        excluded: Names that have none, or a regular expression.
        only_layers: Numbers of the layers that have some; all by default.
        rank_pattern: Name or regular expression -> another rank.
        there: What a model has, in place of everything above but `rank`.
    """

    pattern: str | None = None
    excluded: str | tuple[str, ...] = ()
    only_layers: tuple[int, ...] | None = None
    rank_pattern: Mapping[str, int] = {}
    there: Ranks | None = None


def ranks_of(lora: LoraPart, dimensions: ModelDimensions) -> Ranks:
    """The ranks of all adapters.

    Raises:
        UnsupportedError: a model has an adapter on something whose size the dimensions don't say.
    """
    part = lora if isinstance(lora, PeftPart) else PeftPart(**lora.model_dump())
    if part.there is not None:
        for number, (layer, ranks) in enumerate(zip(dimensions.layers, part.there, strict=True)):
            unknown = sorted(ranks.keys() - layer.linears.keys())
            if unknown:
                raise UnsupportedError(
                    f"the adapter on {unknown[0]} of layer {number} can't be planned for: the family's dimensions have "
                    f"the linear layers {', '.join(layer.linears)}",
                    "choose slots and placements instead of vram",
                )
        return part.there
    return tuple(
        {
            name: rank
            for name in layer.linears
            if (rank := _rank(part, f"{dimensions.path}.{number}.{name}", number)) is not None
        }
        for number, layer in enumerate(dimensions.layers)
    )


def is_adapted(part: PeftPart, path: str, layer: int) -> bool:
    """Whether the module at a path, which is in the layer of that number, gets an adapter."""
    return _rank(part, path, layer) is not None


def _rank(part: PeftPart, path: str, layer: int) -> int | None:
    """Of the adapter on the linear layer at a path; None if there is none."""
    if _is_named(path, part.excluded):
        return None
    if part.pattern is not None:
        named = _is_named(path, part.pattern)
    elif part.targets == "all-linear":
        named = part.only_layers is None or layer in part.only_layers
    else:
        # peft looks at the number of a layer only where a target is the end of a name.
        in_layer = part.only_layers is None or layer in part.only_layers or path in part.targets
        named = _is_named(path, part.targets) and in_layer
    if not named:
        return None
    patterns = (rank for key, rank in part.rank_pattern.items() if re.match(rf"(.*\.)?({key})$", path))
    return next(patterns, part.rank)


def _is_named(path: str, names: str | Sequence[str]) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in names)
