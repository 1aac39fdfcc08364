"""How much memory a step takes, component by component.

What Poros itself allocates (slots, resident blocks, adapters, moments) is known to the byte and tested against the
engine. What torch's operations take while a block or the loss is worked out is counted from the tensors that they
save, for one token. Tests hold predictions against the runs of validation/.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

from poros.config import StreamConfig
from poros.dimensions import LayerDimensions, aligned
from poros.plan.cards import Card
from poros.plan.graphs import graphs_kept, graphs_taking_out, keeping_blocks, takes_out
from poros.plan.job import BF16, FLOAT32, Job

SLACK = 0.01
"""What torch's allocator takes for rounding, over what is allocated."""

PIECE_BYTES = 16_000_000
"""Bytes of parameters that `poros.engine.optimizer` updates at a time, while the moments are in host memory."""

AWAY = 3
"""Boundary activations on the device while the others are in host memory."""


def device_components(job: Job, stream: StreamConfig, card: Card) -> dict[str, int]:
    """Bytes of device memory at the fullest moment of a step, by component; their sum is what the process takes.

    Two moments compete: the loss, when every boundary activation is there, and the update, when every gradient is.
    """
    dimensions = job.dimensions
    resident = job.resident(stream.resident)
    moving = [size for block, size in enumerate(job.block_bytes) if block not in resident]
    slots = aligned(max(moving)) * min(stream.slots, len(moving)) if moving else 0
    restored = restored_bytes(job) if takes_out(job, stream) and (moving or stream.recompute) else 0
    travels = head_travels(job, stream)
    on_host = stream.embedding == "host"
    embedding_stays = not on_host or (dimensions.tied and not travels)
    parts = {
        "context": round(card.context_gb * 1e9),
        "workspaces": round(card.workspace_gb * 1e9),
        "slots": slots,
        "restored weights": restored,
        "resident blocks": sum(aligned(job.block_bytes[block]) for block in resident),
        "embedding": dimensions.matrix_bytes * embedding_stays + dimensions.table_bytes * (not on_host),
        "head": 0 if travels or dimensions.tied else dimensions.matrix_bytes,
        "outside the layers": dimensions.outer_bytes,
        "towers": job.towers,
        "adapters": job.adapter_bytes,
        "moments": 2 * job.adapter_bytes if stream.optimizer == "device" else _room(job, stream),
        "activations of a block": block_activation_bytes(job, stream),
        "kept activations": kept_bytes(job, stream),
        # One byte each: of every micro-batch that is under way, and the one that graphs read.
        "masks": (job.together(stream) + job.graphs) * job.masks * job.mask_elements,
        "recorded graphs": round(card.graph_mb * 1e6) * (graphs_kept(job, stream) + graphs_taking_out(job, stream)),
    }
    if travels:
        # One piece of memory has two uses by turns.
        parts["head"] = max(0, dimensions.matrix_bytes - slots - restored)
    together = job.together(stream)
    kept = len(job.blocks) * together
    at_the_loss = {
        "boundaries": (kept if stream.boundaries == "device" else min(AWAY, kept)) * job.hidden_bytes,
        "logits and loss": loss_bytes(job, stream),
        "gradients of hidden states": together * job.hidden_bytes,
    }
    update = job.adapter_bytes if stream.optimizer == "device" else PIECE_BYTES
    leaving = min(2 * (job.adapter_bytes // len(job.blocks)), job.adapter_bytes)
    gradients = job.adapter_bytes if stream.gradients == "device" else leaving
    if together < job.micro_batches:
        at_the_loss["gradients"] = gradients  # of the micro-batches before it
    at_the_update = {"gradients": gradients, "update": min(update, job.adapter_bytes)}
    parts |= at_the_loss if sum(at_the_loss.values()) > sum(at_the_update.values()) else at_the_update
    parts["allocator"] = round(card.pages_gb * 1e9 + SLACK * (sum(parts.values()) - outside_torch(parts)))
    return parts


def outside_torch(parts: Mapping[str, int]) -> int:
    """Bytes among a plan's components that the driver takes, not torch: context and recorded graphs."""
    return parts["context"] + parts["recorded graphs"]


def _room(job: Job, stream: StreamConfig) -> int:
    """Bytes of the room in which moments, and gradients if they are on the host, are beside their parameters."""
    times = 4 if stream.gradients == "device" else 6
    return times * min(PIECE_BYTES, job.adapter_bytes)


def host_components(job: Job, stream: StreamConfig) -> dict[str, int]:
    """Bytes of host memory, by component."""
    dimensions = job.dimensions
    travels = head_travels(job, stream)
    on_host = stream.embedding == "host"
    largest = max(rows * columns for layer in dimensions.layers for rows, columns in layer.linears.values())
    tables = dimensions.table_bytes
    if not dimensions.tied:
        tables += dimensions.matrix_bytes
    boundaries = -(-len(job.blocks) * job.together(stream) // 8) * 8
    return {
        "program": PROGRAM_BYTES,
        "base": sum(job.block_bytes),
        "head": dimensions.matrix_bytes if travels else 0,
        "embedding": tables if on_host else 0,
        "moments": 2 * job.adapter_bytes if stream.optimizer == "host" else 0,
        "gradients": job.adapter_bytes if stream.gradients == "host" else 0,
        "boundaries": boundaries * job.hidden_bytes if stream.boundaries == "host" else 0,
        "reading": 3 * 2 * BF16 * largest,
    }


PROGRAM_BYTES = 3_000_000_000
"""Python, torch and the driver in host memory, a few data rows included: an assumption."""


def head_travels(job: Job, stream: StreamConfig) -> bool:
    """Whether the head comes and goes: not where it would have its memory for itself, see `Vocabulary`."""
    something_moves = stream.resident != "all" and stream.resident < len(job.blocks)
    together = not job.dimensions.tied or stream.embedding == "host"
    return stream.head == "host" and something_moves and together


@cache
def restored_bytes(job: Job) -> int:
    """Bytes of the buffers to which blocks are taken out: one for all tensors that are alike; see `engine.outside`."""
    sizes: dict[tuple[int, str, tuple[int, ...]], int] = {}
    for block in job.blocks:
        for position, index in enumerate(block):
            layer = job.dimensions.layers[index]
            small = {name: (elements,) for name, elements in (*layer.vectors.items(), *layer.buffers.items())}
            for name, shape in (*layer.linears.items(), *small.items()):
                sizes[position, name, shape] = aligned(BF16 * math.prod(shape))
    return sum(sizes.values())


def activation_bytes(job: Job, index: int) -> int:
    """Bytes of what autograd keeps of one layer under bf16 autocast: stock keeps them for every layer.

    By token: both norms keep their input in float32; the adapters keep what goes into each lot of linear layers (twice
    the hidden states, the attention's output, the MLP's product); attention keeps queries, keys, values and output; the
    MLP keeps gate, up and activation. With dropout every adapted linear layer keeps an input and a mask of its own.
    """
    hidden, tokens, layer, ranks = job.dimensions.hidden, job.tokens, job.dimensions.layers[index], job.ranks_of(index)
    widest = max(rows for rows, _ in layer.linears.values())  # where the MLP's are called something else
    mlp = [rows for name, (rows, _) in layer.linears.items() if name.endswith(("up_proj", "gate_proj"))]
    inner = max(mlp, default=widest)
    floats = 2 * hidden * FLOAT32
    halves = (4 * hidden + 4 * layer.query + 2 * layer.key_value + 4 * inner + sum(ranks.values())) * BF16
    dropped = (BF16 + 1) * sum(layer.linears[name][1] for name in ranks) if job.dropout else 0
    return tokens * (floats + halves + dropped)


def masked_bytes(job: Job, index: int) -> int:
    """Bytes that autograd keeps of one layer beside them, where it is given a mask: that mask in bf16, and keys and
    values as wide as the queries. A single key head is counted so too, though repeating it takes no memory."""
    if not job.is_masked(index):
        return 0
    layer = job.dimensions.layers[index]
    return BF16 * (job.mask_elements + 2 * (layer.query - layer.key_value) * job.tokens)


def transient_bytes(layer: LayerDimensions, hidden: int, tokens: int) -> int:
    """Bytes that come and go while a layer is differentiated: gradients around the widest matrix, in bf16."""
    inner = max(rows for rows, _ in layer.linears.values())
    return tokens * (2 * inner + 2 * hidden) * BF16


def block_activation_bytes(job: Job, stream: StreamConfig) -> int:
    """Bytes that running one block again and differentiating it takes: of the recorded graphs, or of eager kernels."""
    if job.keeps_everything(stream):
        if not job.graphs:
            return 2 * job.hidden_bytes
        return 4 * job.hidden_bytes + max(sum(job.adapters[layer] for layer in block) for block in job.blocks)
    return _fullest_block(job, takes_out(job, stream))


@cache
def _fullest_block(job: Job, outside: bool) -> int:
    hidden = job.dimensions.hidden
    needed = []
    for block in job.blocks:
        layers = [job.dimensions.layers[i] for i in block]
        kept = sum(activation_bytes(job, i) + masked_bytes(job, i) for i in block)
        adapters = sum(job.adapters[i] for i in block)
        transient = max(transient_bytes(layer, hidden, job.tokens) for layer in layers)
        weights = max(BF16 * rows * columns for layer in layers for rows, columns in layer.linears.values())
        needed.append(kept + transient + (0 if outside else weights) + 2 * adapters)
    return max(needed) + 4 * job.hidden_bytes


def kept_bytes(job: Job, stream: StreamConfig) -> int:
    """Bytes of activations that resident blocks keep; with several micro-batches they are run again after all."""
    return sum(_kept_by_block(job)[block] for block in keeping_blocks(job, stream))


@cache
def _kept_by_block(job: Job) -> tuple[int, ...]:
    kept = []
    for block in job.blocks:
        total = job.hidden_bytes
        for index in block:
            total += activation_bytes(job, index) + masked_bytes(job, index)
        kept.append(total)
    return tuple(kept)


def loss_bytes(job: Job, stream: StreamConfig) -> int:
    """Bytes of logits and loss of one micro-batch: in bf16 the logits and their gradient; in float32 the logits, their
    log-softmax and its gradient, for all tokens or for a few at a time."""
    vocabulary = job.dimensions.vocabulary
    caps = 2 if job.dimensions.has_softcap else 0
    whole = (2 + caps) * BF16 * job.tokens * vocabulary
    if stream.loss_rows is None:
        return whole - BF16 * job.tokens * vocabulary + 3 * FLOAT32 * job.tokens * vocabulary
    rows = min(job.tokens, -(-stream.loss_rows // 16) * 16)
    return whole + 4 * FLOAT32 * rows * vocabulary
