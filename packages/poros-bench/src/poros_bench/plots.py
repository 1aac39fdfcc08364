"""Plots of receipts: memory against time, and bars by method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from poros.plan.published import figures_of
from poros.receipt import Receipt
from poros_bench.report import cases_in


def draw(receipts: Sequence[Receipt], folder: Path) -> list[str]:
    """Draw two pictures for each case that has something to show.

    Returns:
        The names of the files.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for number, (case, cells) in enumerate(cases_in(receipts).items()):
        done = [cell for cell in cells if cell.s_step_median is not None]
        if not done:
            continue
        figure, axes = pyplot.subplots(figsize=(7.5, 0.6 + 0.45 * len(done)))
        labels = [cell.method for cell in done]
        axes.barh(labels, [cell.s_step_median for cell in done], xerr=[cell.s_step_std or 0.0 for cell in done])
        axes.invert_yaxis()
        axes.set_xlabel("seconds per step")
        axes.set_title(case, fontsize="medium")
        names.append(_save(figure, folder, f"bars-{number + 1}.png"))
        with_memory = [cell for cell in done if cell.vram_reserved_gb is not None]
        if not with_memory:
            continue
        figure, axes = pyplot.subplots(figsize=(7.5, 4.5))
        for cell in with_memory:
            axes.plot(cell.vram_device_gb or cell.vram_reserved_gb, cell.s_step_median, "o", label=cell.method)
        for published in figures_of(str(done[0].config["case"]["model"])):
            label = f"{published.method}, published, {published.gpu}"
            axes.plot(published.vram_gb, published.seconds, "x", color="gray", label=label)
        axes.set_xlabel("GPU memory of the process (or reserved by torch), GB")
        axes.set_ylabel("seconds per step")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_title(case, fontsize="medium")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        names.append(_save(figure, folder, f"memory-{number + 1}.png"))
    return names


def _save(figure: object, folder: Path, name: str) -> str:
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    assert isinstance(figure, Figure)
    figure.tight_layout()
    figure.savefig(folder / name, dpi=110)
    pyplot.close(figure)
    return name
