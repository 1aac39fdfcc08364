"""How long a step takes: what the link must carry, and what the GPU must do.

Copies and kernels run side by side within the forward pass and within the backward pass, so each of the two takes as
long as the longer of them. At the turn between them, during the update and between steps little can overlap. The
constants are fitted to runs on an H200, see validation/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from poros.config import StreamConfig
from poros.plan.cards import Card
from poros.plan.graphs import keeping_blocks, takes_out
from poros.plan.job import FLOAT32, Job
from poros.plan.memory import activation_bytes, head_travels

KERNELS_FORWARD = 120
"""Small kernels of a layer's forward pass, an assumption; a card's `kernel_us` is fitted to it."""

KERNELS_BACKWARD = 250
"""The same of its backward pass."""

EAGER_KERNEL_US = 33.0
"""Time of a small kernel that Python launches, where no graph is recorded: of a slow host."""

TRAFFIC_FORWARD, TRAFFIC_BACKWARD = 4.5, 8.0
"""How often a layer's activations go to the GPU's memory or come from it, beside what matrix products take."""

ATTENTION_FORWARD, ATTENTION_BACKWARD = 1.3, 5.6
"""Time of attention over that of matrix products with as many operations (of all pairs of tokens, masked or not)."""

BETWEEN_STEPS = 0.010
"""Seconds of a step in which the GPU waits for Python: on a slow host, where a step ends with a synchronisation."""

VISIT, VISIT_ON_HOST = 1.75e-3, 2.25e-3
"""Seconds that Python needs for a visit of a block, and with boundaries on the host: of a slow host, too."""

GATHERING = 0.5e-3
"""Seconds for which the GPU waits while rows are gathered on the host, beside their copy: an assumption."""

PAGEABLE = 9.6e9
"""Bytes a second of copies from memory that isn't pinned: an assumption, of a probe without a receipt."""


@dataclass(frozen=True)
class Seconds:
    """A step's time and what it is made of.

    Attributes:
        step: Seconds of an optimizer step.
        copying: Seconds for which the link is busy.
        computing: Seconds for which the GPU is busy.
        copied_bytes: What travels to the device.
        bound_by: Which of the two decides, with what it can't share with the other; or the host, where Python needs
            more time for the visits than either.
    """

    step: float
    copying: float
    computing: float
    copied_bytes: int
    bound_by: Literal["link", "compute", "host"]


def copied_bytes(job: Job, stream: StreamConfig) -> int:
    """Bytes that travel to the device in one optimizer step: blocks, head, moments, boundaries."""
    return sum(_copied_parts(job, stream)) + update_bytes(job, stream)


def _copied_parts(job: Job, stream: StreamConfig) -> tuple[int, int, int]:
    """Bytes of blocks, of the head and of boundaries that travel to the device in one optimizer step."""
    resident = job.resident(stream.resident)
    moving = [block for block in range(len(job.blocks)) if block not in resident]
    slots = min(stream.slots, len(moving))
    travels = head_travels(job, stream)
    blocks = 2 * sum(job.block_bytes[block] for block in moving)
    if moving:
        # At the two turns the blocks that are still in the slots are used again; a head overwrites them at one.
        blocks -= sum(job.block_bytes[block] for block in moving[:slots])
        if not travels:
            blocks -= sum(job.block_bytes[block] for block in moving[-slots:])
    boundaries = len(job.blocks) * job.micro_batches * job.hidden_bytes if stream.boundaries == "host" else 0
    times = job.micro_batches // job.together(stream)
    return times * max(blocks, 0), times * job.dimensions.matrix_bytes * travels, boundaries


def update_bytes(job: Job, stream: StreamConfig) -> int:
    """Bytes that travel to the device for the update: moments, and gradients where they are on the host."""
    moments = 2 * job.adapter_bytes if stream.optimizer == "host" else 0
    return moments + (job.adapter_bytes if stream.gradients == "host" else 0)


@dataclass(frozen=True)
class BlockSeconds:
    """GPU time of one block and one micro-batch, its weights restored.

    Attributes:
        forward: Of the forward pass; a recompute takes as long.
        backward: Of the backward pass, from activations that are there.
        restoring: Of restoring its weights once.
    """

    forward: float
    backward: float
    restoring: float


