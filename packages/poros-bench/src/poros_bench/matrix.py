"""Running a matrix: every cell in a process of its own, its receipt on disk before the next one begins."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from poros.checkpoint.locate import resolve
from poros.errors import ConfigError, PorosError, one_line
from poros.plugins import Plugins
from poros.receipt import Receipt, read_receipts
from poros_bench.cell import Cell, receipt_of
from poros_bench.config import MatrixConfig
from poros_bench.environments import HERE, Environments, Versions, versions
from poros_bench.models import directory_of, has_random_weights, name_of
from poros_bench.plugin import find_method

RECEIPTS = "receipts.jsonl"
LOGS = "logs"
MODELS = "models"

FINISHED = ("ok", "oom")
"""What isn't run again on `--resume`: results. An error, and a method that wasn't there, are tried again."""

MATRIX = "matrix.json"
"""What a folder is about: every matrix that was run into it by its title, with its note and its cells."""

Announce = Callable[[str, int, int], None]
"""Told what is going on: cells done and cells in all."""


@dataclass(frozen=True)
class Planned:
    """One cell of a matrix.

    Attributes:
        cell: What is to be done.
        finished: Its receipt, if it has been done, with the versions that are installed now.
    """

    cell: Cell
    finished: Receipt | None


def cells_of(
    config: MatrixConfig, out: Path, plugins: Plugins, only: str | None = None, environments: Environments = HERE
) -> list[Planned]:
    """Every cell of a matrix, case by case, with what has been done already.

    Args:
        config: The matrix.
        out: Its folder.
        plugins: For published shapes.
        only: "case/method": names of one cell; either may be `*`.
        environments: Which Python runs which method.

    Raises:
        ConfigError: `only` names nothing.
    """
    methods = {entry.method: find_method(entry.method, plugins) for entry in config.methods}
    now = {name: environments.versions_of(method) for name, method in methods.items()}
    done = {receipt.config.get("key"): receipt for receipt in receipts_in(out)}
    wanted_case, _, wanted_method = (only or "*/*").partition("/")
    planned = []
    for case in config.cases:
        directory = directory_of(case, plugins, out / MODELS)
        for entry in config.methods:
            if wanted_case not in ("*", case.name) or (wanted_method or "*") not in ("*", entry.name):
                continue
            cell = Cell(case, entry, directory, name_of(case, plugins))
            found = done.get(cell.key)
            stands = found is not None and versions_in(found) == now[entry.method]
            planned.append(Planned(cell, found if stands else None))
    if not planned:
        names = ", ".join(f"{case.name}/{entry.name}" for case in config.cases for entry in config.methods)
        raise ConfigError(f"--only {only} names no cell", f"cells: {names}")
    return planned


def versions_in(receipt: Receipt) -> Versions:
    """What a receipt was measured with."""
    return versions(receipt.provenance, receipt.config.get("method_version"))


def receipts_in(out: Path) -> list[Receipt]:
    """The receipts of a folder, the newest of each cell."""
    file = out / RECEIPTS
    if not file.is_file():
        return []
    newest = {receipt.config.get("key"): receipt for receipt in read_receipts(file, torn=True)}
    return list(newest.values())


def run_matrix(
    config: MatrixConfig,
    out: Path,
    plugins: Plugins,
    *,
    resume: bool = False,
    only: str | None = None,
    keep_models: bool = True,
    jobs: int = 1,
    environments: Environments = HERE,
    announce: Announce = lambda what, done, total: None,
) -> list[Receipt]:
    """Run a matrix.

    Args:
        config: The matrix.
        out: Its folder: receipts, logs and the checkpoints that were made.
        plugins: Loaded plugins.
        resume: Leave out cells whose result is there.
        only: "case/method", to run some cells only.
        keep_models: Whether checkpoints with random weights stay when their case is done.
        jobs: Cells at a time, each on one thread if there are several; only for tiny ones on a CPU.
        environments: Which Python runs which method.
        announce: Told what is going on.

    Returns:
        The newest receipt of every cell of the matrix that has one.

    Raises:
        ConfigError: the folder holds results, and `resume` isn't asked for.
    """
    planned = cells_of(config, out, plugins, only, environments)
    if receipts_in(out) and not resume and only is None:
        raise ConfigError(f"{out} holds results already", "add --resume to go on, or name another folder with -o")
    out.mkdir(parents=True, exist_ok=True)
    describe(config, out, plugins)
    todo = [
        one.cell for one in planned if not (resume and one.finished is not None and one.finished.status in FINISHED)
    ]
    with _stopped_by_terminate():
        if jobs > 1:
            with ThreadPoolExecutor(jobs) as threads:
                running = [
                    threads.submit(
                        run_cell, cell, config.timeout_s, out / LOGS, environments.python_of(cell.entry.method), True
                    )
                    for cell in todo
                ]
                for number, (cell, job) in enumerate(zip(todo, running, strict=True)):
                    announce(f"{cell.case.name}, {cell.entry.name}", number, len(todo))
                    job.result().append(out / RECEIPTS)
        else:
            _one_by_one(todo, config.timeout_s, out, plugins, keep_models, environments, announce)
    announce("done", len(todo), len(todo))
    keys = {one.cell.key for one in planned}
    return [receipt for receipt in receipts_in(out) if receipt.config.get("key") in keys]


def _one_by_one(
    todo: Sequence[Cell],
    timeout_s: float,
    out: Path,
    plugins: Plugins,
    keep_models: bool,
    environments: Environments,
    announce: Announce,
) -> None:
    made: set[Path] = set()
    for number, cell in enumerate(todo):
        announce(f"{cell.case.name}, {cell.entry.name}", number, len(todo))
        try:
            ready = cell
            if not has_random_weights(cell.case, plugins):
                ready = dataclasses.replace(cell, directory=resolve(cell.case.model))  # a hub id is fetched
            elif not cell.directory.is_dir():
                _make_model(cell, timeout_s, out)
                made.add(cell.directory)
            receipt = run_cell(ready, timeout_s, out / LOGS, environments.python_of(cell.entry.method))
        except PorosError as error:
            receipt = receipt_of(cell, status="error", reason=one_line(error)[:300], host_peak_gb=None)
        receipt.append(out / RECEIPTS)
        if (
            not keep_models
            and cell.directory in made
            and cell.directory not in {c.directory for c in todo[number + 1 :]}
        ):
            shutil.rmtree(cell.directory, ignore_errors=True)


def describe(config: MatrixConfig, out: Path, plugins: Plugins) -> None:
    """Write down what a folder is about, for whoever makes a page of it. One folder may hold several matrices."""
    cells = [
        {"key": one.cell.key, "case": one.cell.title, "method": one.cell.entry.name}
        for one in cells_of(config, out, plugins)
    ]
    content = matrices_in(out) | {config.title: {"note": config.note, "cells": cells}}
    (out / MATRIX).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def matrices_in(out: Path) -> dict[str, Any]:
    """Title -> note and cells of each matrix that was run into a folder."""
    file = out / MATRIX
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


@contextmanager
def _stopped_by_terminate() -> Iterator[None]:
    """Let a request to terminate unwind as Ctrl-C does, so that no cell's process is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_cell(
    cell: Cell, timeout_s: float, logs: Path, python: str = sys.executable, one_thread: bool = False
) -> Receipt:
    """Run a cell in a process of its own; a crash, a kill and a time-out become receipts as well."""
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{cell.key}.log"
    with tempfile.TemporaryDirectory() as folder:
        spec, out = Path(folder) / "spec.json", Path(folder) / "receipt.json"
        spec.write_text(json.dumps(cell.to_json()), encoding="utf-8")
        threads = {"OMP_NUM_THREADS": "1"} if one_thread else {}
        ended = _in_a_process([python, "-m", "poros_bench.cell", str(spec), str(out)], log, timeout_s, threads)
        if out.is_file():
            return read_receipts(out)[0]
    if ended is None:
        return receipt_of(cell, status="error", reason=f"stopped after {timeout_s:.0f} s", host_peak_gb=None)
    tail = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()][-1:]
    what = f"killed by signal {-ended}" if ended < 0 else f"ended with exit code {ended}"
    return receipt_of(cell, status="error", reason=f"{what}: {' '.join(tail)[:300]}", host_peak_gb=None)


def _in_a_process(
    arguments: Sequence[str], log: Path, timeout_s: float, environment: Mapping[str, str] = MappingProxyType({})
) -> int | None:
    """Exit code of a process; None if it ran out of time and was stopped with all its children."""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            list(arguments),
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _make_model(cell: Cell, timeout_s: float, out: Path) -> None:
    (out / LOGS).mkdir(parents=True, exist_ok=True)
    cell.directory.parent.mkdir(parents=True, exist_ok=True)
    log = out / LOGS / f"{cell.directory.name}.log"
    layers = "all" if cell.case.layers is None else str(cell.case.layers)
    began = time.monotonic()
    make = [sys.executable, "-m", "poros_bench.models", cell.case.model, layers, str(cell.directory)]
    ended = _in_a_process(make, log, timeout_s)
    if ended != 0:
        shutil.rmtree(cell.directory.with_name(cell.directory.name + ".part"), ignore_errors=True)
        took = time.monotonic() - began
        raise PorosError(f"the checkpoint of {cell.case.model} couldn't be made ({took:.0f} s)", f"see {log}")
