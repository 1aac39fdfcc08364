"""Pages and comparisons: made from receipts alone, and no ratio between unequal cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from poros.cli.app import make_app
from poros.plugins import load_plugins
from poros.receipt import Receipt
from poros_bench.cell import Cell, receipt_of
from poros_bench.config import Case, MethodEntry
from poros_bench.fairness import beyond_spread, differences, ratio
from poros_bench.plots import draw
from poros_bench.report import About, markdown, page_of_html

CASE = Case(name="Qwen2.5-32B", model="qwen2.5-32b")


def receipt(method: str, seconds: float | None = 1.0, vram: float | None = 10.0, **values: Any) -> Receipt:
    cell = Cell(CASE, MethodEntry(method=method), Path("x"), "qwen2.5-32b (random weights)")
    fields: dict[str, Any] = {
        "s_step_median": seconds,
        "s_step_std": 0.01,
        "passes": [seconds] if seconds else [],
        "data_hash": "a",
        "trainable_parameters": 5,
        "tokens_per_step": 512,
        "vram_reserved_gb": vram,
        "losses": [1.0, 2.0],
        **values,
    }
    return receipt_of(cell, **fields)


STOCK, OURS = receipt("resident", 1.0, 30.0), receipt("poros", 0.5, 6.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("data_hash", "b"), ("trainable_parameters", 6), ("tokens_per_step", 1024), ("dtype_policy", "other")],
)
def test_no_ratio_between_unequal_cells(name: str, value: Any) -> None:
    assert ratio(OURS, STOCK) == 0.5
    other = receipt("poros", 0.5, **{name: value})
    assert differences(other, STOCK) == [name]
    assert ratio(other, STOCK) is None
    page = markdown([STOCK, other], About("Title", "command"))
    assert f"no ratio of poros to resident: they differ in {name}" in page
    assert "| poros | - | 0.5000 | 0.0100 | - | - |" in page


def test_nothing_measured_means_nothing_compared() -> None:
    assert ratio(receipt("poros", None), STOCK) is None
    assert differences(receipt("poros", data_hash=None), receipt("resident", data_hash=None)) == ["data_hash"]
    elsewhere = OURS.model_copy(update={"provenance": OURS.provenance.model_copy(update={"gpu_name": "other"})})
    assert differences(elsewhere, STOCK) == ["gpu_name"]


def test_a_page_says_what_is_there_and_what_is_not() -> None:
    cells = [STOCK, OURS, receipt("unsloth", None, None, status="skipped", reason="not installed: unsloth")]
    page = markdown(
        cells, About("Results", "poros bench matrix x.yaml -o out", "A note.", ["Qwen, unsloth"], ["plots/bars-1.png"])
    )
    for words in (
        "# Results",
        "A note.",
        "Not run, or not yet: Qwen, unsloth.",
        "## Qwen2.5-32B: qwen2.5-32b (random weights)",
        "| resident | - | 1.0000 | 0.0100 | 1.00 |",
        "| poros | - | 0.5000 | 0.0100 | 0.50 |",
        "| 0.20 |",
        "skipped: not installed: unsloth",
        "poros takes 0.50 x the time of resident, with 0.20 x its memory; the same first 2 losses to the last bit",
        "on other hardware",
        "| reference streaming system | A100 | 2.0489 | 10.95 |",
        "![bars-1](plots/bars-1.png)",
        "poros bench matrix x.yaml -o out",
    ):
        assert words in page, words
    assert "the same first" not in markdown([STOCK, receipt("poros", 0.5, losses=[1.0, 2.1])], About("T", "c"))


def test_html_says_the_same() -> None:
    page = page_of_html(markdown([STOCK, OURS], About("A <b> title", "command")), "A <b> title")
    assert "<td>0.5000</td>" in page
    assert "<h1>A &lt;b&gt; title</h1>" in page
    assert "<b>" not in page


def test_pictures(tmp_path: Path) -> None:
    names = draw([STOCK, OURS], tmp_path)
    assert names == ["bars-1.png", "memory-1.png"]
    assert all((tmp_path / name).read_bytes()[:4] == b"\x89PNG" for name in names)
    assert draw([receipt("poros", None, None, status="oom")], tmp_path) == []


def test_what_is_trained_must_be_equal_too_and_labels_say_nothing() -> None:
    other = receipt("poros", 0.5)
    dropped = {**other.config["case"], "lora": {**other.config["case"]["lora"], "dropout": 0.1}}
    other = other.model_copy(update={"config": {**other.config, "case": dropped}})
    assert differences(other, STOCK) == ["lora"]
    repeated = {**STOCK.config["case"], "steps": 3}
    assert differences(STOCK.model_copy(update={"config": {**STOCK.config, "case": repeated}}), OURS) == []
    labelled = {**STOCK.config["entry"], "label": "stock"}
    stock = STOCK.model_copy(update={"method": "stock", "config": {**STOCK.config, "entry": labelled}})
    assert "poros takes 0.50 x the time of resident" in markdown([stock, OURS], About("T", "c"))
    posing = OURS.model_copy(update={"method": "resident"})
    assert "x the time of resident" not in markdown([posing, receipt("unsloth", 0.7)], About("T", "c"))


def test_a_difference_within_the_spread_is_none() -> None:
    assert beyond_spread(receipt("poros", 1.0, s_step_std=None), receipt("poros", 2.0)) is None
    assert not beyond_spread(receipt("poros", 1.0), receipt("poros", 1.015))
    assert beyond_spread(receipt("poros", 1.0), receipt("poros", 1.03))


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(make_app(load_plugins()), ["bench", *arguments])


def test_report_and_compare_on_the_command_line(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for folder, seconds in ((before, 1.0), (after, 0.8)):
        for one in (receipt("resident", 1.0, 30.0), receipt("poros", seconds, 6.0)):
            one.append(folder / "receipts.jsonl")
    result = invoke("report", str(before), "--format", "html", "--title", "Mine")
    assert result.exit_code == 0, result.output
    assert "Mine" in (before / "report.html").read_text()
    assert (before / "plots" / "bars-1.png").is_file()
    result = invoke("compare", str(before), str(after))
    assert result.exit_code == 0
    assert "0.800" in result.output
    receipt("poros", 0.7, data_hash="b").append(after / "receipts.jsonl")
    result = invoke("compare", str(before), str(after))
    assert result.exit_code == 1
    assert "unequal" in result.output
    assert invoke("compare", str(before), str(after), "--anyway").exit_code == 0


@pytest.mark.parametrize(
    "arguments", [("report", "nowhere"), ("compare", "nowhere", "elsewhere"), ("matrix", "x.yaml", "-o", "out")]
)
def test_bad_input(arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code != 0
    assert type(result.exception).__name__ == "ConfigError"
