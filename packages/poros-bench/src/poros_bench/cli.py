"""`poros bench` and its verbs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from poros.cli.progress import Display
from poros.errors import ConfigError
from poros.plugins import Plugins
from poros.receipt import Receipt, read_receipts
from poros_bench.config import MatrixConfig, load_matrix
from poros_bench.environments import parse
from poros_bench.matrix import RECEIPTS, matrices_in
from poros_bench.plugin import installed_methods
from poros_bench.report import About, markdown, page_of_html

bench = typer.Typer(help="Compare ways to train on the same work.", invoke_without_command=True)


@bench.callback()
def quick(
    context: typer.Context,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for receipts and plot.")] = Path("poros-bench"),
) -> None:
    """Compare ways to train on the same work; without a verb, a tiny case of each installed family.

    Every method that can run on this machine trains a tiny model of every family, and the parity gate says whether
    Poros equals stock there.

    [bold]Example:[/] poros bench
    """
    if context.invoked_subcommand is not None:
        return
    plugins: Plugins = context.obj
    from poros_bench.quick import run_quick

    with Display() as display:
        receipts, verdicts = run_quick(out, plugins, display.advance)
    _print(receipts, verdicts)
    _write_page(receipts, out, _about(out, receipts, "poros bench"))
    typer.echo(f"receipts: {out / 'receipts.jsonl'}\npage: {out / 'report.md'}")
    raise typer.Exit(0 if all(verdict == "identical" for verdict in verdicts.values()) else 1)


@bench.command()
def matrix(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="A matrix file; see docs/benchmarking.md.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for receipts, logs and made checkpoints.")],
    resume: Annotated[bool, typer.Option("--resume", help="Leave out cells whose result is there.")] = False,
    only: Annotated[str | None, typer.Option(help="Run one cell, as CASE/METHOD; either may be *.")] = None,
    keep_models: Annotated[bool, typer.Option(help="Keep checkpoints that were made.")] = True,
    python: Annotated[
        list[str] | None, typer.Option(help="METHOD=PYTHON: run a method in another environment; repeatable.")
    ] = None,
) -> None:
    """Run every method on every case, each cell in a process of its own.

    Out of memory is a result, a crashed cell doesn't lose the others, and what was finished isn't run again with
    --resume. Exit code 1 if a cell ended with an error.

    [bold]Example:[/] poros bench matrix configs/bench/tiny_cpu.yaml -o runs/tiny
    """
    plugins: Plugins = context.obj
    installed = installed_methods(plugins)
    settings = load_matrix(config, installed)
    environments = parse(python or [], installed)
    _check_hardware(settings)
    from poros_bench.matrix import run_matrix

    with Display() as display:
        receipts = run_matrix(
            settings,
            out,
            plugins,
            resume=resume,
            only=only,
            keep_models=keep_models,
            environments=environments,
            announce=display.advance,
        )
    _print(receipts, {})
    typer.echo(f"receipts: {out / 'receipts.jsonl'}")
    raise typer.Exit(1 if any(receipt.status == "error" for receipt in receipts) else 0)


@bench.command()
def report(
    out: Annotated[Path, typer.Argument(help="Folder of a matrix, or a file of receipts.")],
    format_: Annotated[str, typer.Option("--format", help="md or html.")] = "md",
    plot: Annotated[bool, typer.Option(help="Draw plots beside the page.")] = True,
    title: Annotated[str, typer.Option(help="Heading of the page; the matrix's own by default.")] = "",
    reproduce: Annotated[str, typer.Option(help="Command that the page names for making the receipts.")] = "",
    to: Annotated[
        Path | None, typer.Option(help="The page; by default report.md or report.html beside the receipts.")
    ] = None,
) -> None:
    """Make a page from receipts.

    [bold]Example:[/] poros bench report runs/tiny --format html
    """
    if format_ not in ("md", "html"):
        raise ConfigError(f"--format {format_} is neither md nor html")
    receipts = _receipts(out)
    folder = out if out.is_dir() else out.parent
    about = _about(out, receipts, reproduce or f"poros bench matrix CONFIG.yaml -o {folder.name}", title)
    page = _write_page(receipts, folder, about, plot, format_, to)
    typer.echo(f"page: {page}")


@bench.command()
def compare(
    one: Annotated[Path, typer.Argument(help="Folder or file of receipts.")],
    other: Annotated[Path, typer.Argument(help="Another one.")],
    anyway: Annotated[bool, typer.Option("--anyway", help="Compare under unequal conditions as well.")] = False,
) -> None:
    """Show where two sets of receipts differ by more than their spread.

    Cells are matched by case and method. Exit code 1 if some were measured under unequal conditions, which are named.

    [bold]Example:[/] poros bench compare runs/before runs/after
    """
    from poros_bench.fairness import beyond_spread, differences

    table = Table(title=f"{one} against {other}", title_justify="left")
    for column in ("case", "method", "s per step", "s per step", "ratio", "beyond the spread"):
        table.add_column(column)
    others = {(receipt.case, receipt.method): receipt for receipt in _receipts(other)}
    unequal = matched = 0
    for receipt in _receipts(one):
        counterpart = others.get((receipt.case, receipt.method))
        if counterpart is None or receipt.s_step_median is None or counterpart.s_step_median is None:
            continue
        matched += 1
        found = differences(receipt, counterpart)
        times = (f"{receipt.s_step_median:.4f}", f"{counterpart.s_step_median:.4f}")
        if found and not anyway:
            unequal += 1
            table.add_row(receipt.case, receipt.method, *times, "-", f"unequal: {', '.join(found)}")
            continue
        beyond = {True: "yes", False: "no", None: "unknown: one pass"}[beyond_spread(receipt, counterpart)]
        share = counterpart.s_step_median / receipt.s_step_median
        table.add_row(receipt.case, receipt.method, *times, f"{share:.3f}", beyond)
    if not matched:
        raise ConfigError(f"{one} and {other} have no measured cell in common", "cells are matched by case and method")
    Console(highlight=False).print(table)
    if unequal:
        typer.echo(f"{unequal} of {matched} cells ran under unequal conditions; --anyway compares them all the same")
    raise typer.Exit(1 if unequal else 0)


@bench.command("methods")
def methods(context: typer.Context) -> None:
    """List the methods that could be compared, and what they lack here.

    [bold]Example:[/] poros bench methods
    """
    table = Table()
    for column in ("method", "what it is", "missing"):
        table.add_column(column)
    for method in installed_methods(context.obj).values():
        table.add_row(method.name, method.description, ", ".join(method.missing()) or "-")
    Console(highlight=False).print(table)


def _receipts(path: Path) -> list[Receipt]:
    """The newest receipt of every cell; of a folder those of its matrix as it is now."""
    file = path / RECEIPTS if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"there are no receipts at {file}", "give a matrix's folder or a .jsonl file")
    found = enumerate(read_receipts(file, torn=True))
    newest = {receipt.config.get("key", str(number)): receipt for number, receipt in found}
    cells = _cells(path)
    keys = [cell["key"] for cell in cells] if cells else list(newest)
    wanted = (newest[key] for key in keys if key in newest)
    return [receipt for receipt in wanted if receipt.kind == "cell" and "case" in receipt.config]


def _cells(path: Path) -> list[dict[str, str]]:
    return [cell for matrix_ in matrices_in(path).values() for cell in matrix_["cells"]]


def _about(path: Path, receipts: list[Receipt], reproduce: str, title: str = "") -> About:
    matrices = matrices_in(path)
    there = {receipt.config.get("key") for receipt in receipts}
    missing = [f"{cell['case']}, {cell['method']}" for cell in _cells(path) if cell["key"] not in there]
    note = " ".join(dict.fromkeys(matrix_["note"] for matrix_ in matrices.values() if matrix_["note"]))
    return About(title or " / ".join(filter(None, matrices)) or "Benchmark", reproduce, note, missing)


def _write_page(
    receipts: list[Receipt],
    folder: Path,
    about: About,
    plot: bool = True,
    format_: str = "md",
    to: Path | None = None,
) -> Path:
    from poros_bench.plots import draw

    page = to or folder / f"report.{format_}"
    page.parent.mkdir(parents=True, exist_ok=True)
    plots = page.parent / f"{page.stem}-plots" if to else page.parent / "plots"
    pictures = [f"{plots.name}/{name}" for name in draw(receipts, plots)] if plot else []
    text = markdown(receipts, dataclasses.replace(about, pictures=pictures))
    page.write_text(page_of_html(text, about.title) if format_ == "html" else text, encoding="utf-8")
    return page


def _check_hardware(config: MatrixConfig) -> None:
    from poros.provenance import gpu_name

    if config.hardware == "cuda" and gpu_name() is None:
        raise ConfigError("this matrix is for a GPU, and there is none here", "take configs/bench/tiny_cpu.yaml")


def _print(receipts: list[Receipt], verdicts: dict[str, str]) -> None:
    table = Table()
    for column in ("case", "method", "s per step", "spread", "reserved GB", "equal to stock", "status"):
        table.add_column(column)
    for receipt in receipts:
        table.add_row(
            receipt.case,
            receipt.method,
            "-" if receipt.s_step_median is None else f"{receipt.s_step_median:.4f}",
            "-" if receipt.s_step_std is None else f"{receipt.s_step_std:.4f}",
            "-" if receipt.vram_reserved_gb is None else f"{receipt.vram_reserved_gb:.2f}",
            verdicts.get(receipt.case, "-") if receipt.method.startswith("poros") else "-",
            receipt.status if receipt.reason is None else f"{receipt.status}: {receipt.reason[:60]}",
        )
    Console(highlight=False).print(table)
