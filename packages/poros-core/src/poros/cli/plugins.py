"""`poros plugins`."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from poros.plugins import Plugins


def plugins(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the installed plugins: versions, families, model types, hooks.

    [bold]Example:[/] poros plugins --json
    """
    loaded: Plugins = context.obj
    infos = loaded.infos()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(info) for info in infos]))
        return
    if not infos:
        Console(highlight=False).print("no plugins are installed; try: python -m pip install poros-arch-qwen")
        return
    table = Table()
    for column in ("plugin", "distribution", "version", "families", "model types", "hooks"):
        table.add_column(column)
    for info in infos:
        table.add_row(
            info.name,
            info.distribution,
            info.version,
            ", ".join(info.families) or "-",
            ", ".join(info.model_types) or "-",
            ", ".join(info.hooks) or "-",
        )
    Console(highlight=False).print(table)
