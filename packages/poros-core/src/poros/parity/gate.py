"""The gate: stock, stock again, streamed, and a streamed run with one corrupted byte that must be caught."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers

from poros.config import AttentionPath, LoraPart, StreamConfig, hash_of
from poros.engine.attention import attention_path
from poros.engine.budget import enforce, process_peak_bytes
from poros.engine.engine import Engine, engine_of
from poros.engine.graphs import GraphExecutor
from poros.engine.load import default_device
from poros.engine.measured import plan_record
from poros.engine.optimizer import adamw_for
from poros.engine.parts import DecoderParts
from poros.errors import PorosError
from poros.parity.fit import cut_to_fit
from poros.parity.source import Setting, find_source, planned_setting
from poros.parity.stock import Work, adapters_of, make_adapters_count, make_batches, train
from poros.parity.surfaces import Comparison, Difference, compare
from poros.plugins import Plugins, load_plugins
from poros.provenance import host_peak_bytes, provenance
from poros.receipt import DTYPE_POLICY, Receipt
from poros.stream.streamer import StreamCounts

if TYPE_CHECKING:
    from peft import LoraConfig

Verdict = Literal["identical", "different", "not reproducible on this path", "control arm not caught"]

Announce = Callable[[str, int, int], None]
"""Called with what is being done, steps done and steps in all."""

CONTROL_SURFACES = ("logits", "loss", "gradients", "gradient_norm", "adapters")
"""What the control arm is compared on; it runs one step, so it has no final state."""


@dataclass(frozen=True)
class CheckResult:
    """What the gate found.

    Attributes:
        verdict: "identical" only if stock repeats itself, the streamed run equals it on every surface, and the
            corrupted run was told apart.
        surfaces: Surface -> equal or not; None where nothing can be said because stock doesn't repeat itself.
        stock: Stock against stock again; None where the two models ran in lockstep.
        streamed: Stock against streamed.
        control: How the corrupted run differed; None if it wasn't caught.
        control_block: Which block was corrupted.
        control_found: Which block the gate blamed for it.
        seconds: Seconds per step of each arm, first step excluded where there are more.
        trainable: Trainable parameters.
        work: What each arm did.
        attention: The attention path it ran on.
        device: Where.
        model, model_type: What was checked.
        traffic: What travelled in the streamed arm.
        link_gb_s: What the link can do; None without a GPU.
        data_hash: Of the token rows.
        executor: What ran the blocks of the streamed arm: "eager" or "graphs".
        allocated_bytes, reserved_bytes: Peaks of the streamed arm on a GPU.
        process_bytes: GPU memory of the whole process at its fullest.
        stream: What lived where.
        plan: What was predicted, if there was a budget.
        losses: Of stock.
    """

    verdict: Verdict
    surfaces: dict[str, bool | None]
    stock: Comparison | None
    streamed: Comparison
    control: Difference | None
    control_block: int
    control_found: int | None
    seconds: dict[str, float]
    trainable: int
    work: Work
    attention: AttentionPath
    device: str
    model: str
    model_type: str
    traffic: StreamCounts = field(default_factory=StreamCounts)
    link_gb_s: float | None = None
    data_hash: str = ""
    executor: str = "eager"
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    stream: StreamConfig = field(default_factory=StreamConfig)
    plan: dict[str, Any] | None = None
    losses: list[float] = field(default_factory=list)


def check(
    model: str,
    lora: LoraConfig,
    work: Work,
    *,
    stream: StreamConfig | None = None,
    attention: AttentionPath = "fused",
    revision: str | None = None,
    layers: int | None = None,
    device: torch.device | None = None,
    plugins: Plugins | None = None,
    announce: Announce = lambda what, done, total: None,
) -> CheckResult:
    """Run the gate on a checkpoint.

    Args:
        model: A directory, a hub id, or the id of a published shape, which gets random weights.
        lora: The adapters.
        work: How long and on what.
        stream: Block size, slots, tier.
        attention: The attention path.
        revision: Of a hub id.
        layers: Cut the model to its first layers; as many as stock can hold on this card by default.
        device: Where; the current CUDA device where there is one.
        plugins: Loaded plugins.
        announce: Told what is going on.

    Raises:
        PorosError: the checkpoint can't be run at all.
    """
    stream = stream or StreamConfig()
    where = device or default_device()
    plugins = plugins or load_plugins()
    seconds: dict[str, float] = {}
    total = 3 * work.steps + 1
    done = 0

    def arm(name: str, peft_model: Any, arm_work: Work, **options: Any) -> Any:
        parts = DecoderParts.of(peft_model, source.architecture)
        ends: list[float] = [time.perf_counter()]

        def on_step() -> None:
            nonlocal done
            done += 1
            ends.append(time.perf_counter())
            announce(name, done, total)

        announce(name, done, total)
        trace = train(peft_model, parts.layers, arm_work, where, on_step, **options)
        spans = [after - before for before, after in itertools.pairwise(ends)]
        seconds[name] = sorted(spans[1:] or spans)[len(spans[1:] or spans) // 2]
        return trace

    transformers.utils.logging.disable_progress_bar()  # the announcements are the progress
    with attention_path(attention), ExitStack() as cleanup:
        announce("preparing the model", 0, total)
        setting = cut_to_fit(model, revision, Setting(lora, work.seed, stream, where, plugins, layers), work)
        setting = planned_setting(model, revision, setting, work)
        source = find_source(model, revision, setting)
        stock_model = source.stock()
        make_adapters_count(stock_model, work.seed)
        # Kept on the host: nothing of the gate's own may count against a budget of the streamed run.
        initial = {name: p.detach().to("cpu", copy=True) for name, p in adapters_of(stock_model).items()}
        model_type = str(stock_model.config.model_type)
        vocab_size = int(stock_model.config.get_text_config().vocab_size)

        reference = arm("stock", stock_model, work)
        _reset(stock_model, initial)
        again = arm("stock again", stock_model, work)
        _reset(stock_model, initial)
        del stock_model
        _free()
        streamed_model = source.streamed()
        engine = engine_of(streamed_model)
        cleanup.callback(engine.close)
        blocks = engine.blocks
        # lora_A stays as it was drawn: that both models start from the same values is part of what is checked.
        make_adapters_count(streamed_model, work.seed)
        repeats = compare(reference, again, blocks)
        del again

        if not all(bool(torch.isfinite(tensor).all()) for tensor in reference.surface("loss").values()):
            raise PorosError(
                "stock's own loss is not finite on this model, so there is nothing to compare with",
                "check that the checkpoint is whole; NaN is equal to nothing, itself included",
            )
        if where.type == "cuda":
            torch.cuda.reset_peak_memory_stats(where)
        if engine.plan is not None:
            enforce(engine.plan, where)  # stock before it may have taken more
        before = engine.streamer.measured()
        streaming: Any = {"accumulate": engine.accumulate, "make_optimizer": adamw_for(engine)}
        try:
            trace = arm("streamed", streamed_model, work, **streaming)
        except torch.OutOfMemoryError as error:
            peak = f"{torch.cuda.max_memory_allocated(where) / 1e9:.2f} GB allocated at most"
            raise PorosError(
                f"the streamed run took more memory than {'it was given' if engine.plan else f'{where} has'}: {peak}",
                "give a larger --vram, or check with shorter rows (--length) or fewer (--batch-size)",
            ) from error
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        traffic = engine.streamer.measured().since(before)
        peaks = (
            (torch.cuda.max_memory_allocated(where), torch.cuda.max_memory_reserved(where))
            if where.type == "cuda"
            else (None, None)
        )
        whole = process_peak_bytes(where) if where.type == "cuda" else None
        record = plan_record(streamed_model)
        executor = executor_used(engine, engine.config)
        streamed = compare(reference, trace, blocks)
        del trace

        corrupted = len(blocks) // 2
        corrupt(engine, corrupted)
        _reset(streamed_model, initial)
        one_step = dataclasses.replace(work, steps=1)
        control_trace = arm("control arm", streamed_model, one_step, **streaming)
        control = compare(reference, control_trace, blocks, CONTROL_SURFACES, steps=1)
        link = engine.streamer.link_gb_s()

    caught = control.difference is not None and control.first_block == corrupted
    if not repeats.identical:
        verdict: Verdict = "not reproducible on this path"
    elif not streamed.identical:
        verdict = "different"
    elif not caught:
        verdict = "control arm not caught"
    else:
        verdict = "identical"
    return CheckResult(
        verdict=verdict,
        surfaces=streamed.surfaces if repeats.identical else dict.fromkeys(streamed.surfaces),
        stock=repeats,
        streamed=streamed,
        control=control.difference,
        control_block=corrupted,
        control_found=control.first_block,
        seconds=seconds,
        trainable=sum(tensor.numel() for tensor in initial.values()),
        work=work,
        attention=attention,
        device=str(where),
        model=source.name,
        model_type=model_type,
        traffic=traffic,
        link_gb_s=link,
        executor=executor,
        data_hash=hash_of([batch["input_ids"].tolist() for batch in make_batches(work, vocab_size)]),
        allocated_bytes=peaks[0],
        reserved_bytes=peaks[1],
        process_bytes=whole,
        stream=engine.config,
        plan=record,
        losses=[float(tensor) for tensor in reference.surface("loss").values()],
    )


def executor_used(engine: Engine, stream: StreamConfig) -> str:
    """What ran the blocks: "eager", "graphs", or "graphs and eager" where some had none.

    Raises:
        PorosError: graphs were asked for and none was replayed.
    """
    if not (isinstance(engine.executor, GraphExecutor) and engine.executor.num_replays):
        if stream.executor == "graphs":
            raise PorosError("no graph was replayed, so nothing is known of them", "see the warnings above for why")
        return "eager"
    return "graphs and eager" if engine.executor.num_eager else "graphs"


def receipt_of(result: CheckResult, lora: LoraPart) -> Receipt:
    """The receipt of a check."""
    work = result.work
    config = {
        "model": result.model,
        "lora": lora.model_dump(mode="json"),
        "stream": result.stream.model_dump(mode="json"),
        "attention": result.attention,
        "executor": result.executor,
        "lockstep": result.stock is None,
        "work": dataclasses.asdict(work),
    }
    return Receipt(
        kind="check",
        case=result.model,
        method="poros",
        model_type=result.model_type,
        config=config,
        config_hash=hash_of(config),
        tokens_per_step=work.batch_size * work.length * work.accumulation,
        trainable_parameters=result.trainable,
        dtype_policy=DTYPE_POLICY,
        s_step_median=result.seconds["streamed"],
        passes=[result.seconds["streamed"]],
        arms=result.seconds,
        steps=work.steps,
        data_hash=result.data_hash,
        vram_allocated_gb=None if result.allocated_bytes is None else result.allocated_bytes / 1e9,
        vram_reserved_gb=None if result.reserved_bytes is None else result.reserved_bytes / 1e9,
        vram_device_gb=None if result.process_bytes is None else result.process_bytes / 1e9,
        plan=result.plan,
        host_peak_gb=host_peak_bytes() / 1e9,
        **result.traffic.per_step(work.steps, result.seconds["streamed"], result.link_gb_s),
        parity=result.surfaces,
        losses=result.losses,
        status="ok",
        reason=None if result.verdict == "identical" else result.verdict,
        provenance=provenance(),
    )


def corrupt(engine: Engine, block: int, name: str = "weight", byte: int = 0) -> str:
    """Flip the highest bit of one byte of a block in the store.

    Args:
        engine: Of the streamed model.
        block: Which block.
        name: Where the first field's name must end with this; packed codes by default.
        byte: Which byte of the field.

    Returns:
        The name of the field.
    """
    layer = engine.blocks[block][0]
    packing = engine.packings[layer]
    field_ = next(f for f in packing.fields if f.name.endswith(name))
    engine.store.slab(layer)[field_.offset + byte] ^= 0x80
    engine.streamer.forget()
    return field_.name


def _reset(model: Any, initial: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in adapters_of(model).items():
            parameter.copy_(initial[name])
            parameter.grad = None


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
