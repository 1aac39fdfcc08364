"""Times stock resident QLoRA and Poros at a published shape with random weights, in one process, one receipt a cell.

    python validation/measure.py qwen2.5-32b --cells resident resident@8 poros poros@8 poros:resident=all,recompute=false
    python validation/measure.py qwen2.5-32b --cells resident poros:vram=least poros:vram=11GB poros:vram=24GB

A cell is `resident` (stock) or `poros`, with settings of the stream behind a colon, the micro-batches per optimizer step
behind an `@` and the tokens of a micro-batch behind a `%`. `vram=least` is the smallest budget that works. Each poros
cell's receipt holds what was predicted beside what was measured; a run that breaks its budget is measured anew without a
limit, and its receipt says `limited: "broken"`. It stands in until poros-bench has its matrix. All cells train the same
bytes: the model is built from the same seed. Seconds are medians over synchronised steps after the warm-up; `gpu_s_per_step` is the sum of
kernel times of one step from the profiler, copies from the host left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peaks
import torch
import yaml
from peft import get_peft_model
from torch.profiler import ProfilerActivity, profile

import poros
from poros.config import LoraPart, StreamConfig, hash_of
from poros.engine.adapters import lora_config
from poros.engine.attach import attach
from poros.engine.attention import attention_path
from poros.engine.budget import card_of, enforce, lift, planned, process_peak_bytes
from poros.engine.engine import engine_of
from poros.engine.load import default_device
from poros.engine.measured import allocated_components
from poros.engine.optimizer import adamw_for
from poros.parity.resident import random_resident
from poros.parity.source import find_published
from poros.parity.stock import adapters_of, clip_gradients, make_adapters_count, one_by_one
from poros.plan.fit import dimensions_of, make_job
from poros.plan.job import Job
from poros.plan.search import describe
from poros.plugins import load_plugins
from poros.provenance import host_peak_bytes, provenance
from poros.receipt import DTYPE_POLICY, Receipt
from poros.stream.schedule import Phase


class Steps:
    """Optimizer steps on random tokens, the same ones for every cell.

    Args:
        model: A peft model, stock or streamed.
        accumulation: Micro-batches per step.
        tokens: Per micro-batch.
        accumulate: Runs the micro-batches of a step.
    """

    def __init__(self, model: Any, accumulation: int, tokens: int, accumulate: Callable[..., Any]) -> None:
        self.model, self.accumulation, self.tokens, self.accumulate = model, accumulation, tokens, accumulate
        self.device = default_device()
        self.adapters = list(adapters_of(model).values())
        make_optimizer = torch.optim.AdamW if accumulate is one_by_one else adamw_for(engine_of(model))
        self.optimizer = make_optimizer(self.adapters, lr=1e-4, fused=self.device.type == "cuda")
        self.generator = torch.Generator().manual_seed(3)
        self.vocab_size = model.config.get_text_config().vocab_size
        model.train()

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _micro_step(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        (loss / self.accumulation).backward()
        return loss.detach()

    def __call__(self) -> tuple[float, float]:
        """One step: seconds and loss."""
        rows = torch.randint(0, self.vocab_size, (self.accumulation, 1, self.tokens), generator=self.generator)
        todo = [partial(self._micro_step, row) for row in rows.to(self.device)]
        self.synchronise()
        began = time.perf_counter()
        losses = self.accumulate(todo)
        clip_gradients(self.optimizer, self.adapters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.synchronise()
        return time.perf_counter() - began, float(sum(losses)) / self.accumulation


def measure(steps: Steps, count: int, warm_up: int, engine: Any, trace_to: Path | None) -> dict[str, Any]:
    """Train for some steps; the measured fields of a receipt."""
    on_gpu = steps.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    first = [steps() for _ in range(warm_up)]
    before = engine.streamer.measured() if engine else None
    runs = [steps() for _ in range(count)]
    seconds = [run[0] for run in runs]
    measured: dict[str, Any] = {
        "s_step_median": statistics.median(seconds),
        "s_step_std": statistics.stdev(seconds),
        "passes": [statistics.median(seconds)],
        "steps": count,
        "losses": [run[1] for run in (*first, *runs)],
    }
    if engine:
        traffic = engine.streamer.measured().since(before)
        measured |= traffic.per_step(count, measured["s_step_median"], engine.streamer.link_gb_s())
        steps()  # the link was measured over the slots
    if on_gpu:
        measured["vram_allocated_gb"] = torch.cuda.max_memory_allocated() / 1e9
        measured["vram_reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
        whole = process_peak_bytes(steps.device)
        measured["vram_device_gb"] = None if whole is None else whole / 1e9
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            steps()
        kernels = [event for event in trace.key_averages() if "Memcpy HtoD" not in event.key]
        measured["gpu_s_per_step"] = sum(event.self_device_time_total for event in kernels) / 1e6
        print(f"  {sum(event.count for event in kernels)} kernels; the longest:")
        for event in sorted(kernels, key=lambda event: -event.self_device_time_total)[:16]:
            print(f"    {event.self_device_time_total / 1e3:8.2f} ms {event.count:6d} x {event.key[:90]}")
        if trace_to is not None:
            write_spans(trace, trace_to)
    return measured


def memory_by_phase(steps: Steps, engine: Any) -> dict[str, Any]:
    """Peaks of one step in GB, as torch counts them: in the forward pass, at the loss, in the backward pass, in the update;
    and what lies in the memory of recorded graphs."""
    peaks: dict[str, float] = {}
    marks = {"seen": "forward"}

    def cut(phase: str) -> None:
        if marks["seen"] != phase:
            torch.cuda.synchronize()
            peaks[marks["seen"]] = torch.cuda.max_memory_allocated() / 1e9
            torch.cuda.reset_peak_memory_stats()
            marks["seen"] = phase

    visiting, epilogue, update = engine.executor.visiting, engine.epilogue, steps.optimizer.step

    def visiting_seen(block: int, phase: Phase) -> Any:
        cut("forward" if phase is Phase.FORWARD else "backward")
        return visiting(block, phase)

    def epilogue_seen(*args: Any) -> Any:
        cut("loss")
        return epilogue(*args)

    def update_seen(*args: Any, **kwargs: Any) -> Any:
        cut("update")
        return update(*args, **kwargs)

    peaks["before"] = torch.cuda.memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    engine.executor.visiting, engine.epilogue, steps.optimizer.step = visiting_seen, epilogue_seen, update_seen
    try:
        steps()
        cut("after")
    finally:
        engine.executor.visiting, engine.epilogue, steps.optimizer.step = visiting, epilogue, update
    pools = pool_sizes()
    torch.cuda.empty_cache()
    after = {f"{name}, cache emptied": size for name, size in pool_sizes().items()}
    return {"measured_peaks": peaks, "measured_pools": pools | after}


def pool_sizes() -> dict[str, float]:
    """GB reserved and allocated, in the memory of recorded graphs and in the rest."""
    pools: dict[str, float] = {}
    for segment in torch.cuda.memory_snapshot():
        kind = "graphs" if tuple(segment["segment_pool_id"]) != (0, 0) else "rest"
        pools[f"{kind} reserved"] = pools.get(f"{kind} reserved", 0.0) + segment["total_size"] / 1e9
        pools[f"{kind} allocated"] = pools.get(f"{kind} allocated", 0.0) + segment["allocated_size"] / 1e9
    return pools


def write_spans(trace: Any, path: Path) -> None:
    """Write when the copy engine and the computation were busy in a traced step: lists of [begin, end] in milliseconds."""
    copies, kernels = [], []
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            span = (event.time_range.start / 1e3, event.time_range.end / 1e3)
            (copies if "Memcpy HtoD" in event.name else kernels).append(span)
    start = min(begin for begin, _ in (*copies, *kernels))

    def merged(spans: list[tuple[float, float]], gap: float) -> list[list[float]]:
        found: list[list[float]] = []
        for begin, end in sorted(spans):
            if found and begin - start - found[-1][1] < gap:
                found[-1][1] = max(found[-1][1], end - start)
            else:
                found.append([begin - start, end - start])
        return [[round(begin, 3), round(end, 3)] for begin, end in found]

    path.write_text(json.dumps({"copies": merged(copies, 0.0), "compute": merged(kernels, 0.02)}))


def main() -> None:
    """Measure cells at one shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape")
    parser.add_argument("--cells", nargs="+", default=["resident", "poros"])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--no-limit", action="store_true", help="let a planned run take what it wants")
    parser.add_argument("--peaks", action="store_true", help="say who holds the memory at the fullest moment")
    parser.add_argument("--trace", type=Path, help="where the spans of a step of the first poros cell go")
    parser.add_argument("--out", type=Path, default=Path("cells.jsonl"))
    arguments = parser.parse_args()
    plugins = load_plugins()
    found = find_published(arguments.shape, plugins)
    if found is None:
        parser.error(f"no published shape is called {arguments.shape}")
    architecture, shape = found
    part = LoraPart()

    def job_of(stream: StreamConfig, accumulation: int, tokens: int) -> Job:
        dimensions = dimensions_of(architecture, shape.config)
        dimensions = dataclasses.replace(dimensions, layers=dimensions.layers[: arguments.layers])
        return make_job(dimensions, part, tokens, accumulation, stream, default_device().type == "cuda")

    def build(stream: dict[str, Any] | None, accumulation: int, tokens: int) -> Any:
        gc.collect()
        if torch.cuda.is_available():
            torch._C._cuda_clearCublasWorkspaces()  # 0.13 GB that every later cell uses as well
            torch.cuda.empty_cache()
            if torch.cuda.memory_allocated() > 1e8:
                raise RuntimeError(f"{torch.cuda.memory_allocated() / 1e9:.1f} GB of the last cell are still there")
        base = random_resident(architecture, shape.config, default_device(), arguments.layers)
        torch.manual_seed(0)
        model = get_peft_model(base, lora_config(part))
        make_adapters_count(model, 0)
        if stream is not None:
            began = time.perf_counter()
            plan = planned(
                StreamConfig(**stream),
                architecture,
                shape.config,
                part,
                tokens=tokens,
                micro_batches=accumulation,
                num_layers=arguments.layers,
                device=default_device(),
            )
            attach(model, plugins=plugins, plan=plan, **({} if plan else stream))
            if plan is not None:
                print("  " + "\n  ".join(plan.summary()))
            print(f"  attached in {time.perf_counter() - began:.1f} s ({engine_of(model).store.tier})")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return model

    model, setting = None, ""
    with attention_path("fused"):
        for cell in arguments.cells:
            rest, _, length = cell.partition("%")
            name, _, micro = rest.partition("@")
            accumulation, tokens = int(micro or 1), int(length or arguments.tokens)
            method, _, options = name.partition(":")
            stream = yaml.safe_load("{" + options.replace("=", ": ") + "}") if method == "poros" else None
            # A plan is for one amount of work.
            wanted = f"{rest}%{length}" if stream is not None and "vram" in stream else name
            if model is None or wanted != setting:
                if model is not None and setting.startswith("poros"):
                    poros.close(model)
                model, setting = None, wanted
                model = build(stream, accumulation, tokens)
                initial = [parameter.detach().to("cpu", copy=True) for parameter in adapters_of(model).values()]
            with torch.no_grad():
                for parameter, value in zip(adapters_of(model).values(), initial, strict=True):
                    parameter.copy_(value)
                    parameter.grad = None
            engine = engine_of(model) if stream is not None else None
            limited: bool | str = engine is not None and engine.plan is not None and not arguments.no_limit
            if limited:
                enforce(engine.plan, default_device())
            if arguments.peaks and engine is not None:
                peaks.start()
            steps = Steps(model, accumulation, tokens, engine.accumulate if engine else one_by_one)
            if arguments.peaks and engine is not None:
                steps()
                peaks.report(16)
            run = partial(measure, steps, arguments.steps, arguments.warm_up, engine, arguments.trace if engine else None)
            try:
                measured = run()
            except torch.OutOfMemoryError as error:
                if not limited:
                    raise
                print(f"  over its budget: {str(error).splitlines()[0]}")
                limited = "broken"
                lift(default_device())
                for parameter in adapters_of(model).values():
                    parameter.grad = None
                measured = run()
            arguments.trace = None if engine else arguments.trace
            if engine is not None:
                found_there = allocated_components(model, steps.optimizer)
                more = memory_by_phase(steps, engine) if steps.device.type == "cuda" else {}
                lift(steps.device)  # measuring the link takes memory of its own
                job = job_of(engine.config, accumulation, tokens)
                prediction = engine.plan or describe(job, engine.config, card_of(steps.device))
                measured["plan"] = {
                    **prediction.to_json(),
                    "measured_components": {one: size / 1e9 for one, size in found_there.items() if size},
                    **more,
                }
                print(f"  predicted {prediction.device_bytes / 1e9:.2f} GB, {prediction.seconds.step:.4f} s")
                print(f"  {json.dumps({key: value for key, value in measured['plan'].items() if 'component' in key or 'measured' in key})}")
            config = {
                "model": f"{shape.id} (random weights)",
                "layers": arguments.layers,
                "tokens": tokens,
                "batch": 1,
                "accumulation": accumulation,
                "lora": part.model_dump(mode="json"),
                "attention": "fused",
                "stream": engine.config.model_dump(mode="json") if engine else None,
                "executor": type(engine.executor).__name__ if engine else None,
                "limited": limited,
                "optimizer": "AdamW",
                "warm_up": arguments.warm_up,
            }
            receipt = Receipt(
                kind="cell",
                case=str(config["model"]),
                method=name,
                model_type=model.config.model_type,
                config=config,
                config_hash=hash_of(config),
                tokens_per_step=tokens * accumulation,
                trainable_parameters=sum(tensor.numel() for tensor in initial),
                dtype_policy=DTYPE_POLICY,
                host_peak_gb=host_peak_bytes() / 1e9,
                provenance=provenance(),
                **measured,
            )
            receipt.append(arguments.out)
            shown = {
                key: round(value, 4)
                for key in ("s_step_median", "gpu_s_per_step", "vram_allocated_gb", "vram_reserved_gb", "vram_device_gb")
                + ("copied_gb_per_step", "link_gb_s", "link_share", "stall_s_per_step")
                if (value := measured.get(key)) is not None
            }
            if engine is not None and hasattr(engine.executor, "record_seconds"):
                shown["recorded_s"] = round(engine.executor.record_seconds, 1)
            print(f"{cell}: {shown}", flush=True)
            del steps, run, engine  # the next cell needs the memory


if __name__ == "__main__":
    main()
