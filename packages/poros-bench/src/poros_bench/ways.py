"""How each method of this package builds what is trained. Imported in a cell's own process only."""

from __future__ import annotations

from typing import Any

import torch

from poros.parity.stock import load_stock, make_adapters_count
from poros.receipt import DTYPE_POLICY
from poros_bench.cell import Cell, NotApplicableError, Trainee


def resident(cell: Cell) -> Trainee:
    """Stock, everything on the device."""
    device = _device()
    model = load_stock(cell.directory, lora_of(cell), cell.case.seed, device)
    make_adapters_count(model, cell.case.seed)
    return Trainee(model=model, device=device, make_optimizer=torch.optim.AdamW, attention=cell.case.attention)


def resident_checkpointing(cell: Cell) -> Trainee:
    """Stock with gradient checkpointing, as its documentation switches it on for QLoRA."""
    trainee = resident(cell)
    trainee.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trainee.model.enable_input_require_grads()
    return trainee


def poros(cell: Cell) -> Trainee:
    """Poros, within a budget if there is one."""
    import poros as library
    from poros.checkpoint.locate import read_config
    from poros.config import StreamConfig
    from poros.engine.budget import card_of, enforce, planned
    from poros.engine.engine import engine_of
    from poros.engine.measured import allocated_components
    from poros.engine.optimizer import adamw_for
    from poros.parity.stock import clip_gradients
    from poros.plan.fit import dimensions_of, make_job
    from poros.plan.search import describe
    from poros.plugins import load_plugins

    device, case, budget = _device(), cell.case, cell.entry.vram
    plugins = load_plugins()
    values = read_config(cell.directory)
    family = plugins.architecture_for(str(values["model_type"]))
    stream = StreamConfig(**{"block_size": case.block_size, **cell.entry.options})
    shape: Any = {"tokens": case.batch_size * case.length, "rows": case.batch_size, "micro_batches": case.accumulation}
    if budget is not None:
        # `stream` keeps what was set by hand; the plan leaves that alone.
        stream = StreamConfig(**{**stream.model_dump(exclude_unset=True), "vram": budget})
    plan = planned(stream, family, values, case.lora, **shape, device=device)
    if plan is not None:
        enforce(plan, device)
    card = card_of(device)
    settings: Any = {} if plan is not None else stream.model_dump()
    model = library.load(
        cell.directory, lora=lora_of(cell), seed=case.seed, device=device, plugins=plugins, plan=plan, **settings
    )
    make_adapters_count(model, case.seed)
    engine = engine_of(model)
    kept: list[torch.optim.Optimizer] = []

    def make_optimizer(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        kept.append(adamw_for(engine)(*args, **kwargs))
        return kept[-1]

    def record() -> dict[str, Any]:
        on_gpu = device.type == "cuda"
        job = make_job(dimensions_of(family, values), case.lora, **shape, stream=engine.config, graphs=on_gpu)
        predicted = plan or describe(job, engine.config, card)
        found = allocated_components(model, kept[-1])
        return {
            "stream": engine.config.model_dump(mode="json"),
            "executor": type(engine.executor).__name__,
            "plan": {**predicted.to_json(), "measured_components": {k: v / 1e9 for k, v in found.items() if v}},
        }

    return Trainee(
        model=model,
        device=device,
        make_optimizer=make_optimizer,
        attention=case.attention,
        accumulate=engine.accumulate,
        clip=clip_gradients,
        record=record,
        traffic=engine.streamer.measured,
        link_gb_s=engine.streamer.link_gb_s,
        close=engine.close,
    )


def unsloth(cell: Cell) -> Trainee:
    """unsloth by its own documentation, on the same pre-quantised checkpoint."""
    if not torch.cuda.is_available():
        raise NotApplicableError("unsloth needs a GPU")
    from unsloth import FastLanguageModel

    case = cell.case
    model, _ = FastLanguageModel.from_pretrained(
        str(cell.directory),
        max_seq_length=case.length,
        dtype=torch.bfloat16,
        load_in_4bit=True,
        local_files_only=True,
    )
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = FastLanguageModel.get_peft_model(
        model,
        r=case.lora.rank,
        lora_alpha=case.lora.alpha,
        lora_dropout=case.lora.dropout,
        bias="none",
        target_modules=targets if case.lora.targets == "all-linear" else list(case.lora.targets),
        use_gradient_checkpointing="unsloth",
        random_state=case.seed,
    )
    adapter = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    return Trainee(
        model=model,
        device=adapter.device,
        make_optimizer=torch.optim.AdamW,
        attention=None,
        dtype_policy=DTYPE_POLICY.replace("float32", str(adapter.dtype).removeprefix("torch.")),
    )


def _device() -> torch.device:
    from poros.engine.load import default_device

    return default_device()


def lora_of(cell: Cell) -> Any:
    """peft's settings of a case; `all-linear` stays in the text tower."""
    from transformers import AutoConfig

    from poros.checkpoint.locate import read_config
    from poros.engine.adapters import lora_config, narrowed
    from poros.plugins import load_plugins

    family = load_plugins().architecture_for(str(read_config(cell.directory)["model_type"]))
    return narrowed(lora_config(cell.case.lora), family, AutoConfig.from_pretrained(cell.directory).get_text_config())
