"""The tables of the documents are what the receipts say."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from poros.receipt import read_receipts

ROOT = Path(__file__).parents[1]
VALIDATION = ROOT / "validation"
STACKS = sorted((ROOT / "stacks").glob("*.txt"))


def load(path: Path) -> Any:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(f"validation_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables() -> list[str]:
    return load(VALIDATION / "tables.py").tables()


@pytest.fixture(scope="module")
def stacks() -> Any:
    return load(VALIDATION / "stacks.py")


def test_tables_are_those_of_the_receipts(tables: list[str]) -> None:
    page = (VALIDATION / "README.md").read_text()
    assert all(len(table.splitlines()) > 2 for table in tables)
    for table in tables:
        assert table in page
    assert tables[0] in (ROOT / "README.md").read_text()
    exceptions = load(VALIDATION / "tables.py").exceptions()
    assert len(exceptions.splitlines()) == 2 + 3
    assert exceptions in (ROOT / "docs" / "planning.md").read_text()


@pytest.mark.parametrize(("limited", "said"), [(True, ", kept to"), ("broken", ", broken"), (False, ""), (None, "")])
def test_a_broken_budget_is_told_from_one_that_was_kept(tmp_path: Path, limited: Any, said: str) -> None:
    last = read_receipts(VALIDATION / "cells_h200_planned.jsonl")[-1]
    last.model_copy(update={"config": {**last.config, "limited": limited}}).append(tmp_path / "cells.jsonl")
    row = load(VALIDATION / "tables.py").planned(str(tmp_path / "cells.jsonl")).splitlines()[-1]
    assert row.split(" | ")[2] == f"smallest{said}"


@pytest.mark.parametrize("file", sorted(path.name for path in VALIDATION.glob("*.jsonl")))
def test_every_receipt_is_valid_and_described(file: str) -> None:
    assert read_receipts(VALIDATION / file)
    page = (VALIDATION / "README.md").read_text()
    assert file in page or f"{file.partition('h200')[0]}h200*" in page


def test_the_table_of_stacks_is_what_was_found(stacks: Any) -> None:
    assert stacks.table() in (ROOT / "docs" / "stacks.md").read_text()
    assert " failed" not in stacks.table()


def found_wrong(columns: dict[str, Any], shown: tuple[str, ...]) -> list[str]:
    """Why a table is not what one tree gave on the stacks of this one."""
    pinned = {path.stem: dict(re.findall(r"^([\w-]+)==([\w.]+)", path.read_text(), re.M)) for path in STACKS}
    wrong = [] if columns.keys() == pinned.keys() else ["a column of its own for every stack"]
    if len({column["commit"] for column in columns.values()}) != 1:
        wrong.append("of several commits")
    for stack, column in columns.items():
        installed = column.get("installed", {})
        if not re.fullmatch("[0-9a-f]{7,40}", column["commit"]):
            wrong.append(f"{stack}: {column['commit']} is no commit")
        if set(shown) - installed.keys():
            wrong.append(f"{stack}: the versions that were installed are not kept")
        for name, version in pinned.get(stack, {}).items():
            if name in installed and installed[name].partition("+")[0] != version:
                wrong.append(f"{stack}: {name} {installed[name]} is not what the stack pins")
    return wrong


def test_the_table_of_stacks_is_of_one_tree(stacks: Any) -> None:
    """Which a column without the installed versions, or of a tree that no commit holds, would not show."""
    text = stacks.RESULTS.read_text()
    assert found_wrong(json.loads(text), stacks.SHOWN) == []
    for damage, words in (
        (lambda columns: columns["torch211"].pop("installed"), "torch211: the versions that were installed"),
        (lambda columns: columns["torch212"]["installed"].pop("peft"), "torch212: the versions that were installed"),
        (lambda columns: columns["torch210"]["installed"].update(torch="2.9.0"), "torch 2.9.0 is not what"),
        (lambda columns: columns["torch213"].update(commit="0123456"), "of several commits"),
        (lambda columns: [c.update(commit=f"{c['commit']}-dirty") for c in columns.values()], "-dirty is no commit"),
        (lambda columns: columns.pop("torch210"), "for every stack"),
    ):
        columns = json.loads(text)
        damage(columns)
        assert any(words in problem for problem in found_wrong(columns, stacks.SHOWN)), words


XML = """<testsuites><testsuite>
<testcase classname="packages.poros-arch-qwen.tests.test_qwen2.TestQwen2" name="test_one" />
<testcase classname="packages.poros-arch-qwen.tests.test_qwen2" name="test_two" />
<testcase classname="packages.poros-core.tests.engine.test_x.TestAnything" name="test_three">
<skipped type="pytest.xfail" /></testcase>
<testcase classname="packages.poros-core.tests.engine.test_x" name="test_four"><skipped type="pytest.skip" /></testcase>
<testcase classname="packages.poros-core.tests.test_config" name="test_five" />
<testcase classname="" name="packages.poros-core.tests.parity.test_gate">{bad}</testcase>
</testsuite></testsuites>"""


def test_every_test_is_counted(stacks: Any, tmp_path: Path) -> None:
    xml, results = tmp_path / "results.xml", tmp_path / "stacks.json"
    xml.write_text(XML.replace("{bad}", "<error />"))
    assert stacks.collect("torch9", xml, results) is False
    column = json.loads(results.read_text())["torch9"]
    assert column["rows"] == {
        "TestQwen2": {"passed": 1},
        "poros-arch-qwen": {"passed": 1},
        "engine": {"xfailed": 1, "skipped": 1},
        "parity": {"failed": 1},
        "poros-core": {"passed": 1},
    }
    assert column["installed"]["torch"] == importlib.metadata.version("torch")
    xml.write_text(XML.replace("{bad}", ""))
    assert stacks.collect("torch9", xml, results) is True  # a run replaces what the last one found
    assert "failed" not in stacks.table(results).replace("xfailed", "")


def test_both_forms_of_a_column_are_shown(stacks: Any, tmp_path: Path) -> None:
    results = tmp_path / "stacks.json"
    old = {"commit": "0123456", "pinned": {"torch": "1.0"}, "rows": {"engine": {"passed": 7}}}
    new = {"commit": "89abcde", "installed": {"torch": "2.0+cpu", "tokenizers": "3.0"}}
    new |= {"rows": {"engine": {"passed": 8}, "poros-core": {"passed": 1}}}
    results.write_text(json.dumps({"old": old, "new": new}))
    assert stacks.table(results).splitlines() == [
        "| | old | new |",
        "|---|---|---|",
        "| commit | 0123456 | 89abcde |",
        "| versions | pinned | installed |",
        "| torch | 1.0 | 2.0+cpu |",
        "| tokenizers | - | 3.0 |",
        "| engine | 7 passed | 8 passed |",
        "| core, other tests | - | 1 passed |",
    ]


@pytest.mark.parametrize(
    "name",
    ["packages.poros-arch-qwen.tests.test_llama.TestLlama", "packages.poros-arch-llama.tests.test_x", "test_y", ""],
)
def test_a_test_without_a_row_is_an_error(stacks: Any, name: str) -> None:
    with pytest.raises(ValueError, match="ROWS"):
        stacks.row_of(name)


class Session:
    """Stands for a session of nox: writes down what it is asked, and builds wheels that are empty files."""

    def __init__(self, folder: Path, *posargs: str) -> None:
        self.folder, self.posargs, self.asked = folder, posargs, []

    def create_tmp(self) -> str:
        return str(self.folder)

    def install(self, *words: str) -> None:
        self.asked.append(("install", *words))

    def run(self, *words: str, **options: Any) -> None:
        self.asked.append(words)
        if "--outdir" in words:
            out = Path(words[words.index("--outdir") + 1])
            out.mkdir(exist_ok=True)
            (out / f"{Path(words[-1]).name}-2.whl").touch()


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> Any:
    """noxfile.py, where nox needn't be installed."""
    stand_in: Any = ModuleType("nox")
    stand_in.needs_version, stand_in.options = "", SimpleNamespace()
    stand_in.session = lambda function=None, **options: function or (lambda one: one)
    monkeypatch.setitem(sys.modules, "nox", stand_in)
    return load(ROOT / "noxfile.py")


