"""Methods that run in another environment: what is refused, and that the other Python really runs them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from poros.config import LoraPart
from poros.errors import ConfigError
from poros.plugins import load_plugins
from poros.provenance import package_version, provenance
from poros.testing.checkpoints import make_checkpoint
from poros_bench import environments
from poros_bench.cli import bench
from poros_bench.config import Case, MatrixConfig, MethodEntry
from poros_bench.environments import HERE, Environments, parse, versions
from poros_bench.matrix import cells_of, receipts_in, run_matrix
from poros_bench.plugin import installed_methods

PLUGINS = load_plugins()
METHODS = installed_methods()


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_every_method_runs_here_unless_told_otherwise() -> None:
    assert HERE.python_of("soup") == sys.executable
    assert HERE.versions_of(METHODS["soup"]) == versions(provenance(), package_version("soup-cli"))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("soup", "is not METHOD=PYTHON"),
        ("hopes=python3", "is not METHOD=PYTHON"),
        ("soup=/nowhere/python", "is no program"),
    ],
)
def test_what_is_wrong_is_said(value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse([value], METHODS)


def test_a_python_without_poros_bench_is_refused(tmp_path: Path) -> None:
    python = script(tmp_path / "python", "echo no module called poros_bench >&2; exit 1")
    with pytest.raises(ConfigError, match="can't run cells: no module called poros_bench") as caught:
        parse([f"soup={python}"], METHODS)
    assert "install poros-bench" in caught.value.hint


def test_a_python_that_does_not_answer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "ANSWERS_IN_S", 0.2)
    python = script(tmp_path / "python", "exec sleep 60")
    with pytest.raises(ConfigError, match=r"can't run cells: no answer within 0\.2 s"):
        parse([f"soup={python}"], METHODS)


@pytest.mark.parametrize("words", ["", "echo hello", "echo '[]'", "echo '[{}, null]'"])
def test_a_program_that_is_no_python_is_refused(tmp_path: Path, words: str) -> None:
    python = script(tmp_path / "python", words)
    with pytest.raises(ConfigError, match=r"can't run cells: .*Error: "):
        parse([f"soup={python}"], METHODS)


def test_a_program_that_can_not_be_started_is_refused(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_bytes(b"\x7fELF, but not really")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match="can't run cells: OSError"):
        parse([f"soup={python}"], METHODS)


def test_a_wrong_python_is_told_before_anything_runs(tmp_path: Path) -> None:
    config = tmp_path / "matrix.yaml"
    config.write_text("cases: [{name: a, model: x}]\nmethods: [soup]\n")
    result = CliRunner().invoke(
        bench, ["matrix", str(config), "-o", str(tmp_path / "out"), "--python", "soup=/nowhere/python"], obj=PLUGINS
    )
    assert isinstance(result.exception, ConfigError)
    assert not (tmp_path / "out").exists()


def test_cells_run_in_the_python_that_was_named(tmp_path: Path) -> None:
    """A wrapper of this Python leaves a mark; only the method it is named for runs through it."""
    python = script(tmp_path / "python", f'echo ran >> {tmp_path}/mark\nexec {sys.executable} "$@"')
    model = tmp_path / "model"
    make_checkpoint(model, PLUGINS.architecture_for("qwen2"), {})
    config = MatrixConfig(
        cases=(Case(name="a", model=str(model), steps=1, passes=1, warm_up=0, length=8, lora=LoraPart(rank=2)),),
        methods=(MethodEntry(method="resident"), MethodEntry(method="poros")),
        timeout_s=300,
    )
    other = parse([f"poros={python}"], METHODS)
    assert other.python_of("resident") == sys.executable
    (tmp_path / "mark").unlink()  # it was asked for its versions
    run_matrix(config, tmp_path / "out", PLUGINS, environments=other)
    assert (tmp_path / "mark").read_text() == "ran\n"
    assert {receipt.status for receipt in receipts_in(tmp_path / "out")} == {"ok"}


def test_results_of_another_environment_stand_while_its_versions_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from poros_bench.cell import receipt_of

    config = MatrixConfig(cases=(Case(name="a", model="x"),), methods=(MethodEntry(method="soup"),))
    other = Environments({"soup": "/there/python"})
    there = provenance().model_copy(update={"transformers": "5.0.0"})
    answers = [(there, "0.77.0")]
    monkeypatch.setattr(environments, "_ask", lambda python, distribution: answers[-1])
    (one,) = cells_of(config, tmp_path, PLUGINS, environments=other)
    measured = receipt_of(one.cell, status="ok", provenance=there, method_version="0.77.0")
    measured.append(tmp_path / "receipts.jsonl")
    assert cells_of(config, tmp_path, PLUGINS, environments=other)[0].finished is not None
    assert cells_of(config, tmp_path, PLUGINS)[0].finished is None
    answers.append((there, "0.78.0"))
    assert cells_of(config, tmp_path, PLUGINS, environments=other)[0].finished is None, "the method itself is newer"
