"""Draws docs/images/budgets.png: the time of a step over GPU memory, as measured, from the receipts of one call.

    python validation/draw_budgets.py validation/cells_h200_budgets.jsonl qwen2.5-32b docs/images/budgets.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from poros.plan.published import figures_of
from poros.receipt import read_receipts

POROS, STOCK, RIVAL, OTHERS = "#4c78a8", "#333333", "#e45756", "#999999"


def main() -> None:
    """Draw one picture."""
    case = f"{sys.argv[2]} (random weights)"
    receipts = [
        receipt
        for receipt in read_receipts(Path(sys.argv[1]))
        if receipt.case == case and receipt.config["tokens"] == 512 and receipt.config["accumulation"] == 1
    ]
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    planned = sorted((r for r in receipts if r.method.startswith("poros")), key=lambda r: r.vram_device_gb)
    axis.plot([r.vram_device_gb for r in planned], [r.s_step_median for r in planned], "o-", color=POROS, label="Poros, measured")
    for receipt in planned:
        budget = receipt.method.partition("vram=")[2].replace("least", "smallest").replace("GB", " GB")
        axis.annotate(budget, (receipt.vram_device_gb, receipt.s_step_median), (4, 5), textcoords="offset points", fontsize=9)
    for method, name, color in (("resident", "stock resident", STOCK), ("unsloth", "unsloth", RIVAL)):
        one = next(receipt for receipt in receipts if receipt.method == method)
        axis.plot(one.vram_device_gb, one.s_step_median, "s", color=color, label=f"{name}, measured in the same call")
    marks = [figure for figure in figures_of(sys.argv[2]) if figure.method == "reference"]
    axis.plot([m.vram_gb for m in marks], [m.seconds for m in marks], "x", color=OTHERS, label="reference system, as published")
    for mark in marks:
        axis.annotate(mark.gpu, (mark.vram_gb, mark.seconds), (6, -3), textcoords="offset points", fontsize=9, color=OTHERS)
    axis.set_xlabel("GPU memory of the whole process, GB")
    axis.set_ylabel("seconds per step")
    axis.set_xlim(0, None)
    axis.set_ylim(0, None)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    axis.set_title("Qwen2.5-32B, random weights, 512 tokens, rank 16, one H200 with a slow CPU", loc="left", fontsize=11)
    figure.savefig(sys.argv[3], dpi=130)


if __name__ == "__main__":
    main()