def test_a_proof_runs_on_the_wheels_of_this_tree(sessions: Any, tmp_path: Path) -> None:
    """Versions stay the same while code changes: pip takes what is installed for the new wheel unless it is forced."""
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "poros_core-1.whl").touch()
    session = Session(tmp_path)
    sessions.parity_torch210(session)
    wheels = sorted(str(tmp_path / "wheels" / f"{name}-2.whl") for name in sessions.PACKAGES)
    assert [wheel for wheel in map(str, (tmp_path / "wheels").iterdir()) if wheel not in wheels] == []
    first = next(words for words in session.asked if words[0] == "install" and wheels[0] in words)
    assert {"--force-reinstall", "--no-deps", *wheels} < set(first)
    assert session.asked[-1][:4] == ("python", "validation/stacks.py", "collect", "torch210")
    partial = Session(tmp_path, "-k", "something")
    sessions.parity_torch210(partial)
    assert partial.asked[-1] == ("pytest", "-n", "2", "-k", "something")  # and nothing is written down


def test_what_breaks_exactness_is_as_large_as_the_page_says() -> None:
    page = (ROOT / "docs" / "exactness.md").read_text()
    module = load(VALIDATION / "what_breaks_it.py")
    assert module.table() in page
    assert load(VALIDATION / "tables.py").default_path() in page
    kept = json.loads(module.RESULTS.read_text())["sizes"]
    found = module.measure()["sizes"]
    assert found.keys() == kept.keys() == module.CASES.keys()
    for name, size in kept.items():
        for one in (size, found[name]):
            assert one["gradients"] == size["gradients"] > 0, name
            # A case that breaks nothing breaks nothing here either, and one that should breaks something.
            if name != module.RARE:
                assert (one["differ"] == 0) == (one["last"] == 0) == (name in module.EQUAL), name
        for step in ("first", "last") if name != module.RARE else ():
            if size[step]:  # another CPU rounds otherwise, but it rounds
                assert size[step] / 10 < found[name][step] < size[step] * 10, (name, step)
            else:
                assert found[name][step] == 0, (name, step)


def test_pages_of_results_are_made_from_receipts(tmp_path: Path) -> None:
    module = load(VALIDATION / "pages.py")
    assert set(module.PAGES) == {folder.name for folder in (VALIDATION / "bench").iterdir()}
    pages = module.make(tmp_path)
    assert {page.name for page in pages} == {page.name for page in (ROOT / "docs" / "results").glob("*.md")}
    for page in pages:
        assert page.read_text() == (ROOT / "docs" / "results" / page.name).read_text()
        drawn = {picture.name for picture in (tmp_path / f"{page.stem}-plots").glob("*.png")}
        assert drawn == {picture.name for picture in (ROOT / "docs" / "results" / f"{page.stem}-plots").glob("*.png")}
