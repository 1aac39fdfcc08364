"""`poros doctor`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from poros.plugins import Plugins


def doctor(
    context: typer.Context,
    path: Annotated[Path, typer.Option(help="Where runs will write, to look at its disk.")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look at this machine: versions, CUDA, bitsandbytes, memory, pinning, disk, families.

    Exit code 0 if nothing stands in the way of training, 1 otherwise.

    [bold]Example:[/] poros doctor
    """
    loaded: Plugins = context.obj
    from poros.doctor import examine

    findings = examine(loaded, path)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings]))
    else:
        colors = {"ok": "green", "warning": "yellow", "error": "red"}
        table = Table()
        for column in ("what", "", "found", "hint"):
            table.add_column(column, overflow="fold")
        for finding in findings:
            table.add_row(finding.what, f"[{colors[finding.state]}]{finding.state}[/]", finding.found, finding.hint)
        Console(highlight=False).print(table)
    raise typer.Exit(1 if any(finding.state == "error" for finding in findings) else 0)
