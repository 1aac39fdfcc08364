"""Block-major accumulation: each block is visited once forward and once backward for all micro-batches of a step.

With K micro-batches per optimizer step an ordinary loop copies the base 2K times. Here it travels twice per optimizer
step, whatever K is. The numbers don't change: gradients are added to each adapter in the order of the micro-batches,
as a loop of K backward passes would add them, and every dropout mask is drawn from the random state it would have had
there.

The caller's code is not taken apart. Each micro-batch is a function that runs a forward and a backward pass in its
own way (a line of a hand-written loop, the `training_step` of a Trainer), and it is called twice: once as far as the
decoder's layers, where it is stopped, and once from their end on, where its own loss and `backward` run over the
finished hidden states. In between and afterwards the blocks are run for all micro-batches together.

Random state: on a GPU, how far a block moves the generator is known after it has run once, so the state of
micro-batch k at block b can be computed before micro-batch k-1 has been there. Until it is known, and on a CPU with
dropout, where it can't be, the forward pass goes micro-batch by micro-batch; the backward pass needs only the states
that were saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from poros.engine.boundaries import Boundary
from poros.engine.executor import Batch, BlockSignature, Surroundings, rng_state, set_rng_state
from poros.engine.prologue import Prologue
from poros.errors import StreamError
from poros.stream.schedule import Phase

if TYPE_CHECKING:
    from poros.engine.engine import Engine

T = TypeVar("T")


class _PrologueDone(BaseException):
    """Stops a micro-batch's function when the decoder has been reached; no `except Exception` may swallow it."""


@dataclass
class _MicroBatch:
    """One micro-batch on its way.

    Attributes:
        prologue: What the decoder did before its layers.
        batch: The executor's.
        surroundings: In which the decoder was called.
        signatures: Of each block when the decoder was called.
        hidden: Where it has come to, [batch, tokens, hidden]; the gradient on its way back.
        inputs: Input of each block, kept until its backward pass.
        states: Random state before each block.
        autocast: Whether the backward pass runs under autocast.
    """

    prologue: Prologue
    batch: Batch
    surroundings: Surroundings
    signatures: list[BlockSignature]
    hidden: Tensor
    inputs: list[Boundary] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    autocast: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """What decides how many random numbers a block draws."""
        return tuple(self.hidden.shape)


def accumulate(engine: Engine, micro_steps: Sequence[Callable[[], T]]) -> list[T]:
    """Run the forward and backward passes of several micro-batches, each block visited once for all of them.

    Args:
        engine: Of the streamed model.
        micro_steps: One function per micro-batch that runs the model forward once and calls `backward` on its loss.
            Each is called twice, the first time only as far as the decoder's layers. If something before the layers
            draws random numbers, or an adapter has a gradient hook, they are run in a plain loop instead.

    Returns:
        What the functions returned. The gradients are in the adapters' `grad`, added to what was there.

    Raises:
        StreamError: a function didn't run the model exactly once, drew random numbers after the layers, or changed
            adapters, mode or dropout.
    """
    keeps_all = len(engine.executor.keeping) == len(engine.executor)  # nothing travels, and nothing need be run again
    if len(micro_steps) == 1 or keeps_all or engine.shares:
        return [step() for step in micro_steps]
    adapters = [engine.executor.adapters(block) for block in range(len(engine.executor))]
    if any(_has_hooks(parameter) for block in adapters for parameter in block):
        return [step() for step in micro_steps]
    device = engine.device
    start, on_host = rng_state(device), torch.get_rng_state()
    micro_batches = [_run_prologue(engine, step) for step in micro_steps]
    if not (torch.equal(rng_state(device), start) and torch.equal(torch.get_rng_state(), on_host)):
        # Something before the layers draws random numbers (noise on the embedding, say), in the order of a plain loop.
        set_rng_state(start, device)
        torch.set_rng_state(on_host)
        return [step() for step in micro_steps]
    if any(one.signatures != micro_batches[0].signatures for one in micro_batches):
        # Each micro-batch sets a state of its own (adapters, mode), which must hold for its blocks.
        return [step() for step in micro_steps]
    versions = _versions(adapters)
    engine.streamer.expect(engine.streamer.training)
    set_rng_state(start, device)
    _forward(engine, micro_batches, start)
    end = rng_state(device)
    with engine.streamer.keeping_head():
        results = [_run_epilogue(engine, step, one) for step, one in zip(micro_steps, micro_batches, strict=True)]
    if not torch.equal(rng_state(device), end):
        raise StreamError(
            "a micro-batch drew random numbers outside the decoder's layers", "accumulate in a plain loop"
        )
    if _versions(adapters) != versions:
        raise StreamError("adapters were changed while micro-batches were under way", "step after the backward pass")
    with torch.no_grad():
        _backward(engine, micro_batches, adapters, micro_batches[0].signatures)
    return results


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Whether somebody listens to a parameter's gradient, which here would be added without autograd."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _versions(adapters: Sequence[Sequence[nn.Parameter]]) -> list[int]:
    return [parameter._version for block in adapters for parameter in block]


