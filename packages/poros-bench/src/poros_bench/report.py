"""Pages from receipts: nothing on them was typed by hand."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poros.plan.published import figures_of
from poros.receipt import Receipt
from poros_bench.fairness import differences, ratio

UNITS = "GB = 1e9 bytes; *reserved* is torch's pool, *process* is what the driver counts, CUDA's context included."


def cases_in(receipts: Sequence[Receipt]) -> dict[str, list[Receipt]]:
    """Receipts by case, in the order in which they come."""
    cases: dict[str, list[Receipt]] = {}
    for receipt in receipts:
        cases.setdefault(receipt.case, []).append(receipt)
    return cases


@dataclass(frozen=True)
class About:
    """What a page says beside what its receipts say.

    Attributes:
        title: Its heading.
        note: Printed under it.
        reproduce: The command that makes the receipts.
        missing: Cells of the matrix without a receipt, as "case, method".
        pictures: Paths of plots, relative to the page.
    """

    title: str
    reproduce: str
    note: str = ""
    missing: Sequence[str] = ()
    pictures: Sequence[str] = ()


def markdown(receipts: Sequence[Receipt], about: About) -> str:
    """A page about the receipts of cells."""
    lines = [f"# {about.title}", "", "Made by `poros bench report` from receipts. " + UNITS, ""]
    lines += [about.note, ""] if about.note else []
    lines += _where(receipts)
    if about.missing:
        lines += ["", "Not run, or not yet: " + "; ".join(about.missing) + "."]
    for case, cells in cases_in(receipts).items():
        lines += ["", f"## {case}", "", *_settings(cells[0]), "", *_table(cells), *_takeaways(cells)]
        lines += _published(cells[0])
    if about.pictures:
        lines += ["", "## Pictures", ""] + [f"![{Path(picture).stem}]({picture})" for picture in about.pictures]
    lines += ["", "## How to reproduce", "", "```", about.reproduce, "```"]
    return "\n".join(lines) + "\n"


def page_of_html(text: str, title: str) -> str:
    """The same page as plain HTML: headings, paragraphs, tables, pictures and code."""
    body: list[str] = []
    rows: list[str] = []
    code = False
    for line in [*text.splitlines(), ""]:
        if rows and not line.startswith("|"):
            body += ["<table>", *rows, "</table>"]
            rows = []
        if line.startswith("```"):
            body.append("</pre>" if code else "<pre>")
            code = not code
        elif code:
            body.append(html.escape(line))
        elif line.startswith("|"):
            if set(line) <= set("|-: "):
                continue
            cell = "th" if not rows else "td"
            rows.append(
                "<tr>" + "".join(f"<{cell}>{_inline(part)}</{cell}>" for part in line.strip("|").split("|")) + "</tr>"
            )
        elif line.startswith("#"):
            level = len(line) - len(line.lstrip("#"))
            body.append(f"<h{level}>{_inline(line.lstrip('# '))}</h{level}>")
        elif line.startswith("!["):
            name, _, target = line[2:].rstrip(")").partition("](")
            body.append(f'<img alt="{html.escape(name)}" src="{html.escape(target)}">')
        elif line.startswith("- "):
            body.append(f"<li>{_inline(line[2:])}</li>")
        elif line:
            body.append(f"<p>{_inline(line)}</p>")
    style = "body{font-family:sans-serif;max-width:70em;margin:2em auto}td,th{border:1px solid #ccc;padding:.3em .6em}"
    return (
        f'<!doctype html><html><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{style}table{{border-collapse:collapse}}img{{max-width:100%}}</style></head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _inline(text: str) -> str:
    return html.escape(text.strip()).replace("*", "").replace("`", "")


def _where(receipts: Sequence[Receipt]) -> list[str]:
    places = dict.fromkeys(
        f"{p.gpu_name or p.cpu or 'unknown machine'}, torch {p.torch}, transformers {p.transformers}, peft {p.peft}, "
        f"bitsandbytes {p.bitsandbytes}, {p.cores} cores, {p.date[:10]}"
        for p in (receipt.provenance for receipt in receipts)
    )
    return [f"- {place}" for place in places]


def _settings(cell: Receipt) -> list[str]:
    case = cell.config["case"]
    lora = case["lora"]
    return [
        f"{case['steps']} steps x {case['passes']} passes after {case['warm_up']} to warm up; "
        f"{case['accumulation']} x {case['batch_size']} x {case['length']} tokens a step; LoRA rank {lora['rank']}, "
        f"alpha {lora['alpha']}, dropout {lora['dropout']}; attention path {case['attention']}; {case['dataset']} rows."
    ]


def _table(cells: Sequence[Receipt]) -> list[str]:
    resident, unsloth = _named(cells, "resident"), _named(cells, "unsloth")
    lines = [
        "| method | attention | s per step | spread | / resident | / unsloth | allocated GB | reserved GB | process GB "
        "| VRAM / resident |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        if cell.status != "ok":
            lines.append(f"| {cell.method} | - | {cell.status}: {(cell.reason or '').replace('|', '/')} |" + " - |" * 7)
            continue
        vram = None
        fair = resident is not None and not differences(cell, resident)
        if fair and resident is not None and resident.vram_reserved_gb and cell.vram_reserved_gb:
            vram = cell.vram_reserved_gb / resident.vram_reserved_gb
        figures = [
            _figure(cell.s_step_median, 4),
            _figure(cell.s_step_std, 4),
            _figure(None if resident is None else ratio(cell, resident), 2),
            _figure(None if unsloth is None else ratio(cell, unsloth), 2),
            _figure(cell.vram_allocated_gb, 2),
            _figure(cell.vram_reserved_gb, 2),
            _figure(cell.vram_device_gb, 2),
            _figure(vram, 2),
        ]
        lines.append(f"| {cell.method} | {cell.config.get('attention', '-')} | " + " | ".join(figures) + " |")
    unfair = [
        f"- no ratio of {cell.method} to resident: they differ in {', '.join(found)}"
        for cell in cells
        if resident is not None and cell.status == "ok" and (found := differences(cell, resident))
    ]
    return lines + (["", *unfair] if unfair else [])


def _takeaways(cells: Sequence[Receipt]) -> list[str]:
    resident = _named(cells, "resident")
    lines = []
    for cell in cells:
        if cell is resident or cell.status != "ok" or resident is None:
            continue
        found = ratio(cell, resident)
        if found is None:
            continue
        words = "as long as" if abs(found - 1) < 0.01 else f"{found:.2f} x the time of"
        memory = ""
        if cell.vram_reserved_gb and resident.vram_reserved_gb:
            memory = f", with {cell.vram_reserved_gb / resident.vram_reserved_gb:.2f} x its memory"
        same = ""
        if cell.losses and cell.losses == resident.losses:
            same = f"; the same first {len(cell.losses)} losses to the last bit"
        lines.append(f"- {cell.method} takes {words} resident{memory}{same}")
    return ["", *lines] if lines else []


def _published(cell: Receipt) -> list[str]:
    figures = figures_of(str(cell.config["case"]["model"]))
    if not figures:
        return []
    lines = [
        "",
        "Published by others, on other hardware:",
        "",
        "| method | GPU | s per step | GB |",
        "|---|---|---|---|",
    ]
    names = {"reference": "reference streaming system"}
    lines += [f"| {names.get(f.method, f.method)} | {f.gpu} | {f.seconds:.4f} | {f.vram_gb:.2f} |" for f in figures]
    return lines


def _named(cells: Sequence[Receipt], method: str) -> Receipt | None:
    """The first measured cell of a method, whatever its label; one without a budget or options of its own."""
    plain: dict[str, Any] = {"method": method, "vram": None, "options": {}, "label": ""}
    done = (cell for cell in cells if cell.status == "ok")
    return next((cell for cell in done if {**cell.config["entry"], "label": ""} == plain), None)


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
