"""Choosing where everything lives: the fastest run that fits.

Every choice is exact, so the only question is time. There are few of them: each of six things is on the device or on
the host, there are one to four slots, weights are restored once a visit or at each use, and resident blocks keep their
activations or don't. For each of these combinations as many blocks stay on the device as fit, so that more memory
doesn't make a plan slower; tests compare it with brute force.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from poros.config import StreamConfig
from poros.errors import BudgetError
from poros.plan.cards import Card
from poros.plan.graphs import MOST_GRAPHS, graphs_kept, may_keep
from poros.plan.job import Job
from poros.plan.memory import device_components, host_components
from poros.plan.seconds import Seconds, step_seconds

LOSS_ROWS = 64
"""Tokens whose loss is worked out at a time, where the loss is taken to pieces."""

MOST_SLOTS = 4

CHOICES: dict[str, tuple[Any, ...]] = {
    "embedding": ("device", "host"),
    "head": ("device", "host"),
    "optimizer": ("device", "host"),
    "gradients": ("device", "host"),
    "boundaries": ("device", "host"),
    "loss_rows": (None, LOSS_ROWS),
    "restore_once": (True, False),
    "recompute": (True, False),
    "slots": tuple(range(1, MOST_SLOTS + 1)),
}


@dataclass(frozen=True)
class Plan:
    """Where everything lives, and what that is predicted to cost. Bytes; seconds of an optimizer step.

    Attributes:
        stream: The placements, as the engine takes them.
        device: Component -> bytes of device memory, at the fullest moment of a step.
        host: Component -> bytes of host memory.
        seconds: Of a step.
        budget_bytes: What was to be kept to; None if it is only described.
        tokens: Of a micro-batch, for which it was made.
        together: Micro-batches that are on their way at a time.
        max_graphs: How many recorded graphs may be kept.
    """

    stream: StreamConfig
    device: Mapping[str, int]
    host: Mapping[str, int]
    seconds: Seconds
    budget_bytes: int | None = None
    tokens: int | None = None
    together: int = 1
    max_graphs: int = MOST_GRAPHS

    @property
    def device_bytes(self) -> int:
        """Device memory of the whole process."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Host memory of the whole process."""
        return sum(self.host.values())

    def summary(self) -> list[str]:
        """What a person wants to know of it, in a few lines."""
        usual = StreamConfig()
        away = [
            name
            for name in ("embedding", "head", "optimizer", "gradients", "boundaries")
            if getattr(self.stream, name) == "host"
        ]
        resident = "every block" if self.stream.resident == "all" else f"{self.stream.resident} blocks"
        kept = "" if self.stream.recompute == usual.recompute else ", which keep their activations"
        on_host = f"; on the host: {', '.join(away)}" if away else ""
        budget = "" if self.budget_bytes is None else f" of {self.budget_bytes / 1e9:.1f}"
        return [
            f"plan: {self.device_bytes / 1e9:.1f}{budget} GB of GPU memory, {self.host_bytes / 1e9:.1f} GB of host "
            f"memory, {self.seconds.step:.2f} s a step, bound by {self.seconds.bound_by}",
            f"plan: {self.stream.slots} slots, {resident} on the GPU for good{kept}{on_host}",
        ]

    def to_json(self) -> dict[str, Any]:
        """Under the names of a receipt. GB = 1e9 bytes."""
        return {
            "vram_budget_gb": None if self.budget_bytes is None else self.budget_bytes / 1e9,
            "predicted_vram_gb": self.device_bytes / 1e9,
            "predicted_host_gb": self.host_bytes / 1e9,
            "predicted_s_step": self.seconds.step,
            "predicted_copied_gb": self.seconds.copied_bytes / 1e9,
            "bound_by": self.seconds.bound_by,
            "components": {name: size / 1e9 for name, size in self.device.items() if size},
            "host_components": {name: size / 1e9 for name, size in self.host.items() if size},
            "placements": self.stream.model_dump(mode="json"),
        }


