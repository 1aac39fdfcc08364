"""Times stock resident QLoRA and Poros at a published shape with random weights, in one process, one receipt a cell.

    python validation/measure.py qwen2.5-32b --cells resident resident@8 poros poros@8 poros:resident=all,recompute=false

A cell is `resident` (stock) or `poros`, with settings of the stream behind a colon and the micro-batches per optimizer
step behind an `@`. It stands in until poros-bench has its matrix. All cells train the same bytes: the model is built from
the same seed. Seconds are medians over synchronised steps after the warm-up; `gpu_s_per_step` is the sum of
kernel times of one step from the profiler, copies from the host left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import get_peft_model
from torch.profiler import ProfilerActivity, profile

import poros
from poros.config import LoraPart, hash_of
from poros.engine.adapters import lora_config
from poros.engine.attach import attach
from poros.engine.engine import engine_of
from poros.engine.attention import attention_path
from poros.engine.load import default_device
from poros.parity.resident import random_resident
from poros.parity.source import find_published
from poros.parity.stock import adapters_of, make_adapters_count, one_by_one
from poros.plugins import load_plugins
from poros.provenance import host_peak_bytes, provenance
from poros.receipt import DTYPE_POLICY, Receipt

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
        self.optimizer = torch.optim.AdamW(self.adapters, lr=1e-4, fused=self.device.type == "cuda")
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
        torch.nn.utils.clip_grad_norm_(self.adapters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.synchronise()
        return time.perf_counter() - began, float(sum(losses)) / self.accumulation


def measure(steps: Steps, count: int, warm_up: int, engine: Any, trace_to: Path | None) -> dict[str, Any]:
    """Train for some steps; the measured fields of a receipt."""
    on_gpu = steps.device.type == "cuda"
    if on_gpu:
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
    parser.add_argument("--trace", type=Path, help="where the spans of a step of the first poros cell go")
    parser.add_argument("--out", type=Path, default=Path("cells.jsonl"))
    arguments = parser.parse_args()
    plugins = load_plugins()
    found = find_published(arguments.shape, plugins)
    if found is None:
        parser.error(f"no published shape is called {arguments.shape}")
    architecture, shape = found
    part = LoraPart()

    def build(stream: dict[str, Any] | None) -> Any:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        base = random_resident(architecture, shape.config, default_device(), arguments.layers)
        torch.manual_seed(0)
        model = get_peft_model(base, lora_config(part))
        make_adapters_count(model, 0)
        if stream is not None:
            began = time.perf_counter()
            attach(model, plugins=plugins, **stream)
            print(f"  attached in {time.perf_counter() - began:.1f} s ({engine_of(model).store.tier})")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return model

    model, setting = None, ""
    with attention_path("fused"):
        for cell in arguments.cells:
            name, _, micro = cell.partition("@")
            accumulation = int(micro or 1)
            method, _, options = name.partition(":")
            stream = yaml.safe_load("{" + options.replace("=", ": ") + "}") if method == "poros" else None
            if model is None or name != setting:
                if model is not None and setting.startswith("poros"):
                    poros.close(model)
                model, setting = None, name
                model = build(stream)
                initial = [parameter.detach().clone() for parameter in adapters_of(model).values()]
            with torch.no_grad():
                for parameter, value in zip(adapters_of(model).values(), initial, strict=True):
                    parameter.copy_(value)
                    parameter.grad = None
            engine = engine_of(model) if stream is not None else None
            steps = Steps(model, accumulation, arguments.tokens, engine.accumulate if engine else one_by_one)
            measured = measure(steps, arguments.steps, arguments.warm_up, engine, arguments.trace if engine else None)
            arguments.trace = None if engine else arguments.trace
            config = {
                "model": f"{shape.id} (random weights)",
                "layers": arguments.layers,
                "tokens": arguments.tokens,
                "batch": 1,
                "accumulation": accumulation,
                "lora": part.model_dump(mode="json"),
                "attention": "fused",
                "stream": engine.config.model_dump(mode="json") if engine else None,
                "executor": type(engine.executor).__name__ if engine else None,
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
                tokens_per_step=arguments.tokens * accumulation,
                trainable_parameters=sum(tensor.numel() for tensor in initial),
                dtype_policy=DTYPE_POLICY,
                host_peak_gb=host_peak_bytes() / 1e9,
                provenance=provenance(),
                **measured,
            )
            receipt.append(arguments.out)
            shown = {
                key: round(value, 4)
                for key in ("s_step_median", "gpu_s_per_step", "vram_reserved_gb", "copied_gb_per_step", "link_gb_s")
                + ("link_share", "stall_s_per_step")
                if (value := measured.get(key)) is not None
            }
            if engine is not None and hasattr(engine.executor, "record_seconds"):
                shown["recorded_s"] = round(engine.executor.record_seconds, 1)
            print(f"{cell}: {shown}", flush=True)
            del steps


if __name__ == "__main__":
    main()
