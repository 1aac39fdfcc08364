"""Times unsloth on a checkpoint of `poros_bench.models`, in a process of its own: importing it changes transformers.

    python validation/measure_unsloth.py /tmp/qwen2.5-32b qwen2.5-32b --accumulation 1 8 --out cells.jsonl

The same loop, tokens, ranks and optimizer as `measure.py`, unsloth's own loader, layers and gradient checkpointing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import time
from pathlib import Path
from typing import Any

def main() -> None:
    """Measure cells."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("shape")
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("cells.jsonl"))
    arguments = parser.parse_args()

    from unsloth import FastLanguageModel  # before torch and transformers, as it asks for

    import torch
    from torch.profiler import ProfilerActivity, profile

    from poros.config import LoraPart, hash_of
    from poros.engine.budget import process_peak_bytes
    from poros.provenance import host_peak_bytes, provenance
    from poros.receipt import Receipt

    part = LoraPart()
    model, _ = FastLanguageModel.from_pretrained(
        str(arguments.checkpoint),
        max_seq_length=arguments.tokens,
        dtype=torch.bfloat16,
        load_in_4bit=True,
        local_files_only=True,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=part.rank,
        lora_alpha=part.alpha,
        lora_dropout=0,
        bias="none",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        use_gradient_checkpointing="unsloth",
        random_state=0,
    )
    model.train()
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    initial = [parameter.detach().clone() for parameter in adapters]
    for accumulation in arguments.accumulation:
        with torch.no_grad():
            for parameter, value in zip(adapters, initial, strict=True):
                parameter.copy_(value)
        optimizer = torch.optim.AdamW(adapters, lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(3)

        def step() -> float:
            shape = (accumulation, 1, arguments.tokens)
            rows = torch.randint(0, model.config.vocab_size, shape, generator=generator).cuda()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for ids in rows:
                with torch.autocast("cuda", torch.bfloat16):
                    loss = model(input_ids=ids, labels=ids).loss
                (loss / accumulation).backward()
            torch.nn.utils.clip_grad_norm_(adapters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            return time.perf_counter() - began

        torch.cuda.reset_peak_memory_stats()
        for _ in range(arguments.warm_up):
            step()
        seconds = [step() for _ in range(arguments.steps)]
        measured: dict[str, Any] = {
            "vram_allocated_gb": torch.cuda.max_memory_allocated() / 1e9,
            "vram_reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
        }
        whole = process_peak_bytes(torch.device("cuda", torch.cuda.current_device()))
        measured["vram_device_gb"] = None if whole is None else whole / 1e9
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            step()
        kernels = [event for event in trace.key_averages() if "Memcpy HtoD" not in event.key]
        measured["gpu_s_per_step"] = sum(event.self_device_time_total for event in kernels) / 1e6
        config = {
            "model": f"{arguments.shape} (random weights)",
            "tokens": arguments.tokens,
            "batch": 1,
            "accumulation": accumulation,
            "lora": part.model_dump(mode="json"),
            "optimizer": "AdamW",
            "warm_up": arguments.warm_up,
            "unsloth": importlib.metadata.version("unsloth"),
        }
        receipt = Receipt(
            kind="cell",
            case=str(config["model"]),
            method="unsloth",
            model_type=model.config.model_type,
            config=config,
            config_hash=hash_of(config),
            tokens_per_step=arguments.tokens * accumulation,
            trainable_parameters=sum(parameter.numel() for parameter in adapters),
            dtype_policy=f"unsloth's own; adapters {adapters[0].dtype}",
            s_step_median=statistics.median(seconds),
            s_step_std=statistics.stdev(seconds),
            passes=[statistics.median(seconds)],
            steps=arguments.steps,
            host_peak_gb=host_peak_bytes() / 1e9,
            provenance=provenance(),
            **measured,
        )
        receipt.append(arguments.out)
        print(f"unsloth@{accumulation}: {receipt.s_step_median:.4f} s, GPU {receipt.gpu_s_per_step:.4f} s", flush=True)


if __name__ == "__main__":
    main()
