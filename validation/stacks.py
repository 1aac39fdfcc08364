"""Collects what the parity sessions found on each stack, and prints it as a table.

    python validation/stacks.py collect torch213 results.xml     `nox -s parity-torch213` does that, in its environment
    python validation/stacks.py                                  prints the table

A column is one run of the whole proof: a run replaces it. It holds the commit of the tree that ran, the versions that
were installed where the tests ran, and how many tests of each row passed, failed and so on. Columns from before
this was kept hold the versions that the stack's file pinned, and lack the tests that stand in no class.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "stacks.json"

ROWS = {
    "TestQwen2": "Qwen2, Qwen2.5",
    "TestQwen3": "Qwen3",
    "poros-arch-qwen": "Qwen, other tests",
    "TestGemma3": "Gemma 3, text",
    "TestGemma3Multimodal": "Gemma 3, multimodal",
    "TestGemma4": "Gemma 4, text",
    "TestGemma4Multimodal": "Gemma 4, multimodal",
    "poros-arch-gemma": "Gemma, other tests",
    "checkpoint": "checkpoint reading",
    "engine": "engine",
    "parity": "gate",
    "poros-core": "core, other tests",
}
"""Class of a conformance suite, folder of core's tests, or package (for what is in neither) -> its title."""

SHOWN = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "tokenizers", "safetensors")
"""Whose versions are kept."""

OUTCOMES = ("passed", "failed", "xfailed", "skipped")


def row_of(classname: str) -> str:
    """Which row a test belongs to, by the class or the folder it is in, or else by its package.

    Args:
        classname: As in pytest's XML: `packages.poros-arch-qwen.tests.test_qwen2.TestQwen2`.

    Raises:
        ValueError: no row is made for it.
    """
    parts = classname.split(".")
    package = parts[1] if parts[0] == "packages" and len(parts) > 3 else None
    if package == "poros-core":
        return parts[3] if parts[3] in ROWS else package
    classes = [part for part in parts if part.startswith("Test")]
    row = classes[0] if classes else package
    if package not in ROWS or row not in ROWS:
        raise ValueError(f"no row of the table is for {classname}: give it one in ROWS")
    return row


def count(xml: Path) -> dict[str, dict[str, int]]:
    """Row -> outcome -> tests, of every test in one file of pytest's."""
    counts: dict[str, Counter[str]] = {row: Counter() for row in ROWS}
    for case in ElementTree.parse(xml).iter("testcase"):
        bad = case.find("failure") is not None or case.find("error") is not None
        skipped = case.find("skipped")
        xfailed = skipped is not None and skipped.get("type") == "pytest.xfail"
        outcome = "failed" if bad else "xfailed" if xfailed else "skipped" if skipped is not None else "passed"
        # A file that can't be read is a case without a class, under its own name.
        counts[row_of(case.get("classname") or case.get("name", ""))][outcome] += 1
    if not any(counts.values()):
        raise ValueError(f"{xml} holds no tests")
    return {row: {one: found[one] for one in OUTCOMES if found[one]} for row, found in counts.items() if found}


def commit() -> str:
    """The commit of this tree, marked if tracked files differ from it; what the stacks before found doesn't count."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=HERE, check=True, capture_output=True, text=True).stdout

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude,top)validation/stacks.json")
    return git("rev-parse", "--short=7", "HEAD").strip() + ("-dirty" if changed.strip() else "")


def collect(stack: str, xml: Path, results: Path = RESULTS) -> bool:
    """Write the results of one run of the proof, which ran in this environment; whether all is well."""
    columns = json.loads(results.read_text()) if results.exists() else {}
    rows = count(xml)
    versions = {name: importlib.metadata.version(name) for name in SHOWN}
    columns[stack] = {"commit": commit(), "installed": versions, "rows": rows}
    results.write_text(json.dumps(dict(sorted(columns.items())), indent=1) + "\n")
    return not any("failed" in found for found in rows.values())


def table(results: Path = RESULTS) -> str:
    """Rows: families and parts; columns: stacks; cells: tests passed, and what else. "-" is what wasn't kept."""
    columns: dict[str, dict[str, Any]] = json.loads(results.read_text())

    def line(title: str, cells: list[str]) -> str:
        return "| " + " | ".join([title, *cells]) + " |"

    lines = [line("", list(columns)), "|---|" + "---|" * len(columns)]
    lines.append(line("commit", [column["commit"] for column in columns.values()]))
    lines.append(line("versions", ["installed" if "installed" in column else "pinned" for column in columns.values()]))
    kept = [column.get("installed") or column["pinned"] for column in columns.values()]
    lines += [line(name, [one.get(name, "-") for one in kept]) for name in SHOWN if any(name in one for one in kept)]
    for row, title in ROWS.items():
        found = [column["rows"].get(row, {}) for column in columns.values()]
        if any(found):
            cells = [", ".join(f"{one[what]} {what}" for what in OUTCOMES if what in one) or "-" for one in found]
            lines.append(line(title, cells))
    return "\n".join(lines).replace("|  |", "| |", 1)


if __name__ == "__main__":
    well = True
    if sys.argv[1:2] == ["collect"]:
        well = collect(sys.argv[2], Path(sys.argv[3]))
    print(table())
    sys.exit(0 if well else 1)
