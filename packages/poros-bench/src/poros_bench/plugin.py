"""poros-bench as a plugin of Poros: its hook, its methods and the verb `poros bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import typer
from rich.console import Console
from rich.table import Table

from poros import hookimpl
from poros.plugins import Plugins
from poros_bench import hookspecs
from poros_bench.methods import POROS, RESIDENT, Method

poros_hookspecs = (hookspecs,)
"""Hook specifications that Poros adds to its own when it loads this plugin."""

bench = typer.Typer(help="Compare ways to train on the same work.", no_args_is_help=True)


@hookimpl
def poros_commands(app: typer.Typer) -> None:
    """Add `poros bench`."""
    app.add_typer(bench, name="bench")


@hookimpl
def poros_bench_methods() -> Sequence[Method]:
    """The methods of this package."""
    return (POROS, RESIDENT)


@bench.callback()
def compare() -> None:
    """Compare ways to train on the same work."""


@bench.command("methods")
def methods(context: typer.Context) -> None:
    """List the methods that could be compared, and what they lack here.

    [bold]Example:[/] poros bench methods
    """
    plugins: Plugins = context.obj
    table = Table()
    for column in ("method", "what it is", "missing"):
        table.add_column(column)
    for method in cast(Sequence[Method], plugins.methods()):
        table.add_row(method.name, method.description, ", ".join(method.missing()) or "-")
    Console(highlight=False).print(table)