def _run_prologue(engine: Engine, step: Callable[[], object]) -> _MicroBatch:
    found: list[_MicroBatch] = []

    def stop(stock_forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        prologue = engine.prologue(stock_forward, args, kwargs)
        assert prologue.hidden is not None
        batch = engine.executor.prepare(prologue.hidden, prologue.calls, training=True, repeated=True)
        signatures = [engine.executor.signature(block) for block in range(len(engine.executor))]
        surroundings = Surroundings.now(engine.device)
        found.append(_MicroBatch(prologue, batch, surroundings, signatures, prologue.hidden.detach()))
        raise _PrologueDone

    with engine.intercepted(stop):
        try:
            step()
        except _PrologueDone:
            return found[0]
    raise StreamError("a micro-batch's function didn't run the streamed model", "each must run it once")


def _run_epilogue(engine: Engine, step: Callable[[], T], one: _MicroBatch) -> T:
    """Run a micro-batch's own code over the finished hidden states; leaves their gradient in `one.hidden`."""
    leaf = one.hidden.requires_grad_()

    def note_autocast(gradient: Tensor) -> None:
        one.autocast = torch.is_autocast_enabled(engine.device.type)

    hook = leaf.register_hook(note_autocast)
    times = 0

    def finish(stock_forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal times
        times += 1
        return engine.epilogue(one.prologue, leaf)

    with engine.intercepted(finish):
        result = step()
    if times != 1:
        raise StreamError(f"a micro-batch's function ran the model {times} times", "each must run it once")
    one.hidden = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    # The hook holds the micro-batch, and its output's graph holds the leaf: a circle through autograd, which Python's
    # collector can't see into.
    hook.remove()
    one.prologue.output = None
    return result


def _forward(engine: Engine, micro_batches: Sequence[_MicroBatch], start: Tensor) -> None:
    """Run all blocks for all micro-batches; leaves the finished hidden states in `hidden`."""
    num_blocks = len(engine.executor)
    draws = [[engine.draws.get((block, one.shape)) for block in range(num_blocks)] for one in micro_batches]
    if all(count is not None for counts in draws for count in counts):
        before = [one.hidden for one in micro_batches]
        if _forward_by_block(engine, micro_batches, draws, start):  # type: ignore[arg-type]
            return
        # A block drew more or fewer numbers than it used to (dropout was changed): once more, in the plain order.
        for one, hidden in zip(micro_batches, before, strict=True):
            one.hidden, one.inputs, one.states = hidden, [], []
        set_rng_state(start, engine.device)
    for one in micro_batches:
        for block in range(num_blocks):
            one.states.append(rng_state(engine.device))
            one.inputs.append(engine.executor.boundaries.put(one.hidden))
            with engine.executor.visiting(block, Phase.FORWARD) as visit:
                one.hidden = visit.forward(one.hidden, one.batch, one.surroundings)
            engine.draws[block, one.shape] = _draws(one.states[-1], rng_state(engine.device))


def _forward_by_block(
    engine: Engine, micro_batches: Sequence[_MicroBatch], draws: Sequence[Sequence[int]], start: Tensor
) -> bool:
    """Block by block; False if a block drew another number of random numbers than foreseen."""
    state = start
    states: list[list[Tensor]] = []
    for counts in draws:
        states.append([])
        for count in counts:
            states[-1].append(state)
            state = _advanced(state, count)
    for block in range(len(engine.executor)):
        with engine.executor.visiting(block, Phase.FORWARD) as visit:
            for one, ahead in zip(micro_batches, states, strict=True):
                set_rng_state(ahead[block], engine.device)
                one.states.append(ahead[block])
                one.inputs.append(engine.executor.boundaries.put(one.hidden))
                one.hidden = visit.forward(one.hidden, one.batch, one.surroundings)
                if _draws(ahead[block], rng_state(engine.device)) != engine.draws[block, one.shape]:
                    return False
    set_rng_state(state, engine.device)
    return True


def _backward(
    engine: Engine,
    micro_batches: Sequence[_MicroBatch],
    adapters_of: Sequence[Sequence[nn.Parameter]],
    signatures: Sequence[BlockSignature],
) -> None:
    lowest = next((block for block, adapters in enumerate(adapters_of) if adapters), len(adapters_of))
    for block in reversed(range(lowest, len(adapters_of))):  # nothing below the lowest adapter needs a gradient
        adapters = adapters_of[block]
        with engine.executor.visiting(block, Phase.BACKWARD) as visit:
            engine.executor.check_unchanged(block, signatures[block])
            for number, one in enumerate(micro_batches):
                surroundings = dataclasses.replace(one.surroundings, rng=one.states.pop())
                hidden = one.inputs.pop().take()
                following = micro_batches[(number + 1) % len(micro_batches)]
                if following.inputs and block > lowest:
                    following.inputs[-1].start()
                one.batch.check_unchanged()
                with torch.autocast(engine.device.type, dtype=surroundings.autocast[2], enabled=one.autocast):
                    first, gradients = visit.backward(
                        hidden, one.batch, surroundings, adapters, one.hidden, needs_hidden=block > lowest
                    )
                if engine.gradients is not None:
                    engine.executor.gradients_to_host(adapters, gradients)
                else:
                    _add(adapters, gradients)
                if first is not None:
                    one.hidden = first


def _add(adapters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients as autograd does: the first one is taken as it is, later ones are added to it."""
    held, fresh = [], []
    for parameter, gradient in zip(adapters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            held.append(parameter.grad)
            fresh.append(gradient)
    if held:
        torch._foreach_add_(held, fresh)


def _draws(before: Tensor, after: Tensor) -> int | None:
    """How far the generator has moved; None if that can't be expressed as a number."""
    if torch.equal(before, after):
        return 0
    if before.numel() != _PHILOX_BYTES or not torch.equal(before[:8], after[:8]):
        return None
    return int(after[8:].view(torch.int64)) - int(before[8:].view(torch.int64))


def _advanced(state: Tensor, draws: int) -> Tensor:
    """The state that lies `draws` further on."""
    if draws == 0:
        return state
    moved = state.clone()
    moved[8:].view(torch.int64).add_(draws)
    return moved


_PHILOX_BYTES = 16
"""State of a CUDA generator: eight bytes of seed, eight of offset."""
