"""Draws docs/images/overlap.png from the spans that `measure.py --trace` wrote.

    python validation/draw_trace.py validation/trace_qwen2.5-32b_h200.json docs/images/overlap.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COPY, COMPUTE = "#4c78a8", "#f58518"
FEW = 5
"""Copies shown on either side of the turn."""


def main() -> None:
    """Draw one picture."""
    spans = json.loads(Path(sys.argv[1]).read_text())
    copies = [span for span in spans["copies"] if span[1] - span[0] > 0.1]
    compute = spans["compute"]
    end = max(copies[-1][1], compute[-1][1])
    # The turn is the longest computation: the last block forward, the head, the same block backward.
    turn = max(compute, key=lambda span: span[1] - span[0])
    middle = next(index for index, span in enumerate(copies) if span[0] >= turn[0])
    windows = {
        "the first blocks, forward": (0.0, copies[2 * FEW - 1][1]),
        "the turn: last blocks forward, head and loss, the same blocks backward": (
            copies[middle - FEW][0],
            copies[middle + FEW][1],
        ),
        "the last blocks backward, then clipping and optimizer": (copies[-2 * FEW][0], end),
    }
    figure, axes = plt.subplots(len(windows), 1, figsize=(11, 5.6), layout="constrained")
    for axis, (title, (left, right)) in zip(axes, windows.items(), strict=True):
        for row, (lot, color) in enumerate(((copies, COPY), (compute, COMPUTE))):
            shown = [(begin, stop - begin) for begin, stop in lot if stop > left and begin < right]
            axis.broken_barh(shown, (row - 0.38, 0.76), color=color, edgecolor="white", linewidth=0.6)
        axis.set_xlim(left, right)
        axis.set_ylim(1.5, -0.5)
        axis.set_yticks([0, 1], ["copies", "computation"])
        axis.set_title(title, fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(f"milliseconds since the begin of a step of {end:.0f} ms")
    busy = sum(stop - begin for begin, stop in copies)
    figure.suptitle(
        f"Qwen2.5-32B, random weights, 512 tokens, two slots, one H200: "
        f"{len(copies)} copies keep the link busy {busy / end:.0%} of the step",
        fontsize=11,
    )
    figure.savefig(sys.argv[2], dpi=130)


if __name__ == "__main__":
    main()
