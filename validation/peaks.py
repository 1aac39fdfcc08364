"""Who holds the GPU memory at the fullest moment of a planned run, by the line of Python that asked for it.

    python validation/peaks.py check qwen2.5-7b --vram 4GB --length 512      # any `poros check` with a budget
    python validation/peaks.py --no-limit check qwen2.5-32b --vram least

What was there when the streamed arm began is one entry; everything after it is told apart. `--no-limit` lets the run
take what it wants, to see by how much a plan is short.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

import poros.parity.gate
from poros.cli.app import main as poros_main

EVENTS = 2_000_000


def start() -> None:
    """Begin to take down what is allocated and freed."""
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=EVENTS)


def where(frames: Sequence[dict[str, Any]]) -> str:
    """The innermost frames that say something, the innermost first."""
    shown = [f"{frame['filename'].rsplit('/', 1)[-1]}:{frame['line']} {frame['name']}" for frame in frames]
    own = [
        line
        for line, frame in zip(shown, frames, strict=True)
        if "/poros/" in frame["filename"] or "/validation/" in frame["filename"]
    ]
    return " < ".join((shown[:1] if shown[:1] != own[:1] else []) + own[:2]) or "(no Python: autograd, or a library)"


def report(most: int = 24) -> None:
    """Print what was live at the moment of most allocated memory since `start`."""
    events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    live: dict[int, tuple[int, str]] = {}
    mapped = allocated = freed_before = 0
    peak, moment, peak_mapped = 0, 0, 0
    for index, event in enumerate(events):
        action, address, size = event["action"], event.get("addr"), event.get("size", 0)
        if action == "alloc":
            live[address] = (size, "")
            allocated += size
        elif action == "free_completed":
            if address in live:
                allocated -= live.pop(address)[0]
            else:
                allocated -= size
                freed_before += size
        elif action in ("segment_alloc", "segment_map"):
            mapped += size
        elif action in ("segment_free", "segment_unmap"):
            mapped -= size
        peak_mapped = max(peak_mapped, mapped)
        if allocated > peak:
            peak, moment = allocated, index
    live.clear()
    for event in events[: moment + 1]:
        if event["action"] == "alloc":
            live[event["addr"]] = (event["size"], where(event.get("frames", [])))
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    total: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for size, site in live.values():
        total[site] += size
        count[site] += 1
    print(f"fullest moment: {peak / 1e6:.0f} MB above the beginning; {peak_mapped / 1e6:.0f} MB more reserved at most")
    print(f"{len(events)} events; freed of what was there before: {freed_before / 1e6:.0f} MB")
    for site, size in total.most_common(most):
        print(f"  {size / 1e6:9.2f} MB {count[site]:5d} x {site}")
    torch.cuda.memory._record_memory_history(None)


def main() -> None:
    """Run a `poros check` and print its peak."""
    arguments = sys.argv[1:]
    limit = "--no-limit" not in arguments
    enforce: Callable[..., None] = poros.parity.gate.enforce

    def enforce_seen(plan: Any, device: torch.device) -> None:
        if limit:
            enforce(plan, device)
        for name, size in plan.device.items():
            print(f"  planned {size / 1e6:9.2f} MB {name}")
        now, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        print(f"{now / 1e6:.0f} MB allocated, {reserved / 1e6:.0f} MB reserved at the beginning", flush=True)
        start()

    poros.parity.gate.enforce = enforce_seen
    sys.argv = ["poros", *(argument for argument in arguments if argument != "--no-limit")]
    try:
        poros_main()
    finally:
        print(f"{torch.cuda.max_memory_allocated() / 1e6:.0f} MB allocated, at most; reserved ", end="")
        print(f"{torch.cuda.max_memory_reserved() / 1e6:.0f} MB")
        report()


if __name__ == "__main__":
    main()
