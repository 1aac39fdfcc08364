"""How far a run ends up from stock when one thing differs that leaves the mathematics as it is, but not the arithmetic.

    python validation/what_breaks_it.py                 prints the table of docs/exactness.md, from what_breaks_it.json
    python validation/what_breaks_it.py measure         measures, and writes what_breaks_it.json

A tiny Qwen2 with random weights in NF4, stock throughout: transformers, peft and bitsandbytes on one thread of a CPU, nothing
of Poros' engine. Three steps of AdamW on four rows of 64 tokens each, LoRA of rank 8 with B other than zero, no dropout. The size of
a difference is the largest one within an adapter's gradient over the largest entry of that gradient; of all adapters the
largest counts. Other models and devices have other sizes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from poros.config import LoraPart
from poros.engine.adapters import lora_config
from poros.engine.attention import attention_path
from poros.parity.stock import adapters_of, load_stock, make_adapters_count
from poros.plugins import load_plugins
from poros.provenance import provenance
from poros.testing.checkpoints import make_checkpoint

RESULTS = Path(__file__).parent / "what_breaks_it.json"
CPU = torch.device("cpu")
ROWS, LENGTH, STEPS, VOCABULARY = 4, 64, 3, 512


def loss_of(model: Any, rows: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=rows, labels=rows, use_cache=False).loss


def whole(model: Any, rows: torch.Tensor) -> None:
    loss_of(model, rows).backward()


def one_by_one(model: Any, rows: torch.Tensor) -> None:
    for row in rows:
        (loss_of(model, row[None]) / len(rows)).backward()


def in_pieces(tokens: int, entries: int, model: Any, rows: torch.Tensor) -> None:
    """Head and loss of a few tokens and of a part of the vocabulary at a time, as fused losses do. The settings of Poros
    (`stream.loss_rows`) keep the product of hidden states and head whole."""
    causal = model.get_base_model()
    with torch.autocast("cpu", torch.bfloat16):
        hidden = causal.model(input_ids=rows, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        targets = rows[:, 1:].flatten()
        loss = torch.zeros(())
        for piece, wanted in zip(hidden.split(tokens), targets.split(tokens), strict=True):
            logits = [functional.linear(piece, part) for part in causal.lm_head.weight.split(entries)]
            loss = loss + functional.cross_entropy(torch.cat(logits, -1).float(), wanted, reduction="sum")
    (loss / len(targets)).backward()


def in_bf16(model: Any) -> None:
    for parameter in adapters_of(model).values():
        parameter.data = parameter.data.bfloat16()


def with_another_code(model: Any) -> None:
    weight = next(module.weight for module in model.modules() if type(module).__name__ == "Linear4bit")
    weight.data.view(-1)[0] ^= 8


def backwards(model: Any, rows: torch.Tensor) -> None:
    one_by_one(model, rows.flip(0))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adapters in bf16 (TRL's `SFTTrainer`) instead of float32 (plain peft)": ({}, {"change": in_bf16}),
    "4 micro-batches of 1 row instead of 1 of 4 rows": ({}, {"run": one_by_one}),
    "attention by `math` instead of `fused`": ({}, {"attention": "math"}),
    "head and loss for 16 tokens at a time instead of at once": ({}, {"run": partial(in_pieces, 16, VOCABULARY)}),
    "head and loss for a quarter of the vocabulary at a time": ({}, {"run": partial(in_pieces, 256, VOCABULARY // 4)}),
    "gradients of 4 micro-batches added in the opposite order": ({"run": one_by_one}, {"run": backwards}),
    "the same with adapters, and so gradients, in bf16": (
        {"change": in_bf16, "run": one_by_one},
        {"change": in_bf16, "run": backwards},
    ),
    "for comparison, an error: one bit of one NF4 code of the first layer is wrong": ({}, {"change": with_another_code}),
    "for comparison: the same run again": ({}, {}),
}
"""What differs -> how the run to compare with is made, and how the other one."""

EQUAL = frozenset(
    {
        "head and loss for 16 tokens at a time instead of at once",
        "for comparison: the same run again",
    }
)
"""What leaves every gradient as it is. A test holds them to 0, and all others but `RARE` to more."""

RARE = "gradients of 4 micro-batches added in the opposite order"
"""What leaves every gradient as it is on some processors."""


def gradients(
    checkpoint: Path, run: Any = whole, change: Any = None, attention: Any = "fused"
) -> list[dict[str, torch.Tensor]]:
    """Every adapter's gradient, step by step."""
    model = load_stock(checkpoint, lora_config(LoraPart(rank=8)), 0, CPU)
    make_adapters_count(model, 0)
    if change is not None:
        change(model)
    model.train()
    adapters = adapters_of(model)
    optimizer = torch.optim.AdamW(adapters.values(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    found = []
    with attention_path(attention):
        for _ in range(STEPS):
            run(model, torch.randint(0, model.config.vocab_size, (ROWS, LENGTH), generator=generator))
            found.append({name: parameter.grad.double() for name, parameter in adapters.items()})
            optimizer.step()
            optimizer.zero_grad()
    return found


def sizes_of(reference: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """The largest difference at the first and the last step, and how many gradients differ at any."""
    off = []
    for one, two in zip(reference, other, strict=True):
        assert one.keys() == two.keys() and all(bool(gradient.any()) for gradient in one.values())
        off.append([float((two[name] - mine).abs().max() / mine.abs().max()) for name, mine in one.items()])
    differ = sum(bool(size) for step in off for size in step)
    return {"first": max(off[0]), "last": max(off[-1]), "gradients": sum(map(len, off)), "differ": differ}


def measure() -> dict[str, Any]:
    """The sizes of all cases."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    family = next(one for one in load_plugins().architectures() if one.family == "qwen2")
    try:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = make_checkpoint(Path(folder) / "model", family, {"vocab_size": VOCABULARY})
            stock = gradients(checkpoint)
            sizes = {
                name: sizes_of(gradients(checkpoint, **one) if one else stock, gradients(checkpoint, **other))
                for name, (one, other) in CASES.items()
            }
    finally:
        torch.set_num_threads(threads)
    made = provenance().model_dump(include={"torch", "transformers", "peft", "bitsandbytes", "cpu", "date"})
    return {"sizes": sizes, "provenance": made}


def table() -> str:
    """What differs, how large the difference is, and how many gradients are hit."""
    lines = [f"| what differs | first step | step {STEPS} | gradients that differ |", "|---|---|---|---|"]
    for name, size in json.loads(RESULTS.read_text())["sizes"].items():
        first, last = (f"{size[step]:.2g}" for step in ("first", "last"))
        lines.append(f"| {name} | {first} | {last} | {size['differ']} of {size['gradients']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        RESULTS.write_text(json.dumps(measure(), indent=1) + "\n")
    print(table())
