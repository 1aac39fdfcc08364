"""Running a matrix: cells in processes of their own, results that survive, and what is not run again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from poros.config import LoraPart
from poros.errors import CheckpointError, ConfigError
from poros.plugins import load_plugins
from poros.provenance import provenance
from poros.receipt import Receipt, read_receipts
from poros.testing.checkpoints import make_checkpoint
from poros_bench import environments, matrix
from poros_bench.cell import Cell, make_rows, receipt_of, rows_hash
from poros_bench.cli import bench
from poros_bench.config import Case, MatrixConfig, MethodEntry
from poros_bench.matrix import RECEIPTS, cells_of, run_cell, run_matrix

PLUGINS = load_plugins()


def config(
    *methods: str, models: tuple[str, ...] = ("x",), title: str = "", note: str = "", **case: Any
) -> MatrixConfig:
    return MatrixConfig(
        title=title,
        note=note,
        cases=tuple(Case(name=f"case {model[-1]}", model=model, **case) for model in models),
        methods=tuple(MethodEntry(method=method) for method in methods),
    )


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], list[str]]:
    """faked(method -> status): cells aren't run; gives the list of those that would have been."""

    def fake(statuses: dict[str, str]) -> list[str]:
        ran: list[str] = []

        def run(cell: Cell, timeout_s: float, logs: Path, python: str = sys.executable) -> Receipt:
            ran.append(f"{cell.case.name}/{cell.entry.name}")
            status: Any = statuses.get(cell.entry.name, "ok")
            if status == "killed":
                raise KeyboardInterrupt
            return receipt_of(cell, status=status, s_step_median=1.0)

        monkeypatch.setattr(matrix, "run_cell", run)
        monkeypatch.setattr(matrix, "resolve", Path)
        return ran

    return fake


def test_finished_cells_are_not_run_again(faked: Callable[..., list[str]], tmp_path: Path) -> None:
    settings = config("poros", "resident", "unsloth", models=("x", "y"))
    ran = faked({"resident": "oom", "unsloth": "error"})
    receipts = run_matrix(settings, tmp_path / "out", PLUGINS)
    assert len(ran) == len(receipts) == 6
    with pytest.raises(ConfigError, match="holds results") as caught:
        run_matrix(settings, tmp_path / "out", PLUGINS)
    assert "--resume" in caught.value.hint
    ran = faked({})
    receipts = run_matrix(settings, tmp_path / "out", PLUGINS, resume=True)
    assert ran == ["case x/unsloth", "case y/unsloth"]  # out of memory is a result, an error isn't
    assert [receipt.status for receipt in receipts].count("ok") == 4
    ran = faked({})
    run_matrix(settings, tmp_path / "out", PLUGINS, resume=True)
    assert ran == []


def test_a_killed_run_leaves_whole_receipts(faked: Callable[..., list[str]], tmp_path: Path) -> None:
    settings = config("poros", "resident", "unsloth")
    faked({"unsloth": "killed"})
    with pytest.raises(KeyboardInterrupt):
        run_matrix(settings, tmp_path, PLUGINS)
    assert len(read_receipts(tmp_path / RECEIPTS)) == 2
    ran = faked({})
    assert len(run_matrix(settings, tmp_path, PLUGINS, resume=True)) == 3
    assert ran == ["case x/unsloth"]


def test_a_line_that_breaks_off_is_passed_over(faked: Callable[..., list[str]], tmp_path: Path) -> None:
    settings = config("poros", "resident")
    faked({})
    run_matrix(settings, tmp_path, PLUGINS)
    file = tmp_path / RECEIPTS
    whole, last = file.read_text().splitlines()
    file.write_text(f"{whole}\n{last[:100]}")  # the machine went down
    ran = faked({})
    assert len(run_matrix(settings, tmp_path, PLUGINS, resume=True)) == 2
    assert ran == ["case x/resident"]
    assert len(read_receipts(file, torn=True)) == 2


