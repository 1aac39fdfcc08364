"""The gate over hundreds of steps: stock and streamed side by side, compared on the device after every step.

The ordinary gate keeps everything a run has recorded, a gigabyte a step at 32B. Here both models are on the device at a
time, train in turns, each with its own random state, and nothing is kept once it has been compared. Stock is not run a
second time: a streamed run that equals it in every tensor of every step shows that it repeats itself as well. Where one
doesn't, the ordinary gate says which of the two reasons it has.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from poros.config import AttentionPath, StreamConfig, hash_of
from poros.engine.attention import attention_path
from poros.engine.engine import engine_of
from poros.engine.executor import rng_state, set_rng_state
from poros.engine.load import default_device
from poros.engine.measured import plan_record
from poros.engine.optimizer import adamw_for
from poros.engine.parts import DecoderParts
from poros.parity.fit import cut_to_fit
from poros.parity.gate import Announce, CheckResult, Verdict, corrupt, executor_used
from poros.parity.source import Setting, find_source, planned_setting
from poros.parity.stock import (
    Accumulate,
    MakeOptimizer,
    Work,
    adapters_of,
    make_adapters_count,
    make_batches,
    one_by_one,
    training_steps,
)
from poros.parity.surfaces import SURFACES, Comparison, Difference, Trace, compare
from poros.plugins import Plugins, load_plugins

if TYPE_CHECKING:
    from peft import LoraConfig

CONTROL_SURFACES_OF_A_STEP = ("loss", "gradients", "gradient_norm", "adapters")


class _Arm:
    """One of the two runs, with the random state that is its own.

    Attributes:
        seconds: Of each step.
    """

    def __init__(self, steps: Iterator[Trace], device: torch.device) -> None:
        self._steps = steps
        self._device = device
        self._states: tuple[torch.Tensor, torch.Tensor] | None = None
        self.seconds: list[float] = []

    def step(self) -> Trace:
        if self._states is not None:
            torch.set_rng_state(self._states[0])
            set_rng_state(self._states[1], self._device)
        began = time.perf_counter()
        trace = next(self._steps)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds.append(time.perf_counter() - began)
        self._states = torch.get_rng_state(), rng_state(self._device)
        return trace


def check_in_lockstep(
    model: str,
    lora: LoraConfig,
    work: Work,
    *,
    stream: StreamConfig | None = None,
    attention: AttentionPath = "fused",
    revision: str | None = None,
    layers: int | None = None,
    device: torch.device | None = None,
    plugins: Plugins | None = None,
    announce: Announce = lambda what, done, total: None,
) -> CheckResult:
    """Run the gate with both models on the device at a time; arguments and errors as for `poros.parity.gate.check`."""
    stream = stream or StreamConfig()
    where = device or default_device()
    with attention_path(attention), ExitStack() as cleanup:
        announce("preparing the models", 0, work.steps)
        setting = Setting(lora, work.seed, stream, where, plugins or load_plugins(), layers)
        setting = cut_to_fit(model, revision, setting, work, beside=True)
        setting = planned_setting(model, revision, setting, work)
        source = find_source(model, revision, setting)
        models = source.stock(), source.streamed_beside()
        engine = engine_of(models[1])
        cleanup.callback(engine.close)
        for one in models:
            make_adapters_count(one, work.seed)
        accumulators: tuple[Accumulate, Accumulate] = (one_by_one, engine.accumulate)
        optimizers: tuple[MakeOptimizer, MakeOptimizer] = (torch.optim.AdamW, adamw_for(engine))
        arms = [
            _Arm(
                training_steps(
                    one,
                    DecoderParts.of(one, source.architecture).layers,
                    work,
                    where,
                    accumulate,
                    where,
                    control=True,
                    make_optimizer=optimizer,
                ),
                where,
            )
            for one, accumulate, optimizer in zip(models, accumulators, optimizers, strict=True)
        ]
        surfaces: dict[str, bool | None] = dict.fromkeys(SURFACES)
        compared, losses = 0, []
        difference: Difference | None = None
        before = engine.streamer.measured()
        for done in range(work.steps):
            announce("in lockstep", done, work.steps)
            one, other = (arm.step() for arm in arms)
            found = compare(one, other, engine.blocks, [name for name in SURFACES if one.surface(name)])
            for name, equal in found.surfaces.items():
                if equal is not None:
                    surfaces[name] = equal and surfaces[name] is not False
            compared += found.compared
            losses += [float(loss) for loss in one.surface("loss").values()]
            difference = difference or found.difference
            del one, other
        announce("in lockstep", work.steps, work.steps)
        traffic = engine.streamer.measured().since(before)
        corrupted = len(engine.blocks) // 2
        corrupt(engine, corrupted)
        one, other = (arm.step() for arm in arms)
        control = compare(one, other, engine.blocks, CONTROL_SURFACES_OF_A_STEP)
        link = engine.streamer.link_gb_s()
        verdict: Verdict = "identical" if all(surfaces.values()) else "different"
        if verdict == "identical" and (control.difference is None or control.first_block != corrupted):
            verdict = "control arm not caught"
        return CheckResult(
            verdict=verdict,
            surfaces=surfaces,
            stock=None,
            streamed=Comparison(surfaces, compared, difference, None),
            control=control.difference,
            control_block=corrupted,
            control_found=control.first_block,
            seconds={
                name: _median(arm.seconds[1 : work.steps] or arm.seconds)
                for name, arm in zip(("stock", "streamed"), arms, strict=True)
            },
            trainable=sum(parameter.numel() for parameter in adapters_of(models[1]).values()),
            work=work,
            attention=attention,
            device=str(where),
            model=source.name,
            model_type=str(models[0].config.model_type),
            traffic=traffic,
            link_gb_s=link,
            executor=executor_used(engine, engine.config),
            stream=engine.config,
            plan=plan_record(models[1]),
            data_hash=hash_of(
                [
                    batch["input_ids"].tolist()
                    for batch in make_batches(work, int(models[0].config.get_text_config().vocab_size))
                ]
            ),
            losses=losses,
        )


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
