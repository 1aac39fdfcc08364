"""`poros train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from poros.cli.progress import Display
from poros.config import RunConfig, load_config
from poros.plugins import Plugins


def train(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="A YAML file; flags and --set override what it says.")] = None,
    model: Annotated[str | None, typer.Option(help="Checkpoint: a directory or a hub id.")] = None,
    data: Annotated[str | None, typer.Option(help="Rows: a .jsonl file or the name of a dataset.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder for the adapter.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of adapters, data order and dropout.")] = None,
    vram: Annotated[
        str | None, typer.Option(help="GPU memory that the run may take, as 12GB, or auto for what is free.")
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Layers that travel together.")] = None,
    slots: Annotated[int | None, typer.Option(help="Device buffers of one block each.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the config, e.g. lora.rank=32.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run's output.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest complete checkpoint.")] = False,
) -> None:
    """Train a LoRA adapter over a streamed NF4 base.

    Rows hold chat `messages`, `prompt` and `completion`, or `text`. The adapter folder can be loaded by stock peft.

    [bold]Example:[/] poros train --model ./Qwen2.5-7B --data chats.jsonl --out runs/first --steps 200
    """
    settings = load_config(
        config,
        {
            "model.path": model,
            "data.path": data,
            "out": out,
            "training.steps": steps,
            "training.seed": seed,
            "stream.vram": vram,
            "stream.block_size": block_size,
            "stream.slots": slots,
            "overwrite": overwrite or None,
            "resume": resume or None,
        },
        set_ or (),
    )
    plugins: Plugins = context.obj
    from poros.training.run import train as run

    try:
        with Display() as display:
            result = run(settings, plugins, display)
    except KeyboardInterrupt:
        _interrupted(settings)
        raise typer.Exit(130) from None
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    if result.losses:
        table.add_row(
            "loss",
            f"{result.losses[0][1]:.4f} at step {result.losses[0][0]}, "
            f"{result.losses[-1][1]:.4f} at step {result.losses[-1][0]}",
        )
    if result.evaluations:
        table.add_row("held out", ", ".join(f"{loss:.4f} at step {step}" for step, loss in result.evaluations))
    table.add_row("adapter", str(result.out))
    table.add_row("receipt", str(result.out / "receipt.jsonl"))
    table.add_row("loss curve", str(result.out / "loss.png"))
    Console(soft_wrap=True, highlight=False).print(table)


def _interrupted(settings: RunConfig) -> None:
    kept = any(Path(settings.out).glob("checkpoint-*/poros_manifest.json"))
    after = "go on with --resume" if kept else "nothing was saved; set training.save_every to keep checkpoints"
    Console(stderr=True, highlight=False).print(f"interrupted; {after}")
