"""Times stock resident QLoRA and Poros at a published shape with random weights, in one process, one receipt each.

    python validation/measure.py qwen2.5-32b --accumulation 1 8 --out cells.jsonl

It stands in until poros-bench has its matrix. Both methods train the same bytes: the stock model is built, timed, and then
made to stream by `poros.attach`. Seconds are medians over synchronised steps after three warm-up steps; `gpu_s_per_step` is
the sum of kernel times of one step from the profiler, copies from the host left out.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from torch.profiler import ProfilerActivity, profile

from poros.config import LoraPart, hash_of
from poros.engine.adapters import lora_config
from poros.engine.attach import attach, engine_of
from poros.engine.attention import attention_path
from poros.engine.load import default_device
from poros.parity.resident import random_resident
from poros.parity.stock import adapters_of, make_adapters_count, one_by_one
from poros.plugins import load_plugins
from poros.provenance import host_peak_bytes, provenance
from poros.receipt import DTYPE_POLICY, Receipt

WARM_UP = 3


def measure(model: Any, steps: int, accumulation: int, tokens: int, accumulate: Callable[..., Any]) -> dict[str, Any]:
    """Train for some steps; the measured fields of a receipt."""
    device = default_device()
    on_gpu = device.type == "cuda"
    adapters = adapters_of(model)
    optimizer = torch.optim.AdamW(list(adapters.values()), lr=1e-4, fused=on_gpu)
    generator = torch.Generator().manual_seed(3)
    vocab_size = model.config.get_text_config().vocab_size
    streamer = getattr(accumulate, "__self__", None) and accumulate.__self__.streamer  # type: ignore[attr-defined]
    seconds, losses, copied = [], [], []
    model.train()

    def micro_step(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        (loss / accumulation).backward()
        return loss.detach()

    def micro_steps() -> list[Callable[[], torch.Tensor]]:
        rows = torch.randint(0, vocab_size, (accumulation, 1, tokens), generator=generator).to(device)
        return [partial(micro_step, row) for row in rows]

    def synchronise() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP + steps):
        todo = micro_steps()
        before = streamer.counts.copied_bytes if streamer else 0
        synchronise()
        began = time.perf_counter()
        results = accumulate(todo)
        torch.nn.utils.clip_grad_norm_(list(adapters.values()), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        synchronise()
        seconds.append(time.perf_counter() - began)
        losses.append(float(sum(results) / accumulation))
        copied.append((streamer.counts.copied_bytes if streamer else 0) - before)
    measured = {
        "s_step_median": statistics.median(seconds[WARM_UP:]),
        "s_step_std": statistics.stdev(seconds[WARM_UP:]),
        "passes": [statistics.median(seconds[WARM_UP:])],
        "steps": steps,
        "losses": losses,
        "copied_gb_per_step": statistics.median(copied[WARM_UP:]) / 1e9 if streamer else None,
    }
    if on_gpu:
        measured["vram_allocated_gb"] = torch.cuda.max_memory_allocated() / 1e9
        measured["vram_reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            accumulate(micro_steps())
            synchronise()
        kernels = [event for event in trace.key_averages() if "Memcpy HtoD" not in event.key]
        measured["gpu_s_per_step"] = sum(event.self_device_time_total for event in kernels) / 1e6
    for parameter in adapters.values():
        parameter.grad = None
    return measured


def link_speed(engine: Any) -> float | None:
    """GB/s of copies of whole slabs from the store to the device; None without a GPU."""
    if engine.device.type != "cuda":
        return None
    target = torch.empty_like(engine.store.slab(0), device=engine.device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for index in range(20):
        target.copy_(engine.store.slab(index % len(engine.packings)), non_blocking=True)
    end.record()
    torch.cuda.synchronize()
    return 20 * target.numel() / 1e6 / start.elapsed_time(end)


def main() -> None:
    """Measure both methods at one shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1])
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("cells.jsonl"))
    arguments = parser.parse_args()
    plugins = load_plugins()
    architecture, shape = next(
        (a, s) for a in plugins.architectures() for s in a.published if s.id == arguments.shape
    )
    part = LoraPart()
    base = random_resident(architecture, shape.config, default_device(), arguments.layers)
    torch.manual_seed(0)
    model = get_peft_model(base, lora_config(part))
    make_adapters_count(model, 0)
    initial = {name: parameter.detach().clone() for name, parameter in adapters_of(model).items()}

    def cell(method: str, accumulation: int, accumulate: Callable[..., Any], **fields: Any) -> None:
        with torch.no_grad():
            for name, parameter in adapters_of(model).items():
                parameter.copy_(initial[name])
        config = {
            "model": f"{shape.id} (random weights)",
            "layers": arguments.layers,
            "tokens": arguments.tokens,
            "batch": 1,
            "accumulation": accumulation,
            "lora": part.model_dump(mode="json"),
            "attention": "fused",
            "slots": arguments.slots if method == "poros" else None,
            "optimizer": "AdamW",
            "warm_up": WARM_UP,
        }
        measured = measure(model, arguments.steps, accumulation, arguments.tokens, accumulate)
        receipt = Receipt(
            kind="cell",
            case=str(config["model"]),
            method=method,
            model_type=model.config.model_type,
            config=config,
            config_hash=hash_of(config),
            tokens_per_step=arguments.tokens * accumulation,
            trainable_parameters=sum(tensor.numel() for tensor in initial.values()),
            dtype_policy=DTYPE_POLICY,
            host_peak_gb=host_peak_bytes() / 1e9,
            provenance=provenance(),
            **measured,
            **fields,
        )
        receipt.append(arguments.out)
        print(f"{method} x {accumulation}: {receipt.s_step_median:.4f} s a step", flush=True)

    with attention_path("fused"):
        for accumulation in arguments.accumulation:
            cell("resident", accumulation, one_by_one)
        attach(model, slots=arguments.slots, plugins=plugins)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        engine = engine_of(model)
        link = link_speed(engine)
        for accumulation in arguments.accumulation:
            cell("poros", accumulation, engine.accumulate, link_gb_s=link)


if __name__ == "__main__":
    main()
