"""The tables of the documents are what the receipts say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from poros.receipt import read_receipts

ROOT = Path(__file__).parents[1]
VALIDATION = ROOT / "validation"


@pytest.fixture(scope="module")
def tables() -> list[str]:
    spec = importlib.util.spec_from_file_location("validation_tables", VALIDATION / "tables.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.tables()


def test_tables_are_those_of_the_receipts(tables: list[str]) -> None:
    page = (VALIDATION / "README.md").read_text()
    assert all(len(table.splitlines()) > 2 for table in tables)
    for table in tables:
        assert table in page
    assert tables[0] in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("file", sorted(path.name for path in VALIDATION.glob("*.jsonl")))
def test_every_receipt_is_valid_and_described(file: str) -> None:
    assert read_receipts(VALIDATION / file)
    page = (VALIDATION / "README.md").read_text()
    assert file in page or f"{file.partition('h200')[0]}h200*" in page


def test_the_table_of_stacks_is_what_was_found() -> None:
    spec = importlib.util.spec_from_file_location("validation_stacks", VALIDATION / "stacks.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.table() in (ROOT / "docs" / "stacks.md").read_text()
    assert " failed" not in module.table()


def test_pages_of_results_are_made_from_receipts(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("validation_pages", VALIDATION / "pages.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert set(module.PAGES) == {folder.name for folder in (VALIDATION / "bench").iterdir()}
    pages = module.make(tmp_path)
    assert {page.name for page in pages} == {page.name for page in (ROOT / "docs" / "results").glob("*.md")}
    for page in pages:
        assert page.read_text() == (ROOT / "docs" / "results" / page.name).read_text()
        drawn = {picture.name for picture in (tmp_path / f"{page.stem}-plots").glob("*.png")}
        assert drawn == {picture.name for picture in (ROOT / "docs" / "results" / f"{page.stem}-plots").glob("*.png")}