@cache
def block_seconds(job: Job, card: Card) -> tuple[BlockSeconds, ...]:
    """GPU time of every block."""
    found = []
    for block in job.blocks:
        layers = [job.dimensions.layers[i] for i in block]
        passes = [_layer_seconds(job, index, card) for index in block]
        weights = sum(rows * columns for layer in layers for rows, columns in layer.linears.values())
        # Half a byte and its scale are read, two bytes are written.
        restoring = 2.53 * weights / (card.memory_gb_s * 1e9)
        found.append(BlockSeconds(sum(one for one, _ in passes), sum(other for _, other in passes), restoring))
    return tuple(found)


def _layer_seconds(job: Job, index: int, card: Card) -> tuple[float, float]:
    """Forward and backward, with respect to the layer's input."""
    layer = job.dimensions.layers[index]
    weights = sum(rows * columns for rows, columns in layer.linears.values())
    products = 2 * weights * job.tokens / (card.tflops * 1e12)
    attention = 2 * 2 * job.tokens * (job.tokens // job.rows) * layer.query / (card.tflops * 1e12)
    traffic = activation_bytes(job, index) / (card.memory_gb_s * 1e9)
    kernel = (card.kernel_us if job.graphs else EAGER_KERNEL_US) * 1e-6
    return (
        products + ATTENTION_FORWARD * attention + TRAFFIC_FORWARD * traffic + KERNELS_FORWARD * kernel,
        products + ATTENTION_BACKWARD * attention + TRAFFIC_BACKWARD * traffic + KERNELS_BACKWARD * kernel,
    )


def step_seconds(job: Job, stream: StreamConfig, card: Card) -> Seconds:
    """The time of an optimizer step."""
    resident, keeping = job.resident(stream.resident), keeping_blocks(job, stream)
    outside = takes_out(job, stream)
    together = job.together(stream)
    times = job.micro_batches // together
    moves = len(resident) < len(job.blocks)
    link = card.link_gb_s * 1e9

    # Each pass: what is computed, and which part of it can't be done while the only slot is filled.
    forward = backward = forward_alone = backward_alone = 0.0
    for number, block in enumerate(block_seconds(job, card)):
        keeps = number in keeping
        once = 1 if outside and not keeps else together
        there = together * block.forward + once * block.restoring
        # Restored for the recompute and for the gradients; a block that was taken out is restored once for both.
        again = 0.0 if keeps else block.forward
        restorings = once if outside or keeps else 2 * once
        back = together * (again + block.backward) + restorings * block.restoring
        forward, backward = forward + there, backward + back
        if stream.slots == 1 and number not in resident:
            # The next block can't come before this one was taken out, or before it was done with.
            forward_alone += block.restoring if outside else there
            backward_alone += block.restoring if outside else back

    to_blocks, to_head, to_boundaries = _copied_parts(job, stream)
    back_share = to_boundaries / times / link
    each_way = to_blocks / times / 2 / link
    passes = max(forward, each_way + forward_alone) + max(backward, each_way + back_share + backward_alone)
    visiting = 2 * len(job.blocks) * together * (VISIT if stream.boundaries == "device" else VISIT_ON_HOST)
    waits_for_host = visiting > passes
    passes = max(passes, visiting)

    vocabulary, hidden = job.dimensions.vocabulary, job.dimensions.hidden
    head = 3 * 2 * job.tokens * vocabulary * hidden / (card.tflops * 1e12)
    touched = 10 if stream.loss_rows is None else 15  # float32 matrices of all tokens, read or written
    loss = touched * FLOAT32 * job.tokens * vocabulary / (card.memory_gb_s * 1e9)
    at_the_turn = together * (head + loss)
    updating = 7 * job.adapter_bytes / (card.memory_gb_s * 1e9)
    gathering = together * (GATHERING + job.hidden_bytes / PAGEABLE) if stream.embedding == "host" else 0.0

    computing = times * (forward + backward + at_the_turn + gathering) + updating
    copied = copied_bytes(job, stream)
    step = times * (passes + to_head / times / link + at_the_turn + gathering)
    step += max(updating, update_bytes(job, stream) / link) + BETWEEN_STEPS
    decides: Literal["link", "compute", "host"] = "link" if moves and copied / link > computing else "compute"
    if waits_for_host:
        decides = "host"
    return Seconds(step, copied / link, computing, copied, decides)
