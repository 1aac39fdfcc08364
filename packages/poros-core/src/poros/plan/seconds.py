"""How long a step takes: what the link must carry, and what the GPU must do.

Copies and kernels run side by side, so a step takes as long as the longer of the two, plus what can't overlap: a head
that travels comes while nothing is computed, and while it is used nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from poros.config import StreamConfig
from poros.dimensions import LayerDimensions
from poros.plan.cards import Card
from poros.plan.job import FLOAT32, Job
from poros.plan.memory import activation_bytes, head_travels, keeping_blocks

KERNELS_FORWARD = 120
"""Small kernels of a layer's forward pass, an assumption; a card's `kernel_us` is fitted to it."""

KERNELS_BACKWARD = 250
"""The same of its backward pass."""

GATHERING = 0.5e-3
"""Seconds for which the GPU waits while rows are gathered on the host, beside their copy: an assumption."""

PAGEABLE = 9.6e9
"""Bytes a second of copies from memory that isn't pinned: an assumption, of a probe without a receipt."""

TRAFFIC = 6
"""How often a layer's activations go to the GPU's memory and back, both directions together: an assumption."""


@dataclass(frozen=True)
class Seconds:
    """A step's time and what it is made of.

    Attributes:
        step: Seconds of an optimizer step.
        copying: Seconds for which the link is busy.
        computing: Seconds for which the GPU is busy.
        copied_bytes: What travels to the device.
        bound_by: Which of the two decides, with what it can't share with the other.
    """

    step: float
    copying: float
    computing: float
    copied_bytes: int
    bound_by: Literal["link", "compute"]


def copied_bytes(job: Job, stream: StreamConfig) -> int:
    """Bytes that travel to the device in one optimizer step: blocks, head, moments, boundaries."""
    resident = job.resident(stream.resident)
    sizes = [size for block, size in enumerate(job.block_bytes) if block not in resident]
    moving = [block for block in range(len(job.blocks)) if block not in resident]
    slots = min(stream.slots, len(moving))
    travels = head_travels(job, stream)
    blocks = 2 * sum(sizes)
    if moving:
        # At the two turns the blocks that are still in the slots are used again; a head overwrites them at one.
        blocks -= sum(job.block_bytes[block] for block in moving[:slots])
        if not travels:
            blocks -= sum(job.block_bytes[block] for block in moving[-slots:])
    boundaries = len(job.blocks) * job.micro_batches * job.hidden_bytes if stream.boundaries == "host" else 0
    times = job.micro_batches // job.together(stream)
    each = max(blocks, 0) + (job.dimensions.matrix_bytes if travels else 0)
    return times * each + update_bytes(job, stream) + boundaries


def update_bytes(job: Job, stream: StreamConfig) -> int:
    """Bytes that travel to the device for the update: moments, and gradients where they are on the host."""
    moments = 2 * job.adapter_bytes if stream.optimizer == "host" else 0
    return moments + (job.adapter_bytes if stream.gradients == "host" else 0)


@dataclass(frozen=True)
class BlockSeconds:
    """GPU time of one block.

    Attributes:
        work: Of one micro-batch, its weights restored.
        kept: The same for a block that keeps its activations.
        restoring: Of restoring its weights once.
    """

    work: float
    kept: float
    restoring: float


@cache
def block_seconds(job: Job, card: Card) -> tuple[BlockSeconds, ...]:
    """GPU time of every block."""
    found = []
    for block in job.blocks:
        layers = [job.dimensions.layers[i] for i in block]
        work, kept = (sum(_layer_seconds(job, layer, card, keeps) for layer in layers) for keeps in (False, True))
        weights = sum(rows * columns for layer in layers for rows, columns in layer.linears.values())
        # Half a byte and its scale are read, two bytes are written.
        found.append(BlockSeconds(work, kept, 2.53 * weights / (card.memory_gb_s * 1e9)))
    return tuple(found)


def _layer_seconds(job: Job, layer: LayerDimensions, card: Card, keeps: bool) -> float:
    weights = sum(rows * columns for rows, columns in layer.linears.values())
    passes = 2 if keeps else 3  # forward, backward with respect to the input, and the recompute
    products = passes * 2 * weights * job.tokens / (card.tflops * 1e12)
    kernels = (KERNELS_FORWARD * (passes - 1) + KERNELS_BACKWARD) * card.kernel_us * 1e-6
    activations = activation_bytes(job, layer)
    traffic = TRAFFIC * activations / (card.memory_gb_s * 1e9)
    attention = passes * 2 * 2 * job.tokens * (job.tokens // job.rows) * layer.query / (card.tflops * 1e12)
    return products + attention + max(kernels, traffic)


def step_seconds(job: Job, stream: StreamConfig, card: Card) -> Seconds:
    """The time of an optimizer step."""
    resident, keeping = job.resident(stream.resident), keeping_blocks(job, stream)
    takes_out = job.graphs and (stream.restore_once or job.by_block(stream))
    times = job.micro_batches // job.together(stream)
    computing = restoring = 0.0
    for number, block in enumerate(block_seconds(job, card)):
        keeps = number in keeping
        visits = 2 * job.micro_batches if keeps else 2 * times if takes_out else 3 * job.micro_batches
        computing += job.micro_batches * (block.kept if keeps else block.work) + visits * block.restoring
        restoring += 0.0 if number in resident else 2 * times * block.restoring
    vocabulary, hidden = job.dimensions.vocabulary, job.dimensions.hidden
    head = 3 * 2 * job.tokens * vocabulary * hidden / (card.tflops * 1e12)
    touched = 10 if stream.loss_rows is None else 15  # float32 matrices of all tokens, read or written
    loss = touched * FLOAT32 * job.tokens * vocabulary / (card.memory_gb_s * 1e9)
    at_the_turn = job.micro_batches * (head + loss)
    computing += at_the_turn + 7 * job.adapter_bytes / (card.memory_gb_s * 1e9)
    if stream.embedding == "host":
        computing += job.micro_batches * (GATHERING + job.hidden_bytes / PAGEABLE)
    copied = copied_bytes(job, stream)
    link = card.link_gb_s * 1e9
    copying = copied / link
    only_copying = only_computing = 0.0
    if head_travels(job, stream):
        only_copying += times * job.dimensions.matrix_bytes / link
        only_computing += at_the_turn
    if stream.optimizer == "host":
        only_copying += update_bytes(job, stream) / link  # nothing else is computed during the update
    if stream.slots == 1 and len(resident) < len(job.blocks):
        # The next block can't come before this one was taken out, or before it was done with.
        only_computing = restoring + only_computing if takes_out else computing
    by_link, by_compute = copying + only_computing, computing + only_copying
    decides: Literal["link", "compute"] = "link" if by_link > by_compute else "compute"
    return Seconds(max(by_link, by_compute), copying, computing, copied, decides)
