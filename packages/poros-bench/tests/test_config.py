"""Matrix files: every problem at once, every shipped one loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from poros.errors import ConfigError
from poros.plan.published import PUBLISHED
from poros.plugins import load_plugins
from poros_bench.config import Case, MethodEntry, load_matrix
from poros_bench.models import directory_of, name_of
from poros_bench.plugin import find_method, installed_methods

CONFIGS = Path(__file__).parents[3] / "configs" / "bench"
METHODS = installed_methods()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_matrix_loads(path: Path) -> None:
    config = load_matrix(path, METHODS)
    shapes = {shape.id for family in load_plugins().architectures() for shape in family.published}
    assert all(case.model in shapes for case in config.cases)
    assert config.title


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("official_[ab]*.yaml")), ids=lambda path: path.stem)
def test_the_reference_systems_settings(path: Path) -> None:
    """200 steps, 3 passes, 512 tokens, batch 1, rank 16, alpha 32, no dropout, block size 4, synthetic rows."""
    (case,) = load_matrix(path, METHODS).cases
    assert (case.steps, case.passes, case.length, case.batch_size, case.accumulation) == (200, 3, 512, 1, 1)
    assert (case.lora.rank, case.lora.alpha, case.lora.dropout, case.block_size) == (16, 32, 0.0, 4)
    assert case.dataset == "synthetic"
    gpu = path.stem.split("_")[1].upper()
    assert any(figure.shape == case.model and figure.gpu == gpu for figure in PUBLISHED)


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    file = tmp_path / "matrix.yaml"
    file.write_text(
        "defaults: {steps: 0}\n"
        "cases: [{name: a, model: x, colour: red}, {name: b}]\n"
        "methods: [resident, hopes, {method: poros, vram: lots}, {method: poros, options: {slots: -1}}]\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_matrix(file, METHODS)
    for words in ("cases.0.colour", "cases.0.steps", "cases.1.model", "vram", "slots", "no method is called hopes"):
        assert words in caught.value.message, words
    assert "unsloth" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cases: []\nmethods: [resident]", "cases"),
        ("cases: [{name: a, model: x}]\nmethods: []", "methods"),
        ("cases: [{name: a, model: x}, {name: a, model: y}]\nmethods: [resident]", "share a name: a"),
        ("cases: [{name: a, model: x}]\nmethods: [resident, resident]", "share a name: resident"),
        ("cases: [{name: a, model: x}]\nmethods: [{method: soup, options: {buffers: 1}}]", "soup: options.buffers"),
        ("cases: [{name: a, model: x}]\nmethods: [{method: resident, options: {slots: 2}}]", "has no options"),
        ("defaults: 3\ncases: [{name: a, model: x}]\nmethods: [resident]", "defaults"),
        ("cases: [{name: a, model: x}]\nmethods: 5", "methods"),
        ("cases: [{name: a, model: x}, {name: b, model: x}]\nmethods: [resident]", "a and b are the same"),
        ("cases: [{name: a, model: x}]\nmethods: [unsloth, {method: unsloth, label: u}]", "unsloth and u are the same"),
        ("cases: [{name: a, model: x}]\nmethods: [{method: resident, vram: 3GB}]", "resident takes no budget"),
        ("cases: [{name: a, model: ., layers: 2}]\nmethods: [resident]", "a is a directory"),
        ("surprise: 1\ncases: [{name: a, model: x}]\nmethods: [resident]", "surprise"),
    ],
)
def test_what_is_wrong_is_said(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "matrix.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_matrix(file, METHODS)


def test_names_of_entries() -> None:
    assert MethodEntry(method="poros").name == "poros"
    assert MethodEntry(method="poros", vram="least").name == "poros (smallest budget)"
    assert MethodEntry(method="poros", vram="11GB", options={"slots": 3}).name == "poros (11GB) [slots=3]"
    assert MethodEntry(method="poros", label="ours").name == "ours"


def test_a_method_is_found_by_name() -> None:
    assert find_method("unsloth").entry == "poros_bench.ways:unsloth"
    with pytest.raises(ConfigError, match="hopes") as caught:
        find_method("hopes")
    assert "resident" in caught.value.hint


def test_where_models_are(tmp_path: Path) -> None:
    plugins = load_plugins()
    shape = Case(name="a", model="qwen2.5-0.5b", layers=2)
    assert name_of(shape, plugins) == "qwen2.5-0.5b (random weights, first 2 layers)"
    assert directory_of(shape, plugins, tmp_path).parent == tmp_path
    other = Case(name="a", model="qwen2.5-0.5b")
    assert directory_of(other, plugins, tmp_path) != directory_of(shape, plugins, tmp_path)
    (tmp_path / "checkpoint").mkdir()
    own = Case(name="a", model=str(tmp_path / "checkpoint"))
    assert directory_of(own, plugins, tmp_path) == tmp_path / "checkpoint"
    assert name_of(own, plugins) == own.model
