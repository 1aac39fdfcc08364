"""`poros plan`: no weights, no download, no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from poros.architecture import Architecture
from poros.config import LoraPart, StreamConfig, assigned, parse_size, validated
from poros.errors import BudgetError, CheckpointError, ConfigError
from poros.plan.cards import CARDS, Card, card_named, find_card
from poros.plan.fit import dimensions_of, fit, fixed_settings, make_job, stock_bytes
from poros.plan.job import Job
from poros.plan.published import figures_of
from poros.plan.search import Plan, curve, describe, smallest_plan
from poros.plugins import Plugins
from poros.provenance import gpu_name


def plan(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A directory, or a published shape, e.g. qwen2.5-32b.")],
    vram: Annotated[
        str | None, typer.Option(help="GPU memory of the whole process, as 12GB. By default all of the card's.")
    ] = None,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of the longest row.")] = 1024,
    padded: Annotated[
        bool, typer.Option("--padded/--unpadded", help="Whether rows may be padded and differ in length.")
    ] = True,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a micro-batch.")] = 1,
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches per optimizer step.")] = 1,
    rank: Annotated[int, typer.Option(min=1, help="Of the adapters, on all linear layers.")] = 16,
    dropout: Annotated[float, typer.Option(min=0, max=0.99, help="Of the adapters' inputs.")] = 0.0,
    gpu: Annotated[str | None, typer.Option(help="A card by name, e.g. rtx-4090. By default the one in here.")] = None,
    host_ram: Annotated[
        str | None, typer.Option(help="Host memory of the process, as 64GB. Unlimited by default.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A key of `stream` that is to stay, e.g. slots=2."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON and nothing else.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the curve into this .png or .svg file.")] = None,
) -> None:
    """Say where everything would live for a GPU memory budget, and how long a step would take.

    Nothing is read but `config.json`. Times of cards other than the H200 are estimates from their makers' figures.
    Exit code 1 if nothing fits.

    [bold]Example:[/] poros plan qwen2.5-32b --vram 12GB --gpu rtx-4070 --seq 2048
    """
    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise ConfigError(f"--plot {plot} is neither a .png nor a .svg file", "give the file such a name")
    card, note = _card(gpu)
    architecture, values = _find(model, context.obj)
    settings = assigned(set_ or ())
    for key, instead in (("vram", "--vram"), ("tokens", "--seq and --batch")):
        if key in settings:
            raise ConfigError(f"--set {key}=... says nothing to a plan", f"use {instead}")
    stream = validated(StreamConfig, settings, "stream")
    lora = LoraPart(rank=rank, dropout=dropout)
    dimensions = dimensions_of(architecture, values)
    job = make_job(dimensions, lora, batch * seq, accumulate, stream, True, batch, padded)
    budget = _size("--vram", vram) if vram is not None else round(card.vram_gb * 1e9)
    host_bytes = None if host_ram is None else _size("--host-ram", host_ram)
    try:
        chosen = fit(job, card, budget, stream, host_bytes)
    except BudgetError as error:
        if as_json:
            try:
                smallest = smallest_plan(job, card, stream, fixed_settings(stream), host_bytes).to_json()
            except BudgetError:
                smallest = None  # there is none with so little host memory
            answer = {"fits": False, "message": error.message, "hint": error.hint, "smallest": smallest}
            typer.echo(json.dumps(answer))
        else:
            Console(stderr=True, soft_wrap=True, highlight=False).print(
                f"{error.message}\n[bold]what helps:[/] {error.hint}"
            )
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps({"fits": True, "model": model, "card": card.id, "note": note, **chosen.to_json()}))
    if as_json and plot is None:
        return
    plans = curve(job, card, base=stream, fixed=fixed_settings(stream), host_bytes=host_bytes)
    stock = (stock_bytes(job, card) / 1e9, describe(job, _ALL_RESIDENT, card).seconds.computing)
    if plot is not None:
        from poros.plan.drawing import draw_curve

        title = f"{model}, {accumulate} x {batch * seq} tokens, rank {rank}, {card.name}"
        draw_curve(plot, title, plans, chosen, stock, figures_of(model) if batch * seq * accumulate == 512 else [])
    if not as_json:
        _print(Console(soft_wrap=True, highlight=False), model, job, card, note, chosen, plans, stock)
        if plot is not None:
            typer.echo(f"curve: {plot}")


_ALL_RESIDENT = StreamConfig(resident="all", recompute=False)


def _card(name: str | None) -> tuple[Card, str]:
    if name is not None:
        return find_card(name), ""
    here = gpu_name()
    if here is None:
        return CARDS["rtx-4090"], "no GPU here: planned for an RTX 4090; name another with --gpu"
    known = card_named(here)
    if known is None:
        return CARDS["rtx-4090"], f"{here} is not known: planned for an RTX 4090; name another with --gpu"
    return known, ""


def _size(flag: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from error


def _find(model: str, plugins: Plugins) -> tuple[Architecture, dict[str, Any]]:
    """The family and the values of `config.json` that a name means.

    Raises:
        CheckpointError: there is neither such a directory nor such a shape.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        try:
            values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            model_type = values["model_type"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{directory} has no config.json with a model_type", "give a checkpoint's directory"
            ) from error
        return plugins.architecture_for(str(model_type)), values
    found = plugins.published(model)
    if found is None:
        ids = [shape.id for family in plugins.architectures() for shape in family.published]
        raise CheckpointError(
            f"there is neither a directory nor a published shape {model!r}",
            f"download the checkpoint's config.json, or take one of {', '.join(ids)}",
        )
    family, shape = found
    return family, dict(shape.config)


