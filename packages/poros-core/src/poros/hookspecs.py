"""The hooks of Poros, in the order of a run. Plugins implement them; nothing here imports torch.

Every hook says when it is called, what it receives, what to return and what must not be done there. Hooks run at the
edges of a run, never inside the block loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import typer

    from poros.architecture import Architecture
    from poros.training.progress import StepRecord

hookspec = pluggy.HookspecMarker("poros")
hookimpl = pluggy.HookimplMarker("poros")
"""Marks a plugin's implementation of a hook: `from poros import hookimpl`."""


# -- start ------------------------------------------------------------------------------------------------------------


@hookspec
def poros_architectures() -> Sequence[Architecture]:
    """Contribute model families.

    When: once, when the plugins are loaded.
    Receives: nothing.
    Return: a sequence of `Architecture` values, one per family.
    Don't: import torch or transformers, or read files; `poros --help` pays for it.
    """
    raise AssertionError("a hook specification is never called")


@hookspec
def poros_commands(app: typer.Typer) -> None:
    """Add commands to the `poros` command line.

    When: once, before the command line is parsed.
    Receives: the typer application, to which core's own verbs have already been added.
    Return: nothing.
    Don't: import torch at this point, or replace a verb that exists.
    """


# -- training ---------------------------------------------------------------------------------------------------------


@hookspec
def poros_step_end(step: StepRecord) -> None:
    """Hear about each finished optimizer step of `poros train`.

    When: after the optimizer step, on the training thread.
    Receives: a frozen record: step, total steps, loss, gradient norm, learning rate, tokens, seconds.
    Return: nothing.
    Don't: touch the model or synchronise the device; training waits for you.
    """
