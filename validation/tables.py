"""Prints the tables of the documents from the receipts beside it.

    python validation/tables.py
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from poros.config import StreamConfig
from poros.plan.cards import CARDS
from poros.plan.job import Job
from poros.plan.memory import outside_torch
from poros.plan.search import Plan, describe
from poros.plugins import load_plugins
from poros.receipt import Receipt, read_receipts

HERE = Path(__file__).parent

SETTINGS = {
    "": "two slots",
    "resident=all,recompute=false": "everything resident, no recompute",
    "restore_once=false": "two slots, weights restored at each use",
    "executor=eager": "two slots, eager",
}


KEPT_TO = {True: ", kept to", "broken": ", broken"}
"""What `limited` of a receipt says of its budget; without it none was enforced."""

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
            {"least": "smallest"}.get(budget, budget) + KEPT_TO.get(receipt.config.get("limited", False), ""),
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


def beside_unsloth(*files: str) -> str:
    """Each Poros cell with the work of an unsloth cell of the same file, per micro-batch."""
    lines = [
        "| case | micro-batches | settings | unsloth s | Poros s | ratio | GPU time ratio | unsloth GB | Poros GB |",
        "|---" * 9 + "|",
    ]
    for file in files:
        receipts = read_receipts(HERE / file)
        for mine in (receipt for receipt in receipts if receipt.method.startswith("poros")):
            work = (mine.case, mine.config["accumulation"], mine.config["tokens"])
            for theirs in receipts:
                if theirs.method != "unsloth" or work != (theirs.case, *map(theirs.config.get, ("accumulation", "tokens"))):
                    continue
                row = [
                    _shown(mine.case),
                    str(mine.config["accumulation"]),
                    _settings(mine),
                    _number(_each(theirs, "s_step_median")),
                    _number(_each(mine, "s_step_median")),
                    _ratio(mine, theirs, "s_step_median"),
                    _ratio(mine, theirs, "gpu_s_per_step"),
                    _number(theirs.vram_reserved_gb, 1),
                    _number(mine.vram_reserved_gb, 1),
                ]
                lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def plan_today(receipt: Receipt) -> Plan:
    """What a cell is predicted to take and to need by the model as it is now, at the link's speed of that day."""
    shape, config = receipt.case.split()[0], receipt.config
    family, values = next(
        (family, one.config) for family in load_plugins().architectures() for one in family.published if one.id == shape
    )
    assert family.dimensions is not None
    job = Job(dimensions=family.dimensions(values), tokens=config["tokens"], micro_batches=config["accumulation"])
    link = receipt.link_gb_s or CARDS["h200"].link_gb_s
    return describe(job, StreamConfig(**config["stream"]), dataclasses.replace(CARDS["h200"], link_gb_s=link))


def memory_today(receipt: Receipt) -> tuple[str, float, float]:
    """What of a cell's memory can be compared, what it took of that, and what it is predicted to take, in GB.

    The whole process, as the driver counts it. Where nobody asked the driver: what torch reserved, less a copy of the adapters
    that the measuring script held. Where a budget was kept to, what torch reserved is the budget: there it is what was
    allocated at the fullest moment, with the memory of recorded graphs, which isn't counted as allocated.
    """
    plan = plan_today(receipt)
    whole, context = plan.device_bytes / 1e9, outside_torch(plan.device) / 1e9
    if receipt.config.get("limited") is True:
        assert receipt.plan is not None and receipt.vram_allocated_gb is not None
        pools = receipt.plan["measured_pools"]
        in_graphs = pools["graphs reserved"] - pools["graphs allocated"]
        return "allocated", receipt.vram_allocated_gb + in_graphs, whole - context - plan.device["allocator"] / 1e9
    if receipt.vram_device_gb is not None:
        return "process", receipt.vram_device_gb, whole
    assert receipt.vram_reserved_gb is not None and receipt.trainable_parameters is not None
    return "reserved", receipt.vram_reserved_gb - 4 * receipt.trainable_parameters / 1e9, whole - context


FITTED = ("cells_h200.jsonl", "cells_h200_planned.jsonl")
"""The cells that have shaped the model of memory and time."""


def predictions(*files: str) -> str:
    """What the model of memory and time, as it is now, says of each cell, beside what was measured."""
    lines = ["| case | tokens | settings | GB | taken | predicted | off | s | predicted | off |", "|---" * 10 + "|"]
    for receipt in (receipt for file in files for receipt in read_receipts(HERE / file)):
        if not receipt.method.startswith("poros"):
            continue
        assert receipt.s_step_median is not None
        what, taken, predicted = memory_today(receipt)
        seconds = plan_today(receipt).seconds.step
        micro_batches = receipt.config["accumulation"]
        row = [
            _shown(receipt.case),
            str(receipt.config["tokens"]) + (f" x {micro_batches}" if micro_batches > 1 else ""),
            _settings(receipt),
            what,
            _number(taken, 2),
            _number(predicted, 2),
            f"{predicted / taken - 1:+.1%}",
            _number(receipt.s_step_median),
            _number(seconds),
            f"{seconds / receipt.s_step_median - 1:+.1%}",
        ]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def exceptions() -> str:
    """The cells whose memory is predicted more than 5% wrong."""
    head, rule, *rows = predictions(*FITTED).splitlines()
    found = [row for row in rows if abs(float(row.split(" | ")[6].rstrip("%"))) > 5]
    return "\n".join([*(line.rsplit("|", 4)[0] + "|" for line in (head, rule, *found))])


def checks(*files: str, memory: bool = False) -> str:
    """One line per run of the gate; with the memory that was planned and taken for the whole process, in GB."""
    lines = [
        "| model | attention | executor | settings | steps x micro-batches x rows x tokens | dropout | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    if memory:
        lines = [lines[0] + " predicted GB | process GB |", lines[1] + "---|---|"]
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
            if memory:
                row += [_number(receipt.plan and receipt.plan["predicted_vram_gb"]), _number(receipt.vram_device_gb)]
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


def _settings(receipt: Receipt) -> str:
    settings = receipt.method.partition(":")[2]
    return SETTINGS.get(settings) or settings.partition("vram=")[2].replace("least", "smallest budget")


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
        planned("cells_h200_budgets.jsonl"),
        beside_unsloth("cells_h200_eight.jsonl", "cells_h200_budgets.jsonl"),
        planned("cells_h200_planned.jsonl"),
        predictions(*FITTED),
        checks("gpu_planned_h200.jsonl", memory=True),
        checks("gpu_families_h200.jsonl", "gpu_real_gemma3_270m_h200.jsonl"),
    ]


if __name__ == "__main__":
    for table in (*tables(), default_path()):
        print(table, end="\n\n")
