"""Recording a function's kernels as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from poros.engine.replay import Pool, Results


def warm_up(run: Callable[[], Results], device: torch.device) -> Results:
    """Run a function once before it is recorded: kernels are compiled and tuned at their first launch."""
    current, stream = torch.cuda.current_stream(device), recording_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        results = run()
    current.wait_stream(stream)
    torch.cuda.empty_cache()  # what it took on that stream could be used on no other
    return results


def record(run: Callable[[], Results], pool: Pool, device: torch.device) -> tuple[Callable[[], None], Results]:
    """Record a function's kernels.

    Args:
        run: The function; it has been warmed up.
        pool: Where the graph's memory comes from.
        device: On which it runs.

    Returns:
        What replays the kernels, and the tensors in which the results will lie.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads (a DataLoader that pins memory) may go on using CUDA while this one records.
    with torch.cuda.graph(graph, pool=pool.handle, stream=recording_stream(device), capture_error_mode="thread_local"):
        results = run()
    pool.handle = graph.pool()
    return graph.replay, results


@cache
def recording_stream(device: torch.device) -> Any:
    """The stream for every warm-up and recording on a device: each new one would cost a cuBLAS workspace."""
    return torch.cuda.Stream(device)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is, or came of, one. Ending a recording that ran out of memory raises another error on top."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False