def describe(job: Job, stream: StreamConfig, card: Card, budget_bytes: int | None = None) -> Plan:
    """What given placements cost."""
    return Plan(
        stream,
        device_components(job, stream, card),
        host_components(job, stream),
        step_seconds(job, stream, card),
        budget_bytes,
        job.tokens,
        job.together(stream),
        graphs_kept(job, stream),
    )


def candidates(job: Job, base: StreamConfig, free: Collection[str] | None = None) -> Iterator[StreamConfig]:
    """Every combination of placements but for the number of resident blocks, which is none.

    Args:
        job: What is trained.
        base: Holds the values of settings that aren't free.
        free: Settings that may be chosen; all by default.
    """
    names = [name for name in CHOICES if free is None or name in free]
    for values in itertools.product(*(CHOICES[name] for name in names)):
        chosen = dict(zip(names, values, strict=True))
        if not chosen.get("restore_once", True) and not job.graphs:
            continue  # there is no such thing
        if not chosen.get("restore_once", True) and job.micro_batches > 1 and not job.dimensions.shares:
            continue  # a visit that runs a block several times restores its weights once in any case
        whole = {"optimizer": base.optimizer, "gradients": base.gradients, **chosen}
        if whole["gradients"] == "host" and whole["optimizer"] == "device":
            continue  # only that optimizer knows where they are
        if job.dimensions.tied and {chosen.get("embedding"), chosen.get("head")} == {"device", "host"}:
            continue  # one matrix lives in one place
        yield base.model_copy(update={**chosen, "resident": 0})


def most_resident(job: Job, fits: Callable[[int], bool]) -> int | None:
    """A number of resident blocks that fits while one more doesn't, or None if not even none does."""
    if not fits(0):
        return None
    low, high = 0, len(job.blocks)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


Cost = tuple[float, float, int, int]


def _cost(job: Job, stream: StreamConfig, card: Card) -> Cost:
    """By what plans are compared: time, then the GPU's part of it, then how little is unusual, then memory."""
    usual = StreamConfig()
    unusual = sum(getattr(stream, name) != getattr(usual, name) for name in CHOICES if name != "recompute")
    seconds = step_seconds(job, stream, card)
    return seconds.step, seconds.computing, unusual, sum(device_components(job, stream, card).values())


_NEAR = 6
"""Numbers of resident blocks that are looked at on either side of the largest that was found to fit."""


def best_plan(
    job: Job,
    card: Card,
    budget_bytes: int,
    host_bytes: int | None = None,
    base: StreamConfig | None = None,
    fixed: frozenset[str] = frozenset(),
) -> Plan | None:
    """The fastest plan within a budget. None if nothing fits.

    Of equally fast ones it is the one that keeps the GPU busy least: where a step waits for Python, a faster host will
    show it. Then the one that differs least from the usual settings, and then the one that takes least.

    Args:
        job: What is trained.
        card: On which card.
        budget_bytes: Device memory for the whole process.
        host_bytes: Host memory for the whole process; unlimited by default.
        base: Holds the values of settings in `fixed`.
        fixed: Settings that aren't to be chosen.
    """
    base = base or StreamConfig()
    best: tuple[Cost, StreamConfig] | None = None
    free = [name for name in CHOICES if name not in fixed]
    # Where every block stays and keeps its activations, micro-batches go one by one, which may take longer.
    all_is_fastest = job.micro_batches == 1 or "recompute" not in fixed or base.recompute

    def fits(stream: StreamConfig) -> bool:
        if "recompute" in free and not may_keep(job, stream):
            return False
        if sum(device_components(job, stream, card).values()) > budget_bytes:
            return False
        return host_bytes is None or sum(host_components(job, stream).values()) <= host_bytes

    def fits_with(candidate: StreamConfig, count: int) -> bool:
        return fits(candidate.model_copy(update={"resident": count}))

    for candidate in candidates(job, base, free):
        if "resident" in fixed:
            counts: list[int | Literal["all"]] = [base.resident]
        else:
            everything = candidate.model_copy(update={"resident": "all"})
            if all_is_fastest and best is not None and step_seconds(job, everything, card).step > best[0][0]:
                continue  # no number of resident blocks makes it the fastest
            found = most_resident(job, partial(fits_with, candidate)) or 0
            # Blocks of several sizes: a larger number of other ones may take less. And where every block stays, neither
            # slots nor restored weights are needed, so all may fit where one fewer doesn't.
            reach = 0 if len(set(job.block_bytes)) == 1 and all_is_fastest else _NEAR
            counts = [*range(max(0, found - reach), min(found + reach, len(job.blocks)) + 1), "all"]
        for count in counts:
            stream = candidate.model_copy(update={"resident": count})
            if not fits(stream):
                continue
            cost = _cost(job, stream, card)
            if best is None or cost < best[0]:
                best = (cost, stream)
    return None if best is None else describe(job, best[1], card, budget_bytes)


