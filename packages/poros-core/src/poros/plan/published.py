"""Published figures of the reference system, as marks beside a plan. They are of other hardware than yours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One measured run.

    Attributes:
        shape: Id of the published shape.
        gpu: On which card.
        method: "reference" (the published streaming system), "resident" (stock) or "unsloth".
        seconds: Of a step of 512 tokens, LoRA rank 16, batch 1.
        vram_gb: Its GPU memory.
    """

    shape: str
    gpu: str
    method: str
    seconds: float
    vram_gb: float


def _row(shape: str, gpu: str, seconds: tuple[float, float, float], vram: tuple[float, float, float]) -> list[Figure]:
    methods = ("reference", "resident", "unsloth")
    return [Figure(shape, gpu, *values) for values in zip(methods, seconds, vram, strict=True)]


PUBLISHED: tuple[Figure, ...] = (
    *_row("qwen2.5-32b", "A100", (2.0489, 0.7662, 0.9086), (10.95, 34.72, 20.82)),
    *_row("qwen3-32b", "A100", (2.1832, 0.8157, 0.9287), (11.03, 36.00, 20.77)),
    *_row("gemma3-27b", "A100", (1.8933, 0.7835, 0.9365), (9.95, 33.17, 22.06)),
    *_row("gemma4-31b", "A100", (2.2537, 0.9889, 1.0255), (10.65, 38.75, 20.57)),
    *_row("qwen3-32b", "B300", (1.0585, 0.2945, 0.4048), (11.12, 37.92, 20.49)),
    *_row("qwen2.5-32b", "B300", (1.0012, 0.2755, 0.4051), (11.04, 36.53, 20.54)),
    *_row("qwen2.5-72b", "B300", (1.8680, 0.4489, 0.5917), (18.16, 67.63, 42.46)),
)


def figures_of(shape: str) -> list[Figure]:
    """The published figures of a shape."""
    return [figure for figure in PUBLISHED if figure.shape == shape]
