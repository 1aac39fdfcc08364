"""How many CUDA graphs a job records, and how many of them are kept.

A graph is of one batch shape. Rows of many lengths have many shapes; the graphs of those that were least recently used
go when there are too many. What they read and leave has one memory for all shapes; what the driver itself keeps of each
is what they cost, and that is no part of torch's memory.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from poros.config import StreamConfig
from poros.plan.job import Job

MOST_GRAPHS = 512
"""Graphs that are kept at most, unless one batch shape alone has more."""

LENGTHS_APART = 8
"""Tokens by which the lengths of rows differ where nobody knows: what data collators usually pad to."""


def takes_out(job: Job, stream: StreamConfig) -> bool:
    """Whether blocks that are run again are recorded outside their slots, once for all blocks that are alike."""
    return job.graphs and (stream.restore_once or job.by_block(stream))


def keeping_blocks(job: Job, stream: StreamConfig) -> frozenset[int]:
    """Which blocks keep their activations."""
    if stream.recompute or job.by_block(stream):
        return frozenset()
    return job.resident(stream.resident)


def graphs_of_shape(job: Job, stream: StreamConfig) -> int:
    """Graphs of one batch shape: two for each sort of block, or for each place from which it is read, and two for each
    block that keeps its activations."""
    if not job.graphs:
        return 0
    keeping = keeping_blocks(job, stream)
    places = _places(job, stream)
    if takes_out(job, stream):
        places = {sort for sort, *_ in places}
    return 2 * (len(places) + len(keeping))


def graphs_taking_out(job: Job, stream: StreamConfig) -> int:
    """Graphs that take blocks out of their slots, whatever the batch shape: one for each place of a sort of block."""
    return len(_places(job, stream)) if takes_out(job, stream) else 0


def _places(job: Job, stream: StreamConfig) -> set[Any]:
    """Where the blocks that are run again are read from: (sort, slot or block that has a home)."""
    keeping, resident, sorts = keeping_blocks(job, stream), job.resident(stream.resident), _sorts(job)
    again = [block for block in range(len(job.blocks)) if block not in keeping]
    moving = [block for block in again if block not in resident]
    slots = range(min(stream.slots, len(moving)))
    homes = {(sorts[block], "home", block) for block in again if block in resident}
    return {(sorts[block], "slot", slot) for block in moving for slot in slots} | homes


def graphs_kept(job: Job, stream: StreamConfig) -> int:
    """Graphs that are there at a time: of all batch shapes, but no more than `MOST_GRAPHS` if those are of several."""
    one = graphs_of_shape(job, stream)
    return max(one, min(MOST_GRAPHS, one * job.shapes))


def may_keep(job: Job, stream: StreamConfig) -> bool:
    """Whether a plan lets as many blocks keep their activations: each has graphs of its own, and recording them over
    and over takes longer than running blocks again."""
    return not keeping_blocks(job, stream) or stay_recorded(job, stream)


def stay_recorded(job: Job, stream: StreamConfig) -> bool:
    """Whether the graphs of every batch shape can be kept. Where not, shapes that come back are recorded anew."""
    return graphs_of_shape(job, stream) * job.shapes <= MOST_GRAPHS


@cache
def _sorts(job: Job) -> tuple[Any, ...]:
    """For each block, what it has in common with blocks that are recorded once for all."""

    def sort_of(index: int) -> Any:
        layer = job.dimensions.layers[index]
        parts = (layer.linears, layer.vectors, layer.buffers, job.ranks_of(index))
        return (layer.window, *(tuple(part.items()) for part in parts))

    return tuple(tuple(sort_of(index) for index in block) for block in job.blocks)
