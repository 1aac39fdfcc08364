"""The curve of a plan: GPU memory against seconds per step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from poros.plan.published import Figure
from poros.plan.search import Plan

MARKS = {"reference": "s", "resident": "D", "unsloth": "^"}


def draw_curve(
    path: Path,
    title: str,
    plans: Sequence[Plan],
    chosen: Plan | None,
    stock: tuple[float, float],
    published: Sequence[Figure],
) -> None:
    """Draw a curve into a file.

    Args:
        path: A .png or .svg file.
        title: Above the picture.
        plans: From the smallest budget to the largest.
        chosen: Is marked.
        stock: (GB, seconds) of the resident run, an estimate of its GPU time.
        published: Figures measured on other hardware.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.5))
    axes.plot(
        [plan.device_bytes / 1e9 for plan in plans],
        [plan.seconds.step for plan in plans],
        marker=".",
        label="Poros, planned",
    )
    if chosen is not None:
        axes.plot(chosen.device_bytes / 1e9, chosen.seconds.step, "o", markersize=10, label="this plan")
    axes.plot(*stock, "D", color="black", label="stock resident, at best (estimate)")
    for number, one in enumerate(published):
        axes.plot(
            one.vram_gb,
            one.seconds,
            MARKS[one.method],
            color="gray" if one.gpu == "A100" else "silver",
            label=f"{'reference system' if one.method == 'reference' else one.method}, published, {one.gpu}",
            zorder=1 - number,
        )
    axes.set_xlabel("GPU memory of the process, GB")
    axes.set_ylabel("seconds per step")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
