"""Collects what the parity sessions found on each stack, and prints it as a table.

    python validation/stacks.py collect torch213 results.xml     (from `nox -s parity-torch213 -- ... --junitxml results.xml`)
    python validation/stacks.py                                  prints the table
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "stacks.json"

ROWS = {
    "TestQwen2": "Qwen2, Qwen2.5",
    "TestQwen3": "Qwen3",
    "TestGemma3": "Gemma 3, text",
    "TestGemma3Multimodal": "Gemma 3, multimodal",
    "TestGemma4": "Gemma 4, text",
    "TestGemma4Multimodal": "Gemma 4, multimodal",
    "checkpoint": "checkpoint reading",
    "engine": "engine",
    "parity": "gate",
}


def row_of(classname: str) -> str | None:
    """Which row a test belongs to, by the class or the folder it is in."""
    parts = classname.split(".")
    return next((part for part in reversed(parts) if part in ROWS), None)


def collect(stack: str, xml: Path) -> None:
    """Add the results of one run; rows of which it has no test stay as they are."""
    counts: dict[str, Counter[str]] = {row: Counter() for row in ROWS}
    for case in ElementTree.parse(xml).iter("testcase"):
        row = row_of(case.get("classname", ""))
        if row is None:
            continue
        bad = case.find("failure") is not None or case.find("error") is not None
        skipped = case.find("skipped")
        xfailed = skipped is not None and skipped.get("type") == "pytest.xfail"
        counts[row]["failed" if bad else "xfailed" if xfailed else "skipped" if skipped is not None else "passed"] += 1
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    fresh = {row: dict(sorted(count.items())) for row, count in counts.items() if count}
    results[stack] = {row: {**results.get(stack, {}), **fresh}.get(row, {}) for row in ROWS}
    RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")


def table() -> str:
    """Rows: families and parts; columns: stacks; cells: tests passed, and what else."""
    results = json.loads(RESULTS.read_text())
    versions = {
        stack: dict(
            line.split("==") for line in (HERE.parent / "stacks" / f"{stack}.txt").read_text().splitlines() if "==" in line
        )
        for stack in results
    }
    names = ("torch", "transformers", "peft", "bitsandbytes")
    lines = ["| | " + " | ".join(results) + " |", "|---|" + "---|" * len(results)]
    lines += ["| " + " | ".join([name, *(versions[stack][name] for stack in results)]) + " |" for name in names]
    for row, title in ROWS.items():
        cells = []
        for stack in results:
            count = results[stack][row]
            others = [f"{number} {what}" for what, number in count.items() if what in ("failed", "xfailed")]
            cells.append(", ".join([f"{count.get('passed', 0)} passed", *others]))
        lines.append("| " + " | ".join([title, *cells]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["collect"]:
        collect(sys.argv[2], Path(sys.argv[3]))
    print(table())
