"""Graphs of resident blocks that keep their activations, so that their backward pass needn't run them again.

Each such block has a pair of graphs of its own: the forward graph leaves its activations in the graphs' memory, and the
backward graph reads them there. All of them share one memory pool, as one training step shares the device's memory:
they are recorded in the order of a step, forward up through the blocks and backward down again, so the activations of a
block are given up exactly when its backward pass has been recorded.

So there is room for the activations of one forward pass at a time. Whoever replays a backward graph must know that no
other forward pass has run since; `GraphVisit` compares numbers of passes, and runs the block again if one has.

Each link has a copy of its block's layers for itself, whose adapters share the memory of the model's own: nothing is
copied before a replay, and a block whose adapters have moved is recorded anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from poros.engine.copies import BlockCopy
from poros.engine.executor import BlockSignature, Surroundings
from poros.engine.replay import Pool, Results, ShapeGraphs
from poros.stream.slots import Slot

WarmUp = Callable[[Callable[[], Results]], Results]
Record = Callable[[Callable[[], Results], Pool], tuple[Callable[[], None], Results]]


def _not_recorded() -> None:
    raise AssertionError("replayed before it was recorded")


@dataclass(eq=False)
class Link:
    """One block of the chain.

    Attributes:
        block: Which.
        home: The slot in which it stays.
        signature: Of the block as it was recorded.
        copy: Of its layers.
        live: The adapters of the block, in the order of the copy's.
        forward, backward: Start a replay.
        output: Where the forward graph leaves the block's output.
        gradients: Where the backward graph leaves the gradients of the input and of the adapters.
        leaf, result: Input and output in autograd's graph, while it is being recorded.
    """

    block: int
    home: Slot
    signature: BlockSignature
    copy: BlockCopy
    live: Sequence[nn.Parameter]
    forward: Callable[[], None] = _not_recorded
    backward: Callable[[], None] = _not_recorded
    output: Tensor | None = None
    gradients: Results = field(default_factory=list)
    leaf: Tensor | None = None
    result: Tensor | None = None

    def __post_init__(self) -> None:
        for static, live in zip(self.copy.loose, self.live, strict=True):
            static.data = live.data

    def is_in_place(self) -> bool:
        """Whether the block's adapters are still where they were."""
        return all(
            static.data_ptr() == live.data_ptr() for static, live in zip(self.copy.loose, self.live, strict=True)
        )


def record_chain(
    links: Sequence[Link],
    graphs: ShapeGraphs,
    surroundings: Surroundings,
    warm_up: WarmUp,
    record: Record,
    pool: Pool,
) -> None:
    """Record the graphs of all links.

    Args:
        links: In the order of the model.
        graphs: Of the batch shape; its static input, output gradient and arguments are used.
        surroundings: Autocast of the forward pass.
        warm_up: Runs a function as it is run while recording, once for each sort of block.
        record: Records a function in a pool.
        pool: For all of them.
    """
    warm: set[object] = set()
    for link in links:
        sort = (link.signature, tuple(made.kind for made in link.copy.layers))
        forward = _forward(link, graphs, surroundings)
        if sort not in warm:
            warm.add(sort)
            warm_up(forward)
            warm_up(_backward(link, graphs))
        link.forward, (link.output,) = record(forward, pool)
    for link in reversed(links):
        link.backward, link.gradients = record(_backward(link, graphs), pool)
        link.leaf = link.result = None  # from here on the block's activations may be overwritten


def _forward(link: Link, graphs: ShapeGraphs, surroundings: Surroundings) -> Callable[[], Results]:
    def run() -> Results:
        with link.copy.bound(link.home), torch.enable_grad(), surroundings.autocasting():
            # A copy: the static input is overwritten by the next block, and autograd saves this one.
            link.leaf = graphs.hidden.detach().clone().requires_grad_()
            link.result = link.copy.run(link.leaf, graphs.calls)
        return graphs.leave([link.result])

    return run


def _backward(link: Link, graphs: ShapeGraphs) -> Callable[[], Results]:
    def run() -> Results:
        assert link.leaf is not None and link.result is not None
        # As for blocks that are run again: see `GraphExecutor._record_block`.
        with link.copy.bound(link.home), torch.autocast(graphs.hidden.device.type, enabled=False):
            wanted = [link.leaf, *link.copy.adapters]
            gradients = torch.autograd.grad(link.result, wanted, graphs.gradient, allow_unused=True)
        return graphs.leave(gradients)

    return run
