"""`poros bench` alone: a tiny case of each installed family, and the gate's word on each."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from poros.config import LoraPart
from poros.errors import one_line
from poros.plugins import Plugins
from poros.provenance import gpu_name
from poros.receipt import Receipt
from poros_bench.config import Case, MatrixConfig, MethodEntry
from poros_bench.matrix import run_matrix
from poros_bench.plugin import installed_methods

if TYPE_CHECKING:
    from poros.parity.stock import Work

Announce = Callable[[str, int, int], None]


def run_quick(out: Path, plugins: Plugins, announce: Announce) -> tuple[list[Receipt], dict[str, str]]:
    """Train a tiny checkpoint of every family by every method that is there, and check Poros against stock.

    Args:
        out: Folder for checkpoints and receipts; results of an earlier quick run in it are replaced.
        plugins: Loaded plugins.
        announce: Told what is going on.

    Returns:
        The receipts, and case -> the gate's verdict.
    """
    from poros.parity.stock import Work
    from poros.testing.checkpoints import make_checkpoint

    (out / "receipts.jsonl").unlink(missing_ok=True)
    cases: list[Case] = []
    verdicts: dict[str, str] = {}
    families = plugins.architectures()
    for number, family in enumerate(families):
        announce(f"gate, {family.family}", number, len(families))
        directory = out / "models" / family.family
        if not (directory / "config.json").is_file():
            make_checkpoint(directory, family, {})
        case = Case(
            name=family.family,
            model=str(directory),
            steps=3,
            passes=2,
            warm_up=1,
            length=32,
            lora=LoraPart(rank=4, alpha=8),
        )
        cases.append(case)
        work = Work(steps=2, length=32, accumulation=1)
        verdicts[f"{case.name}: {case.model}"] = _verdict(directory, work, plugins)
    methods = [MethodEntry(method=name) for name, method in installed_methods(plugins).items() if not method.missing()]
    jobs = 1 if gpu_name() is not None else min(2, os.cpu_count() or 1)
    config = MatrixConfig(
        title="Tiny models of every installed family",
        note="Two cells ran at a time, each on one thread: the times are rough." if jobs > 1 else "",
        cases=tuple(cases),
        methods=tuple(methods),
        timeout_s=300,
    )
    return run_matrix(config, out, plugins, jobs=jobs, announce=announce), verdicts


def _verdict(directory: Path, work: Work, plugins: Plugins) -> str:
    """The gate's word on a checkpoint; what went wrong with one family doesn't lose the others."""
    from poros.engine.adapters import lora_config
    from poros.parity.gate import check

    try:
        return check(str(directory), lora_config(LoraPart(rank=4, alpha=8)), work, plugins=plugins).verdict
    except Exception as error:  # noqa: BLE001 - a family may be anybody's plugin
        return f"error: {one_line(error)[:200]}"
