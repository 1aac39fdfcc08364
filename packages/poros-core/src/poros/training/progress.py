"""What is said about each step: to plugins, to the terminal and to the receipt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepRecord:
    """One finished optimizer step.

    Attributes:
        step: From 1.
        steps: Planned steps in all.
        loss: Mean loss per supervised token since the last record.
        gradient_norm: Global norm before clipping.
        learning_rate: Used in this step.
        tokens: Tokens processed in this step, padding included.
        seconds: Wall time of this step.
    """

    step: int
    steps: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    seconds: float
