"""`poros check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from poros.cli.progress import Display
from poros.config import AttentionPath, LoraPart, StreamConfig, TrainingConfig, assigned, validated
from poros.errors import ConfigError
from poros.plugins import Plugins

if TYPE_CHECKING:
    from poros.parity.gate import CheckResult


def check(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A directory, a hub id, or a published shape (random weights), e.g. qwen2.5-7b.")
    ],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each arm.")] = 5,
    length: Annotated[int, typer.Option(min=2, help="Tokens per row.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per micro-batch; every other one is padded.")] = 2,
    accumulation: Annotated[int, typer.Option(min=1, help="Micro-batches per optimizer step.")] = 2,
    rank: Annotated[int, typer.Option(min=1, help="Of the adapters.")] = 16,
    dropout: Annotated[float, typer.Option(min=0.0, max=0.99, help="LoRA dropout.")] = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="Of adapters, data and dropout.")] = 0,
    vram: Annotated[
        str | None, typer.Option(help="GPU memory for the streamed run, as 12GB, or auto: placements are planned.")
    ] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Layers that travel together.")] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Device buffers of one block each.")] = None,
    tier: Annotated[str | None, typer.Option(help="Host memory: auto, pinned or pageable.")] = None,
    executor: Annotated[str | None, typer.Option(help="auto, eager, or graphs on a GPU.")] = None,
    resident: Annotated[str | None, typer.Option(help="Blocks that stay on the device: a number or all.")] = None,
    recompute: Annotated[bool | None, typer.Option(help="Run resident blocks again for the backward pass.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other key of `stream`, e.g. head=host."),
    ] = None,
    attention: Annotated[str, typer.Option(help="Attention path: fused, math or default.")] = "fused",
    layers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Cut the model to its first layers. By default as many as stock can hold on this card."
        ),
    ] = None,
    lockstep: Annotated[
        bool,
        typer.Option("--lockstep", help="Run stock and streamed side by side: for hundreds of steps on a big card."),
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    out: Annotated[Path | None, typer.Option(help="Append the receipt to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the receipt and nothing else.")] = False,
) -> None:
    """Check on this machine that streaming changes nothing.

    Trains a few steps resident with stock transformers, peft and bitsandbytes, the same again, streamed, and streamed
    with one corrupted byte, and compares every surface with torch.equal. Exit code 0 only if stock repeats itself, the
    streamed run is identical to it, and the corrupted one was caught.

    [bold]Example:[/] poros check ./Qwen2.5-0.5B --steps 5
    """
    lora = validated(LoraPart, {"rank": rank, "alpha": 2 * rank, "dropout": dropout}, "lora")
    named = {
        "vram": vram,
        "block_size": block_size,
        "slots": slots,
        "tier": tier,
        "executor": executor,
        "resident": resident,
        "recompute": recompute,
    }
    stream = validated(
        StreamConfig,
        {**assigned(set_ or ()), **{name: value for name, value in named.items() if value is not None}},
        "stream",
    )
    path = validated_attention(attention)
    if out is not None and out.is_dir():
        raise ConfigError(f"--out {out} is a folder", "name a file to which the receipt is added")
    plugins: Plugins = context.obj
    from poros.engine.adapters import lora_config
    from poros.parity.gate import check as in_turn
    from poros.parity.gate import receipt_of
    from poros.parity.lockstep import check_in_lockstep
    from poros.parity.stock import Work

    work = Work(steps=steps, batch_size=batch_size, length=length, accumulation=accumulation, seed=seed)
    with Display() as display:
        result = (check_in_lockstep if lockstep else in_turn)(
            model,
            lora_config(lora),
            work,
            stream=stream,
            attention=path,
            revision=revision,
            layers=layers,
            plugins=plugins,
            announce=display.advance,
        )
    receipt = receipt_of(result, lora)
    if out is not None:
        receipt.append(out)
    if as_json:
        typer.echo(receipt.to_json())
    else:
        _print(result)
    raise typer.Exit(0 if result.verdict == "identical" else 1)


def validated_attention(name: str) -> AttentionPath:
    """An attention path by name, checked by the config's own rule."""
    return validated(TrainingConfig, {"attention": name}, "").attention


def _print(result: CheckResult) -> None:
    console = Console(soft_wrap=True, highlight=False)
    table = Table(
        title=f"{result.model}: attention path {result.attention}, {result.executor}, on {result.device}",
        title_justify="left",
    )
    table.add_column("surface")
    table.add_column("stock repeats itself")
    table.add_column("streamed equals stock")
    for surface, equal in result.streamed.surfaces.items():
        repeats = None if result.stock is None else result.stock.surfaces[surface]
        table.add_row(surface.replace("_", " "), _mark(repeats), _mark(equal))
    console.print(table)
    work = result.work
    if result.plan is not None:
        console.print(
            f"plan: {result.plan['predicted_vram_gb']:.2f} of {result.plan['vram_budget_gb']:.2f} GB of GPU memory"
            + ("" if result.process_bytes is None else f", {result.process_bytes / 1e9:.2f} taken")
        )
    console.print(
        f"{result.streamed.compared} tensors compared over {work.steps} steps of {work.accumulation} x "
        f"{work.batch_size} x {work.length} tokens; {result.trainable:,} trainable parameters"
    )
    if result.streamed.difference is not None:
        block = (
            f"; the first block that differs is block {result.streamed.first_block}"
            if result.streamed.first_block is not None
            else ""
        )
        console.print(f"first difference: {result.streamed.difference}{block}")
    if result.control is not None:
        console.print(
            f"control arm (a byte of block {result.control_block} corrupted): told apart at {result.control}; "
            f"blamed on block {result.control_found}"
        )
    else:
        console.print(f"control arm (a byte of block {result.control_block} corrupted): NOT told apart")
    seconds = ", ".join(f"{name} {value:.2f}" for name, value in result.seconds.items())
    console.print(f"seconds per step: {seconds}")
    color = "green" if result.verdict == "identical" else "red"
    console.print(f"[bold {color}]{result.verdict}[/]")
    if result.verdict == "different" and result.stock is None:
        console.print("without --lockstep, Poros also says whether stock repeats itself")
    if result.verdict == "not reproducible on this path" and result.attention == "default":
        console.print("stock differs from itself here; --attention fused makes it repeat")


def _mark(equal: bool | None) -> str:
    return {True: "[green]yes[/]", False: "[red]no[/]", None: "-"}[equal]
