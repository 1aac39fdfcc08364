"""What is to be trained, as far as a plan needs to know."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

from poros.config import StreamConfig
from poros.dimensions import ModelDimensions
from poros.plan.adapters import Ranks
from poros.stream.schedule import evenly_spread

FLOAT32 = 4
BF16 = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A model and what is done with it. Everything that a step costs follows from this and from what lives where.

    Attributes:
        dimensions: Of the model.
        tokens: Of a micro-batch, padding included: rows times the longest row.
        rows: Of a micro-batch.
        micro_batches: Per optimizer step.
        rank: Of the adapters.
        ranks: Of the adapters of each layer, by the names of its linears; on all of them `rank` by default.
        dropout: Whether the adapters' inputs have dropout.
        block_size: Layers of a block.
        graphs: Whether blocks are run by recorded CUDA graphs.
        padded: Whether rows may be padded.
        shapes: Batch shapes that its micro-batches may have: lengths, with a mask or without.
        towers: Bytes on the device of parts that text never reaches, in a model that has them.
    """

    dimensions: ModelDimensions
    tokens: int
    rows: int = 1
    micro_batches: int = 1
    rank: int = 16
    ranks: Ranks | None = None
    dropout: bool = False
    block_size: int = 1
    graphs: bool = True
    padded: bool = False
    shapes: int = 1
    towers: int = 0

    @cached_property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each block."""
        layers = range(len(self.dimensions.layers))
        return tuple(tuple(layers[start : start + self.block_size]) for start in layers[:: self.block_size])

    @cached_property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of each block's slabs."""
        return tuple(sum(self.dimensions.layers[layer].nbytes for layer in block) for block in self.blocks)

    @cached_property
    def adapters(self) -> tuple[int, ...]:
        """Bytes of each layer's adapters in float32."""
        layers = self.dimensions.layers
        return tuple(FLOAT32 * layer.adapter_parameters(self.ranks_of(index)) for index, layer in enumerate(layers))

    def ranks_of(self, layer: int) -> Mapping[str, int]:
        """Name of each adapted linear of a layer -> rank."""
        if self.ranks is not None:
            return self.ranks[layer]
        return dict.fromkeys(self.dimensions.layers[layer].linears, self.rank)

    def of_rank(self, rank: int) -> Job:
        """The same with adapters of another rank."""
        ranks = self.ranks and tuple(
            {name: max(1, one * rank // self.rank) for name, one in layer.items()} for layer in self.ranks
        )
        return dataclasses.replace(self, rank=rank, ranks=ranks)

    @cached_property
    def adapter_bytes(self) -> int:
        """Bytes of all adapters."""
        return sum(self.adapters)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one micro-batch's hidden states in bf16."""
        return BF16 * self.tokens * self.dimensions.hidden

    @property
    def mask_elements(self) -> int:
        """Elements of an attention mask of one micro-batch, [rows, 1, length, length]."""
        return self.tokens * (self.tokens // self.rows)

    def is_masked(self, layer: int) -> bool:
        """Whether a layer is given a mask: where rows are padded, or as long as its window.

        Source: `transformers.masking_utils._ignore_causal_mask_sdpa`.
        """
        window = self.dimensions.layers[layer].window
        return self.padded or (window is not None and self.tokens // self.rows >= window)

    @cached_property
    def masks(self) -> int:
        """Masks of one micro-batch: layers that look back equally far share one."""
        layers = self.dimensions.layers
        return len({layers[layer].window for layer in range(len(layers)) if self.is_masked(layer)})

    def keeps_everything(self, stream: StreamConfig) -> bool:
        """Whether every block stays and keeps its activations."""
        return not stream.recompute and stream.resident in ("all", len(self.blocks))

    def by_block(self, stream: StreamConfig) -> bool:
        """Whether the micro-batches of a step go through the blocks together; otherwise one after the other."""
        return self.micro_batches > 1 and not self.dimensions.shares and not self.keeps_everything(stream)

    def together(self, stream: StreamConfig) -> int:
        """Micro-batches that are on their way at a time."""
        return self.micro_batches if self.by_block(stream) else 1

    def resident(self, count: int | Literal["all"]) -> frozenset[int]:
        """Which blocks stay on the device, if it is to be `count`."""
        return _spread(len(self.blocks) if count == "all" else count, len(self.blocks))


_spread = cache(evenly_spread)
