"""Prints the tables of the documents from the receipts beside it.

    python validation/tables.py
"""

from __future__ import annotations

from pathlib import Path

from poros.receipt import Receipt, read_receipts

HERE = Path(__file__).parent

SETTINGS = {
    "": "two slots",
    "resident=all,recompute=false": "everything resident, no recompute",
    "restore_once=false": "two slots, weights restored at each use",
    "executor=eager": "two slots, eager",
}


PLACES = ("embedding", "head", "optimizer", "gradients", "boundaries")


def cells(file: str) -> str:
    """One line per Poros cell, beside the stock cell of the same work in the same file."""
    receipts = read_receipts(HERE / file)
    lines = [
        "| case | stock s | Poros s | ratio | GPU time ratio | stock GB | Poros GB | copied / link, of the step | stall s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for receipt in receipts:
        if not receipt.method.startswith("poros"):
            continue
        micro_batches = receipt.config["accumulation"]
        stock = next(
            (
                other
                for other in receipts
                if other.method == "resident"
                and other.case == receipt.case
                and other.config["accumulation"] == micro_batches
                and other.losses[: len(receipt.losses)] == receipt.losses[: len(other.losses)]
            ),
            None,
        )
        settings = SETTINGS[receipt.method.partition(":")[2]]
        name = ", ".join(
            filter(
                None,
                [
                    _shown(receipt.case),
                    f"{micro_batches} micro-batches" if micro_batches > 1 else "",
                    settings,
                ],
            )
        )
        assert receipt.s_step_median is not None
        row = [
            name,
            _number(_each(stock, "s_step_median")),
            _number(_each(receipt, "s_step_median")),
            _ratio(receipt, stock, "s_step_median"),
            _ratio(receipt, stock, "gpu_s_per_step"),
            "-" if stock is None else _number(stock.vram_reserved_gb, 1),
            _number(receipt.vram_reserved_gb, 1),
            "-" if receipt.link_share is None else f"{receipt.link_share:.1%}",
            _number(_each(receipt, "stall_s_per_step")),
        ]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def planned(*files: str) -> str:
    """What was predicted for each planned cell, beside what was measured, and the stock cell of the same work."""
    receipts = [receipt for file in files for receipt in read_receipts(HERE / file)]
    lines = [
        "| case | tokens | budget | reserved GB | process GB | predicted | s per step | predicted | of copies / link | of stock |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for receipt in receipts:
        plan = receipt.plan
        if plan is None or receipt.s_step_median is None or receipt.vram_device_gb is None:
            continue
        tokens = receipt.config["tokens"]
        stock = next(
            (
                other
                for other in receipts
                if other.method == "resident" and other.case == receipt.case and other.config["tokens"] == tokens
            ),
            None,
        )
        assert receipt.link_gb_s is not None
        # The process was looked at after the run; where the allocator had given memory back by then, it says too little.
        whole = receipt.vram_device_gb if receipt.vram_device_gb > (receipt.vram_reserved_gb or 0) else None
        budget = receipt.method.partition("vram=")[2].partition(",")[0]
        row = [
            _shown(receipt.case),
            str(tokens),
            {"least": "smallest"}.get(budget, budget) + (", kept to" if receipt.config.get("limited") else ""),
            _number(receipt.vram_reserved_gb, 2),
            _number(whole, 2),
            "-" if whole is None else f"{plan['predicted_vram_gb'] / whole - 1:+.1%}",
            _number(receipt.s_step_median),
            f"{plan['predicted_s_step'] / receipt.s_step_median - 1:+.1%}",
            f"{receipt.s_step_median * receipt.link_gb_s / plan['predicted_copied_gb']:.2f}",
            _ratio(receipt, stock, "s_step_median"),
        ]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def checks(*files: str) -> str:
    """One line per run of the gate."""
    lines = [
        "| model | attention | executor | settings | steps x micro-batches x rows x tokens | dropout | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for file in files:
        for receipt in read_receipts(HERE / file):
            work, stream = receipt.config["work"], receipt.config["stream"]
            settings = [f"{stream['slots']} slots"]
            settings += [f"blocks of {stream['block_size']}"] if stream["block_size"] > 1 else []
            if stream.get("resident"):
                settings.append(f"{stream['resident']} resident" + ("" if stream["recompute"] else ", activations kept"))
            away = [name for name in PLACES if stream.get(name) == "host"]
            if away:
                settings.append(f"on the host: {', '.join(away)}")
            if stream.get("loss_rows"):
                settings.append("loss in pieces")
            if receipt.config.get("lockstep"):
                settings.append("in lockstep")
            equal = [name for name, same in receipt.parity.items() if same]
            verdict = f"identical on {len(equal)} surfaces" if receipt.reason is None else receipt.reason
            row = [
                receipt.case.replace(" (random weights)", "").replace("random weights, ", ""),
                receipt.config["attention"],
                receipt.config.get("executor", receipt.config["stream"]["executor"]),
                ", ".join(settings),
                f"{work['steps']} x {work['accumulation']} x {work['batch_size']} x {work['length']}",
                str(receipt.config["lora"]["dropout"]),
                verdict,
            ]
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def default_path() -> str:
    """Where stock repeated itself on the `default` path, model by model, by all receipts of the gate."""
    runs: dict[str, list[bool]] = {}
    for file in sorted(HERE.glob("*.jsonl")):
        for receipt in read_receipts(file):
            if receipt.kind == "check" and receipt.config["attention"] == "default" and receipt.provenance.gpu_name:
                model = receipt.case.replace("random weights, ", "").replace(" (random weights)", "")
                runs.setdefault(model, []).append(receipt.reason != "not reproducible on this path")
    lines = ["| stock against stock, `default`, on an H200 | repeated itself |", "|---|---|"]
    lines += [f"| {model} | {sum(same)} of {len(same)} |" for model, same in sorted(runs.items())]
    return "\n".join(lines)


def _shown(case: str) -> str:
    return case.removesuffix(" (random weights)").replace("qwen", "Qwen").replace("b", "B")


def _each(receipt: Receipt | None, name: str) -> float | None:
    """A figure per micro-batch."""
    value = None if receipt is None else getattr(receipt, name)
    return None if value is None or receipt is None else value / receipt.config["accumulation"]


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _ratio(receipt: Receipt, stock: Receipt | None, name: str) -> str:
    mine, theirs = getattr(receipt, name), None if stock is None else getattr(stock, name)
    return "-" if mine is None or theirs is None else f"{mine / theirs:.2f}"


def tables() -> list[str]:
    """Every table of README.md and validation/README.md that comes from receipts."""
    return [
        *map(cells, ("cells_h200.jsonl", "cells_h200_second.jsonl", "cells_h200_first.jsonl")),
        checks("gpu_long_h200.jsonl"),
        checks("gpu_parity_h200.jsonl", "gpu_parity_h200_first.jsonl"),
        planned("cells_h200_planned.jsonl"),
        checks("gpu_planned_h200.jsonl"),
        checks("gpu_families_h200.jsonl", "gpu_real_gemma3_270m_h200.jsonl"),
    ]


if __name__ == "__main__":
    for table in (*tables(), default_path()):
        print(table, end="\n\n")
