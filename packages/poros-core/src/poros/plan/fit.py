"""From a budget to a plan, or to a refusal that says what would help."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace

from poros.architecture import Architecture
from poros.config import LoraPart, StreamConfig
from poros.dimensions import ModelDimensions, Values, text_values
from poros.errors import BudgetError, UnsupportedError
from poros.plan.adapters import ranks_of
from poros.plan.cards import Card
from poros.plan.graphs import LENGTHS_APART
from poros.plan.job import Job
from poros.plan.memory import device_components
from poros.plan.search import CHOICES, Plan, best_plan, size_text, smallest_plan


def dimensions_of(architecture: Architecture, config: Values) -> ModelDimensions:
    """The sizes of a model's tensors from the values of its `config.json`.

    Raises:
        UnsupportedError: the family can't be planned or refuses such a checkpoint by name, or the config lacks a value.
    """
    plain = SimpleNamespace(**text_values(config))
    try:
        refusal = architecture.refusal(plain)
    except AttributeError as error:
        if error.obj is not plain:
            raise
        # A config of transformers would have the value's default.
        raise UnsupportedError(
            f"config.json has no {error.name}, by which the family {architecture.family} tells what it refuses",
            f"add {error.name} to it; the family's predicate should read getattr(config, {error.name!r}, its default)",
        ) from error
    if refusal is not None:
        raise UnsupportedError(f"{refusal.name} is not supported ({config.get('model_type')})", refusal.hint)
    if architecture.dimensions is None:
        raise UnsupportedError(
            f"the family {architecture.family} has no `dimensions`, so its models can't be planned",
            "leave vram out and choose slots and placements yourself",
        )
    try:
        found = architecture.dimensions(text_values(config))
    except KeyError as error:
        raise UnsupportedError(f"config.json has no {error.args[0]}, without which nothing can be planned") from error
    return dataclasses.replace(found, path=f"{architecture.decoder}.{architecture.layers}")


def make_job(
    dimensions: ModelDimensions,
    lora: LoraPart,
    tokens: int,
    micro_batches: int,
    stream: StreamConfig,
    graphs: bool,
    rows: int = 1,
    padded: bool = False,
    shapes: int | None = None,
    towers: int = 0,
) -> Job:
    """The job that a run's settings describe.

    Args:
        dimensions: Of the model.
        lora: The adapters.
        tokens: Of a micro-batch, padding included.
        micro_batches: Per optimizer step.
        stream: For the block size and the executor.
        graphs: Whether CUDA graphs can be recorded.
        rows: Of a micro-batch.
        padded: Whether rows may be padded.
        shapes: Batch shapes that micro-batches may have. By default one, and with padding all multiples of 8 tokens,
            with a mask and without.
        towers: Bytes on the device of parts that text never reaches.
    """
    if shapes is None:
        shapes = 2 * -(-tokens // rows // LENGTHS_APART) if padded else 1
    return Job(
        dimensions=dimensions,
        tokens=tokens,
        rows=rows,
        padded=padded,
        shapes=shapes,
        towers=towers,
        dropout=lora.dropout > 0,
        micro_batches=micro_batches,
        rank=lora.rank,
        ranks=ranks_of(lora, dimensions),
        block_size=stream.block_size,
        graphs=graphs and stream.executor != "eager" and not dimensions.shares,
    )


def fixed_settings(stream: StreamConfig) -> frozenset[str]:
    """Settings that the user has made, which a plan leaves alone."""
    return frozenset(stream.model_fields_set) & {*CHOICES, "resident"}


def fit(
    job: Job,
    card: Card,
    budget_bytes: int,
    stream: StreamConfig,
    host_bytes: int | None = None,
    fixed: frozenset[str] = frozenset(),
) -> Plan:
    """The fastest plan that fits.

    Args:
        job: What is trained.
        card: On which card.
        budget_bytes: GPU memory for the whole process.
        stream: Settings that were made hold; the others are chosen.
        host_bytes: Host memory for the whole process; unlimited by default.
        fixed: Further settings that hold.

    Raises:
        BudgetError: nothing fits; says how much would be needed within that host memory, and what helps most.
    """
    fixed |= fixed_settings(stream)
    plan = best_plan(job, card, budget_bytes, host_bytes, stream, fixed)
    if plan is not None:
        return plan
    smallest = smallest_plan(job, card, stream, fixed, host_bytes)
    loose = smallest_plan(job, card, stream, fixed)
    within, ideas = "", _knobs(job, card, smallest, stream, fixed, host_bytes)
    if host_bytes is not None and loose.device_bytes < smallest.device_bytes:
        within = f" beside {size_text(host_bytes)} of host memory"
        if loose.device_bytes <= budget_bytes:
            ideas = [f"{size_text(loose.host_bytes)} of host memory: {size_text(loose.device_bytes)}", *ideas]
    raise BudgetError(
        f"{job.tokens} tokens at a time need at least {size_text(smallest.device_bytes)} of GPU memory{within}, "
        f"and {size_text(budget_bytes)} may be taken",
        "; ".join(ideas) or "a card with more memory",
    )


def _knobs(
    job: Job, card: Card, smallest: Plan, stream: StreamConfig, fixed: frozenset[str], host_bytes: int | None
) -> list[str]:
    """The two changes that lower the need most, each with what would then be needed."""
    ideas: Mapping[str, Job] = {
        "rows of half the length": dataclasses.replace(job, tokens=max(1, job.tokens // 2)),
        "one row at a time": dataclasses.replace(job, tokens=job.tokens // job.rows, rows=1),
        f"rank {job.rank // 2}": job.of_rank(job.rank // 2) if job.rank > 1 else job,
        "blocks of one layer": dataclasses.replace(job, block_size=1),
        "no accumulation": dataclasses.replace(job, micro_batches=1),
    }
    needs = {}
    for idea, other in ideas.items():
        settings = stream.model_copy(update={"block_size": other.block_size})
        needs[idea] = smallest_plan(other, card, settings, fixed, host_bytes).device_bytes
    if fixed:
        loose = smallest_plan(job, card, StreamConfig(block_size=job.block_size), host_bytes=host_bytes).device_bytes
        needs[f"leaving {', '.join(sorted(fixed))} to the plan"] = loose
    helpful = sorted((need, idea) for idea, need in needs.items() if need < 0.995 * smallest.device_bytes)
    return [f"{idea}: {size_text(need)}" for need, idea in helpful[:2]]


def stock_bytes(job: Job, card: Card) -> int:
    """GPU memory of the ordinary resident run, estimated in the same way."""
    eager = dataclasses.replace(job, graphs=False, micro_batches=1, block_size=1)
    parts = dict(device_components(eager, StreamConfig(resident="all", recompute=False, restore_once=False), card))
    # Autograd keeps the activations of one layer after the other, so there are no boundaries beside them, and memory is
    # given out in the order in which it is taken: next to nothing is lost in between.
    parts |= {"allocator": 0, "boundaries": 0}
    return sum(parts.values())