def _print(
    console: Console,
    model: str,
    job: Job,
    card: Card,
    note: str,
    chosen: Plan,
    plans: Sequence[Plan],
    stock: tuple[float, float],
) -> None:
    console.print(f"[bold]{model}[/], {job.micro_batches} x {job.tokens} tokens a step, rank {job.rank}, {card.name}")
    if note:
        console.print(f"[yellow]{note}[/]")
    table = Table(title="where things live", title_justify="left")
    table.add_column("component")
    table.add_column("GPU memory, GB", justify="right")
    table.add_column("host memory, GB", justify="right")
    names = dict.fromkeys((*chosen.device, *chosen.host))
    for name in names:
        sizes = chosen.device.get(name, 0), chosen.host.get(name, 0)
        if any(sizes):
            table.add_row(name, *("" if size == 0 else f"{size / 1e9:.2f}" for size in sizes))
    table.add_section()
    table.add_row("whole process", f"{chosen.device_bytes / 1e9:.2f}", f"{chosen.host_bytes / 1e9:.2f}")
    console.print(table)
    for line in chosen.summary():
        console.print(line)
    settings = chosen.stream.model_dump(exclude_defaults=True, exclude={"vram", "tokens"})
    console.print(f"settings: {', '.join(f'{name}={value}' for name, value in settings.items()) or 'the usual ones'}")
    curve_table = Table(title="GPU memory against seconds per step", title_justify="left")
    for column in ("GB", "s per step", "bound by", "blocks on the GPU"):
        curve_table.add_column(column, justify="right")
    curve_table.add_column("", no_wrap=True)
    slowest = max(plan.seconds.step for plan in plans)
    for plan in _thinned(plans):
        resident = len(job.blocks) if plan.stream.resident == "all" else plan.stream.resident
        curve_table.add_row(
            f"{plan.device_bytes / 1e9:.1f}",
            f"{plan.seconds.step:.3f}",
            plan.seconds.bound_by,
            f"{resident} of {len(job.blocks)}",
            "█" * max(1, round(24 * plan.seconds.step / slowest)),
        )
    console.print(curve_table)
    console.print(f"stock resident: {stock[0]:.1f} GB, at best {stock[1]:.3f} s (an estimate of its GPU time)")


def _thinned(plans: Sequence[Plan], rows: int = 10) -> list[Plan]:
    """A few of many plans, the first and the last among them; a plan that is as fast as the one before is left out."""
    step = max(1, (len(plans) - 1) // (rows - 1))
    some = [*plans[:-1:step], plans[-1]]
    return [
        plan
        for before, plan in zip((None, *some), some, strict=False)
        if before is None or plan.stream != before.stream
    ]
