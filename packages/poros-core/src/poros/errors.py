"""The errors Poros raises on purpose: what went wrong, where, and what to do about it.

This module imports nothing, so that everything may import it. The command line prints `message` and `hint` of a
`PorosError` without a traceback and exits with code 2.
"""

from __future__ import annotations


class PorosError(Exception):
    """The root of all deliberate errors.

    Attributes:
        message: What is wrong and where, in one or a few lines.
        hint: What to do about it; empty when nothing useful can be said.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class ConfigError(PorosError):
    """A run was described wrongly; the message lists every problem found."""


class CheckpointError(PorosError):
    """The checkpoint on disk is incomplete, damaged or not what its config says."""


class UnsupportedError(PorosError):
    """Something is well formed, but Poros does not (yet) do it."""


class DataError(PorosError):
    """The training data can't be read or holds nothing to learn from."""


class StreamError(PorosError):
    """The streamed model was used in a way that can't work."""


class SaveError(PorosError):
    """An adapter or checkpoint could not be written whole."""


class BudgetError(PorosError):
    """What is to be trained doesn't fit into the memory it may take."""


class PluginError(PorosError):
    """Installed plugins contradict each other or the hook specifications."""


def one_line(error: BaseException) -> str:
    """The text of an error on one line, for a message that has others around it."""
    return " ".join(str(error).split())
