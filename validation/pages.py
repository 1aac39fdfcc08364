"""Makes the pages under docs/results/ from the receipts under validation/bench/.

    python validation/pages.py                (or another folder than docs/results, to look first)
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

PAGES = {
    "tiny_cpu": "poros bench matrix configs/bench/tiny_cpu.yaml -o runs/tiny_cpu",
}
"""Folder of receipts -> the command that has made them."""


def make(out: Path) -> list[Path]:
    """Write every page, and its pictures beside it."""
    pages = []
    for name, command in PAGES.items():
        page = out / f"{name}.md"
        arguments = [str(HERE / "bench" / name), "--to", str(page), "--reproduce", command]
        code = "from poros.cli.app import main; main()"
        subprocess.run([sys.executable, "-c", code, "bench", "report", *arguments], check=True)
        pages.append(page)
    return pages


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parent / "docs" / "results")
