"""One cell: one method on one case, in a process of its own.

    python -m poros_bench.cell SPEC.json RECEIPT.json

The method builds what is to be trained; the loop around it is the same for all: the same rows, AdamW, bf16 autocast,
clipping at norm 1. Steps are synchronised and timed one by one; the warm-up doesn't count; the figure of a pass is the
median of its steps.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poros.config import AttentionPath, hash_of
from poros.errors import BudgetError, PorosError, one_line
from poros.provenance import host_peak_bytes, package_version, provenance
from poros.receipt import DTYPE_POLICY, Receipt
from poros_bench.config import SYNTHETIC, Case, MethodEntry

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Cell:
    """What a method is asked to do.

    Attributes:
        case: What is trained.
        entry: How.
        directory: The checkpoint that all methods of the case train.
        model_name: For receipts: says "random weights" where they are.
    """

    case: Case
    entry: MethodEntry
    directory: Path
    model_name: str

    @property
    def key(self) -> str:
        """By which a finished cell is known again: everything that decides what is measured."""
        case = self.case.model_dump(mode="json", exclude={"name"})
        return hash_of({"case": case, "entry": self.entry.model_dump(mode="json", exclude={"label"})})

    @property
    def title(self) -> str:
        """The case's name in receipts."""
        return f"{self.case.name}: {self.model_name}"

    def to_json(self) -> dict[str, Any]:
        """For the cell's process."""
        return {
            "case": self.case.model_dump(mode="json"),
            "entry": self.entry.model_dump(mode="json"),
            "directory": str(self.directory),
            "model_name": self.model_name,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Cell:
        """What `to_json` gave."""
        return cls(
            Case.model_validate(values["case"]),
            MethodEntry.model_validate(values["entry"]),
            Path(values["directory"]),
            values["model_name"],
        )


@dataclass
class Trainee:
    """What a method has built.

    Attributes:
        model: Called with `input_ids` and `labels`, gives a `loss`.
        device: Where it computes.
        make_optimizer: Called with the trainable parameters and `lr`.
        attention: The attention path to train on; None: the method's own.
        accumulate: Runs the functions of an optimizer step's micro-batches.
        clip: Clips gradients: (optimizer, parameters, norm).
        record: For the receipt: `stream`, `executor`, `plan` and the like.
        traffic: What has travelled, for methods that stream: called at the begin and the end of the measured steps.
        link_gb_s: What the link can do, GB/s; None where nothing travels.
        dtype_policy: dtypes of base, computation and adapters.
        close: Gives everything back.
    """

    model: Any
    device: torch.device
    make_optimizer: Callable[..., torch.optim.Optimizer]
    attention: AttentionPath | None
    accumulate: Callable[[Sequence[Callable[[], Any]]], Any] = lambda micro_steps: [step() for step in micro_steps]
    clip: Callable[[Any, Any, float], Any] | None = None
    record: Callable[[], dict[str, Any]] = dict
    traffic: Callable[[], Any] | None = None
    link_gb_s: Callable[[], float | None] = lambda: None
    dtype_policy: str = DTYPE_POLICY
    close: Callable[[], None] = lambda: None


def make_rows(case: Case, vocabulary: int) -> list[list[list[int]]]:
    """The token rows of every micro-batch, in order: [micro-batch][row][token]. They are the same for all methods.

    Synthetic rows are drawn from a seed and used again pass after pass. Rows of a file hold `input_ids`.
    """
    count = max(1, min(case.steps, _ROWS_OF_STEPS)) * case.accumulation
    if case.dataset == SYNTHETIC:
        draw = random.Random(case.seed)
        return [
            [[draw.randrange(vocabulary) for _ in range(case.length)] for _ in range(case.batch_size)]
            for _ in range(count)
        ]
    rows = [json.loads(line)["input_ids"] for line in Path(case.dataset).read_text(encoding="utf-8").splitlines()]
    fitting = [row[: case.length] for row in rows if len(row) >= case.length]
    if len(fitting) < case.batch_size:
        raise PorosError(f"{case.dataset} has {len(fitting)} rows of {case.length} tokens", "lower `length`")
    return [
        [fitting[(number * case.batch_size + row) % len(fitting)] for row in range(case.batch_size)]
        for number in range(count)
    ]


_ROWS_OF_STEPS = 8
"""Steps whose rows are kept on the device; they are used in turn."""


def rows_hash(rows: Sequence[Sequence[Sequence[int]]]) -> str:
    """A hash of all tokens in their order."""
    digest = hashlib.sha256()
    for micro_batch in rows:
        for row in micro_batch:
            digest.update(",".join(map(str, row)).encode() + b";")
    return digest.hexdigest()[:16]


def run(cell: Cell) -> Receipt:
    """Build, warm up, measure. Running out of memory is a result, and so is any other error."""
    from poros_bench.plugin import find_method

    method = find_method(cell.entry.method)
    version = {} if method.distribution is None else {"method_version": package_version(method.distribution)}
    result = partial(receipt_of, cell, **version)
    missing = method.missing()
    if missing:
        return result(status="skipped", reason=f"not installed: {', '.join(missing)}")
    if method.first is not None:
        try:
            importlib.import_module(method.first)
        except Exception as error:  # noqa: BLE001 - whatever keeps a rival from being imported is the cell's result
            return result(status="skipped", reason=f"{method.first} can't be imported: {one_line(error)}"[:300])

    import torch

    from poros.engine.attention import attention_path

    module, _, function = method.entry.partition(":")
    try:
        trainee: Trainee = getattr(importlib.import_module(module), function)(cell)
        path = nullcontext() if trainee.attention is None else attention_path(trainee.attention)
        with path:
            measured = measure(cell, trainee)
        trainee.close()
        return result(**measured)
    except NotApplicableError as error:
        return result(status="skipped", reason=str(error))
    except BudgetError as error:
        return result(status="oom", reason=one_line(error)[:300])
    except PorosError as error:
        return result(status="error", reason=one_line(error))
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error).lower():
            raise
        return result(status="oom", reason=one_line(error)[:300])


