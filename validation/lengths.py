"""Steps over rows of many lengths, as real data has them: what recording graphs for each of them costs.

    python validation/lengths.py qwen2.5-7b --cells poros poros:executor=eager poros:vram=least --multiples 8 64 --out lengths.jsonl

Rows are 64 to `--longest` tokens, evenly spread, padded to each of the multiples; all cells see the same rows.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import get_peft_model

import poros
from poros.config import LoraPart, StreamConfig
from poros.engine.adapters import lora_config
from poros.engine.attach import attach
from poros.engine.attention import attention_path
from poros.engine.budget import enforce, lift, planned, process_bytes
from poros.engine.engine import engine_of
from poros.engine.load import default_device
from poros.engine.optimizer import adamw_for
from poros.parity.resident import random_resident
from poros.parity.source import find_published
from poros.parity.stock import adapters_of, make_adapters_count
from poros.plugins import load_plugins
from poros.provenance import provenance


def main() -> None:
    """Time every step of every cell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape")
    parser.add_argument("--cells", nargs="+", default=["poros"])
    parser.add_argument("--multiples", type=int, nargs="+", default=[8])
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--out", type=Path, default=Path("lengths.jsonl"))
    arguments = parser.parse_args()
    plugins, device, part = load_plugins(), default_device(), LoraPart()
    found = find_published(arguments.shape, plugins)
    assert found is not None
    architecture, shape = found

    def run(cell: str, multiple: int) -> dict[str, Any]:
        stream = yaml.safe_load("{" + cell.partition(":")[2].replace("=", ": ") + "}") or {}
        model = get_peft_model(random_resident(architecture, shape.config, device, arguments.layers), lora_config(part))
        make_adapters_count(model, 0)
        longest = -(-arguments.longest // multiple) * multiple
        draw = random.Random(0)
        rows_of = [draw.randint(64, arguments.longest) for _ in range(arguments.steps)]
        plan = planned(
            StreamConfig(**stream),
            architecture,
            shape.config,
            part,
            tokens=longest,
            padded=True,
            shapes=len({-(-length // multiple) for length in rows_of}),
            num_layers=arguments.layers,
            device=device,
        )
        attach(model, plugins=plugins, plan=plan, **({} if plan else stream))
        engine = engine_of(model)
        if plan is not None:
            enforce(plan, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()  # building the model took more than training it does
        optimizer = adamw_for(engine)(list(adapters_of(model).values()), lr=1e-4)
        ids = torch.Generator().manual_seed(0)
        model.train()
        seconds, recorded, lengths, process = [], [], [], []
        for length in rows_of:
            padded = -(-length // multiple) * multiple
            rows = torch.randint(0, shape.config["vocab_size"], (1, padded), generator=ids).to(device)
            mask = (torch.arange(padded, device=device) < length).long()[None]
            if device.type == "cuda":
                torch.cuda.synchronize()
            before, began = getattr(engine.executor, "record_seconds", 0.0), time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(
                    input_ids=rows, attention_mask=mask, labels=rows.masked_fill(mask == 0, -100), use_cache=False
                ).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(round(time.perf_counter() - began, 4))
            recorded.append(round(getattr(engine.executor, "record_seconds", 0.0) - before, 4))
            lengths.append(padded)
            process.append(process_bytes(device))
        result = {
            "case": f"{shape.id} (random weights)",
            "cell": cell,
            "multiple": multiple,
            "s_total": round(sum(seconds), 3),
            "s_recording": round(sum(recorded), 3),
            "shapes": len(set(lengths)),
            "recordings": sum(value > 0 for value in recorded),
            "eager_blocks": getattr(engine.executor, "num_eager", None),
            "without_room": getattr(engine.executor, "num_without_room", None),
            "vram_reserved_gb": torch.cuda.max_memory_reserved() / 1e9 if device.type == "cuda" else None,
            "graphs": sum(map(len, getattr(engine.executor, "_shapes", {}).values())),
            "process_bytes": process,
            "seconds": seconds,
            "recorded": recorded,
            "lengths": lengths,
            "provenance": provenance().model_dump(),
        }
        poros.close(model)
        lift(device)
        return result

    with attention_path("fused"):
        for cell in arguments.cells:
            for multiple in arguments.multiples:
                result = run(cell, multiple)
                with arguments.out.open("a") as out:
                    out.write(json.dumps(result) + "\n")
                print({key: value for key, value in result.items() if key != "provenance"}, flush=True)


if __name__ == "__main__":
    main()