def test_other_versions_are_measured_anew_and_what_was_missing_is_looked_for_again(
    faked: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config("poros", "unsloth")
    faked({"unsloth": "skipped"})
    run_matrix(settings, tmp_path, PLUGINS)
    ran = faked({})
    run_matrix(settings, tmp_path, PLUGINS, resume=True)
    assert ran == ["case x/unsloth"]
    newer = provenance().model_copy(update={"transformers": "99"})
    monkeypatch.setattr(environments, "provenance", lambda: newer)
    ran = faked({})
    run_matrix(settings, tmp_path, PLUGINS, resume=True)
    assert ran == ["case x/poros", "case x/unsloth"]


def test_a_model_that_can_not_be_had_loses_its_own_cells_only(
    faked: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(name: str) -> Path:
        if name == "y":
            raise CheckpointError("there is no y")
        return Path(name)

    ran = faked({})
    monkeypatch.setattr(matrix, "resolve", resolve)
    receipts = run_matrix(config("poros", models=("y", "x")), tmp_path, PLUGINS)
    assert ran == ["case x/poros"]
    assert [(receipt.status, receipt.reason) for receipt in receipts] == [("error", "there is no y"), ("ok", None)]
    assert receipts[0].host_peak_gb is None


def test_a_folder_says_what_it_is_about(faked: Callable[..., list[str]], tmp_path: Path) -> None:
    """The page of a matrix that was edited shows its cells as they are now, and names those that were not run."""
    faked({})
    run_matrix(config("poros", "resident", title="New"), tmp_path, PLUGINS)
    run_matrix(config("poros", "unsloth", title="New", note="A note."), tmp_path, PLUGINS, only="case x/poros")
    page = tmp_path / "page.md"
    runner = CliRunner().invoke(bench, ["report", str(tmp_path), "--no-plot", "--to", str(page)], obj=PLUGINS)
    assert runner.exit_code == 0, runner.output
    text = page.read_text()
    assert text.startswith("# New\n")
    assert "A note." in text
    assert "Not run, or not yet: case x: x, unsloth." in text
    assert "\n| resident |" not in text


def test_being_terminated_leaves_no_process_behind(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom poros_bench import matrix\n"
        "with matrix._stopped_by_terminate():\n"
        "    program = 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'\n"
        "    matrix._in_a_process([sys.executable, '-c', program], Path(sys.argv[1]), 60)\n"
    )
    log = tmp_path / "log"
    process = subprocess.Popen([sys.executable, "-c", code, str(log)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (log.exists() and log.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(30) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


def test_another_setting_is_another_cell(faked: Callable[..., list[str]], tmp_path: Path) -> None:
    faked({})
    run_matrix(config("poros", steps=10), tmp_path, PLUGINS)
    ran = faked({})
    run_matrix(config("poros", steps=20), tmp_path, PLUGINS, resume=True)
    assert len(ran) == 1
    one = cells_of(config("poros", steps=10), tmp_path, PLUGINS)[0]
    assert one.finished is not None


def test_only_some_cells(faked: Callable[..., list[str]], tmp_path: Path) -> None:
    settings = config("poros", "resident", models=("x", "y"))
    for only, count in (("case x/poros", 1), ("*/resident", 2), ("case y", 2), ("case y/*", 2)):
        ran = faked({})
        run_matrix(settings, tmp_path / only.replace("/", "_"), PLUGINS, only=only)
        assert len(ran) == count
    with pytest.raises(ConfigError, match="names no cell") as caught:
        run_matrix(settings, tmp_path, PLUGINS, only="case z/poros")
    assert "case x/poros" in caught.value.hint


def cell(directory: Path, method: str, **case: Any) -> Cell:
    values: dict[str, Any] = {"steps": 2, "passes": 2, "warm_up": 1, "length": 16, "lora": LoraPart(rank=2), **case}
    return Cell(Case(name="tiny", model=str(directory), **values), MethodEntry(method=method), directory, "tiny")


def test_a_crash_and_a_time_out_are_receipts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = run_cell(cell(tmp_path, "poros"), 100, tmp_path / "logs")  # there is no checkpoint
    assert broken.status == "error"
    assert "config.json" in (broken.reason or "")
    assert broken.provenance.python
    monkeypatch.setattr(matrix, "_in_a_process", lambda arguments, log, *rest: log.write_text("last words\n") and -11)
    died = run_cell(cell(tmp_path, "poros"), 100, tmp_path / "logs")
    assert died.status == "error"
    assert died.reason == "killed by signal 11: last words"
    monkeypatch.undo()
    slow = run_cell(cell(tmp_path, "poros"), 0.01, tmp_path / "logs")
    assert slow.reason == "stopped after 0 s"
    assert slow.config["key"] == died.config["key"]


def test_a_method_that_is_not_installed_is_skipped(tmp_path: Path) -> None:
    receipt = run_cell(cell(tmp_path, "unsloth"), 100, tmp_path / "logs")
    assert receipt.status == "skipped"
    assert receipt.reason == "not installed: unsloth"


def test_what_changes_torch_is_imported_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what can't be imported is said, as the result of its own cell."""
    (tmp_path / "unsloth.py").write_text(
        'import sys\nraise NotImplementedError(f\'loaded: {sorted({"torch", "transformers"} & set(sys.modules))}\')\n'
    )
    (tmp_path / "unsloth-9.9.dist-info").mkdir()
    (tmp_path / "unsloth-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: unsloth\nVersion: 9.9\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    receipt = run_cell(cell(tmp_path, "unsloth"), 100, tmp_path / "logs")
    assert receipt.status == "skipped"
    assert receipt.reason == "unsloth can't be imported: loaded: []"
    assert receipt.config["method_version"] == "9.9", "a result stands as long as its method's version does"


def test_cells_train_the_same_and_get_the_same_losses(tmp_path: Path) -> None:
    """For real, in processes of their own: a tiny model by stock and by Poros within a budget."""
    family = PLUGINS.architecture_for("qwen2")
    directory = make_checkpoint(tmp_path / "model", family, {})
    settings = MatrixConfig(
        cases=(cell(directory, "poros", accumulation=2).case,),
        methods=(MethodEntry(method="resident"), MethodEntry(method="poros", vram="least")),
    )
    stock, ours = run_matrix(settings, tmp_path / "out", PLUGINS, jobs=2)
    assert (stock.status, ours.status) == ("ok", "ok"), (stock.reason, ours.reason)
    assert stock.losses == ours.losses
    assert len(stock.losses) == 5
    assert stock.steps == 4
    assert len(stock.passes) == 2
    for name in ("data_hash", "trainable_parameters", "tokens_per_step", "dtype_policy"):
        assert getattr(stock, name) == getattr(ours, name) is not None
    assert ours.plan is not None
    assert ours.plan["placements"] == ours.config["stream"]
    assert ours.copied_gb_per_step


def test_rows_are_the_same_for_everybody(tmp_path: Path) -> None:
    case = Case(name="a", model="x", length=8, batch_size=2, accumulation=3, steps=4)
    rows = make_rows(case, 100)
    assert len(rows) == 12
    assert all(len(row) == 8 and all(0 <= token < 100 for token in row) for batch in rows for row in batch)
    assert rows_hash(rows) == rows_hash(make_rows(case, 100))
    assert rows_hash(rows) != rows_hash(make_rows(case.model_copy(update={"seed": 1}), 100))
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"input_ids": list(range(n, n + 10))}) for n in range(5)))
    own = make_rows(case.model_copy(update={"dataset": str(file)}), 100)
    assert own[0] == [list(range(8)), list(range(1, 9))]


def test_no_method_is_imported_where_it_is_not_run() -> None:
    """unsloth patches transformers when it is imported: only its own cell's process may do so."""
    code = (
        "import sys, types\n"
        "class Trap:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        assert not name.startswith('unsloth'), 'imported'\n"
        "import importlib.util\n"
        "import poros_bench.plugin, poros_bench.matrix, poros_bench.cli\n"
        "sys.meta_path.insert(0, Trap())\n"
        "import poros_bench.ways, poros_bench.quick, poros_bench.report\n"
        "assert 'unsloth' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
