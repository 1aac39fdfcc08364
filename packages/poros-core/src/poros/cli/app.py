"""The entry point: verbs, plugins' verbs, and errors as a message and a hint.

Exit codes: 0 success; 1 it ran, and the answer is no; 2 the call or an input was wrong; 3 a defect; 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from poros import __version__
from poros.cli.check import check
from poros.cli.doctor import doctor
from poros.cli.plan import plan
from poros.cli.plugins import plugins as list_plugins
from poros.cli.train import train
from poros.errors import PorosError
from poros.plugins import Plugins, load_plugins


def make_app(plugins: Plugins) -> typer.Typer:
    """The typer application with every verb, plugins' own included."""
    app = typer.Typer(
        name="poros",
        help="Exact QLoRA with VRAM as a dial: the frozen NF4 base streams through the GPU block by block, "
        "and the result is bit for bit the ordinary run's.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def poros(
        context: typer.Context,
        version: Annotated[
            bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
        ] = False,
    ) -> None:
        context.obj = plugins

    app.command()(train)
    app.command()(plan)
    app.command()(check)
    app.command()(doctor)
    app.command("plugins")(list_plugins)
    plugins.commands(app)
    return app


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """The console script `poros`."""
    if sys.platform == "linux" and "PYTORCH_ALLOC_CONF" not in os.environ:
        # Torch's allocator in pieces that can grow: less lies idle between tensors that come and go. What the user has
        # set stays.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    warnings.filterwarnings("ignore", category=FutureWarning)  # for the authors of libraries, not for users
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of a CPU kernel that training never uses
    try:
        make_app(load_plugins())(prog_name="poros")
    except PorosError as error:
        show_error(error)
        sys.exit(2)
    except Exception:  # noqa: BLE001 - 1 means "the answer is no"; a defect of ours must not look like one
        traceback.print_exc()
        Console(stderr=True, highlight=False).print(
            "this is a defect of Poros or of a library below it; please report it with the lines above"
        )
        sys.exit(3)


def show_error(error: PorosError) -> None:
    """Print an error's message and hint to stderr."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[bold red]error:[/] {escape(error.message)}")
    if error.hint:
        console.print(f"[bold]hint:[/] {escape(error.hint)}")


if __name__ == "__main__":
    main()