def smallest_plan(
    job: Job,
    card: Card,
    base: StreamConfig | None = None,
    fixed: frozenset[str] = frozenset(),
    host_bytes: int | None = None,
) -> Plan:
    """The plan that takes the least device memory; of equally small ones the fastest.

    Args:
        job: What is trained.
        card: On which card.
        base, fixed: Settings that hold, and their names.
        host_bytes: Host memory for the whole process; unlimited by default.

    Raises:
        BudgetError: every plan needs more host memory.
    """
    free = [name for name in CHOICES if name not in fixed]

    def cost(stream: StreamConfig) -> tuple[int, float]:
        return sum(device_components(job, stream, card).values()), step_seconds(job, stream, card).step

    base = base or StreamConfig()
    # Where every block stays, neither slots nor restored weights are needed: with few blocks that may be the least.
    counts = (base.resident,) if "resident" in fixed else (0, "all")
    streams = [c.model_copy(update={"resident": n}) for c in candidates(job, base, free) for n in counts]
    if "recompute" in free:
        streams = [stream for stream in streams if may_keep(job, stream)]
    if host_bytes is not None:
        needs = [sum(host_components(job, stream).values()) for stream in streams]
        streams = [stream for stream, need in zip(streams, needs, strict=True) if need <= host_bytes]
        if not streams:
            raise BudgetError(
                f"the base and what goes with it need about {size_text(min(needs))} of host memory, "
                f"and {size_text(host_bytes)} may be taken",
                "close other programs, or take a smaller model; what stays on the GPU passes through host memory, too",
            )
    return describe(job, min(streams, key=cost), card)


def curve(
    job: Job,
    card: Card,
    points: int = 28,
    base: StreamConfig | None = None,
    fixed: frozenset[str] = frozenset(),
    host_bytes: int | None = None,
) -> list[Plan]:
    """The fastest plan for each of a row of budgets, from the smallest that works to one at which nothing travels.

    Args:
        job: What is trained.
        card: On which card.
        points: How many budgets.
        base, fixed: Settings that hold, and their names.
        host_bytes: Host memory for the whole process; unlimited by default.
    """
    base = base or StreamConfig()
    smallest = smallest_plan(job, card, base, fixed, host_bytes).device_bytes
    wanted = {"resident": "all", "recompute": job.micro_batches > 1}
    everything = base.model_copy(update={name: value for name, value in wanted.items() if name not in fixed})
    largest = max(smallest, sum(device_components(job, everything, card).values()))
    budgets = [smallest + (largest - smallest) * step // (points - 1) for step in range(points)]
    plans = (best_plan(job, card, max(smallest, budget), host_bytes, base, fixed) for budget in budgets)
    return [plan for plan in plans if plan is not None]


def size_text(nbytes: int) -> str:
    """A number of bytes for people. GB = 1e9 bytes."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 10**9 else f"{nbytes / 1e6:.1f} MB"