class NotApplicableError(Exception):
    """A method can't do this case; the cell is skipped with the reason."""


def measure(cell: Cell, trainee: Trainee) -> dict[str, Any]:
    """The measured fields of a receipt."""
    import torch
    from torch.nn.utils import clip_grad_norm_

    from poros.engine.budget import process_peak_bytes

    case, device = cell.case, trainee.device
    parameters = [parameter for parameter in trainee.model.parameters() if parameter.requires_grad]
    optimizer = trainee.make_optimizer(parameters, lr=1e-4)
    vocabulary = int(trainee.model.config.get_text_config().vocab_size)
    rows = make_rows(case, vocabulary)
    batches = [torch.tensor(micro_batch, device=device) for micro_batch in rows]
    on_gpu = device.type == "cuda"
    losses: list[float] = []

    def micro_step(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss: torch.Tensor = trainee.model(input_ids=ids, labels=ids, use_cache=False).loss
        (loss / case.accumulation).backward()
        return loss.detach()

    def step(number: int) -> float:
        first = number * case.accumulation % len(batches)
        todo = [partial(micro_step, ids) for ids in batches[first : first + case.accumulation]]
        if on_gpu:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        found = trainee.accumulate(todo)
        if trainee.clip is None:
            clip_grad_norm_(parameters, 1.0)
        else:
            trainee.clip(optimizer, parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize(device)
        took = time.perf_counter() - began
        losses.append(float(sum(found)) / case.accumulation)
        return took

    trainee.model.train()
    torch.manual_seed(case.seed)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    number = 0
    for _ in range(case.warm_up):
        step(number)
        number += 1
    before = None if trainee.traffic is None else trainee.traffic()
    passes: list[list[float]] = []
    for _ in range(case.passes):
        passes.append([])
        for _ in range(case.steps):
            passes[-1].append(step(number))
            number += 1
            if sys.stderr.isatty() or number % 10 == 0:
                print(f"{number}", file=sys.stderr, flush=True)
    medians = [statistics.median(seconds) for seconds in passes]
    median = statistics.median(medians)
    steps = case.steps * case.passes
    measured: dict[str, Any] = {
        "s_step_median": median,
        "s_step_std": statistics.stdev(medians) if len(medians) > 1 else None,
        "passes": medians,
        "steps": steps,
        "losses": losses[:_LOSSES_KEPT],
        "data_hash": rows_hash(rows),
        "tokens_per_step": case.tokens_per_step,
        "trainable_parameters": sum(parameter.numel() for parameter in parameters),
        "dtype_policy": trainee.dtype_policy,
        "model_type": trainee.model.config.model_type,
        "attention": trainee.attention or "its own",
    }
    if on_gpu:
        whole = process_peak_bytes(device)
        measured["vram_allocated_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        measured["vram_reserved_gb"] = torch.cuda.max_memory_reserved(device) / 1e9
        measured["vram_device_gb"] = None if whole is None else whole / 1e9
    # Afterwards: these may take memory of their own.
    if trainee.traffic is not None:
        measured |= trainee.traffic().since(before).per_step(steps, median, trainee.link_gb_s())
    measured |= trainee.record()
    return measured


_LOSSES_KEPT = 20


def receipt_of(cell: Cell, **values: Any) -> Receipt:
    """The receipt of a cell; complete in its provenance whatever came of it."""
    config: dict[str, Any] = {
        "case": cell.case.model_dump(mode="json"),
        "entry": cell.entry.model_dump(mode="json"),
        "key": cell.key,
    }
    for name in ("attention", "stream", "executor", "method_version"):
        if name in values:
            config[name] = values.pop(name)
    fields: dict[str, Any] = {
        "kind": "cell",
        "case": cell.title,
        "method": cell.entry.name,
        "model_type": "",
        "config": config,
        "config_hash": hash_of(config),
        "dtype_policy": DTYPE_POLICY,
        "host_peak_gb": host_peak_bytes() / 1e9,
        "provenance": provenance(),
        **values,
    }
    return Receipt(**fields)


def main() -> None:
    """Run the cell that a file describes, and write its receipt."""
    spec, out = Path(sys.argv[1]), Path(sys.argv[2])
    receipt = run(Cell.from_json(json.loads(spec.read_text(encoding="utf-8"))))
    unfinished = out.with_suffix(".part")
    unfinished.write_text(receipt.to_json() + "\n", encoding="utf-8")
    unfinished.replace(out)


if __name__ == "__main__":
    main()
