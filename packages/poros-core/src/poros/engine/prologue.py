"""The prologue: everything a decoder does before its first layer, done by the stock decoder itself.

The stock decoder's own `forward` runs with its layers swapped for recorders, which note the arguments they are called
with and return the hidden states unchanged. Embedding scale, rotary tables, masks and sliding windows therefore come
from the installed version of transformers, and Poros repeats none of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from poros.errors import StreamError


@dataclass(frozen=True)
class Call:
    """The arguments of one layer, without the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class SideOutput:
    """Stands in an argument of a layer for the dict in which layers leave tensors for later ones."""


SIDE_OUTPUT = SideOutput()


@dataclass
class Prologue:
    """What the recorders noted.

    Attributes:
        hidden: The input of the first layer, [batch, tokens, hidden].
        calls: The other arguments of each layer.
        output: What the decoder's forward returned; its hidden states have passed no layer.
    """

    hidden: Tensor | None = None
    calls: list[Call] = field(default_factory=list)
    output: Any = None


class Recorder(nn.Module):
    """Stands in for a layer: notes the call and returns the hidden states. Attributes are the layer's own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # In a tuple, so that the layer isn't registered as a child of its stand-in.
        self._like = (layer,)
        self.sink: Prologue | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_like"][0], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.sink is None:
            raise StreamError("a recorder was called outside a prologue")
        if self.sink.hidden is None:
            self.sink.hidden = hidden_states
        self.sink.calls.append(Call(args, kwargs))
        return hidden_states


class Recording:
    """Runs a decoder's own forward with recorders in place of its layers.

    Args:
        decoder: The stock decoder.
        layers: Name of its list of layers.
    """

    def __init__(self, decoder: nn.Module, layers: str) -> None:
        # Not a reference proper: the decoder holds the engine that holds this, and a cycle would keep slots and store
        # alive until Python's collector comes by.
        self._decoder = weakref.ref(decoder)
        self._name = layers
        stack = decoder.get_submodule(layers)
        assert isinstance(stack, nn.ModuleList)
        self._list = [Recorder(layer) for layer in stack]
        self._recorders = nn.ModuleList(self._list)

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prologue:
        """Run `forward(*args, **kwargs)`, the decoder's own, and return what was noted.

        Raises:
            StreamError: the decoder didn't call every layer exactly once.
        """
        prologue = Prologue()
        with self._swapped(prologue):
            prologue.output = forward(*args, **kwargs)
        if len(prologue.calls) != len(self._recorders) or prologue.hidden is None:
            raise StreamError(
                f"the decoder called {len(prologue.calls)} of its {len(self._recorders)} layers",
                "Poros needs a decoder that visits every layer once, in order",
            )
        return prologue

    @contextmanager
    def _swapped(self, sink: Prologue) -> Iterator[None]:
        decoder = self._decoder()
        assert decoder is not None
        modules = decoder._modules
        layers = modules[self._name]
        for recorder in self._list:
            recorder.sink = sink
        modules[self._name] = self._recorders
        try:
            yield
        finally:
            modules[self._name] = layers
            for recorder in self._list:
                recorder.sink = None
