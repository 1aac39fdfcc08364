"""Configs: every problem at once, each with its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from poros.config import LoraPart, RunConfig, load_config, validated
from poros.errors import ConfigError

GOOD: dict[str, Any] = {"model.path": "m", "data.path": "d", "out": "o"}


def test_defaults_are_what_the_documentation_says() -> None:
    config = load_config(None, GOOD)
    assert config.lora == LoraPart(rank=16, alpha=32, dropout=0.0, targets="all-linear")
    assert config.training.attention == "fused"
    assert (config.stream.block_size, config.stream.slots, config.stream.tier) == (1, 2, "auto")


def test_flags_override_assignments_and_those_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: a}\ndata: {path: b}\nout: c\ntraining: {seed: 1, steps: 1}\nlora: {rank: 2}\n")
    config = load_config(
        file, {"training.seed": 3, "training.steps": None}, ["training.seed=2", "lora.targets=[q_proj]"]
    )
    assert (config.training.seed, config.training.steps, config.lora.rank) == (3, 1, 2)
    assert config.lora.targets == ("q_proj",)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(
            None,
            {"data.path": "d", "training.steps": 0, "lora.dropout": 1.5},
            ["lora.rnk=3", "stream.slots=none", "training.attention=magic", "nonsense", "out=[1", "lora.rank.deep=1"],
        )
    message = caught.value.message
    for words in (
        "model: is required",
        "out: is required",
        "training.steps: Input should be greater than 0 (got 0)",
        "lora.dropout",
        "lora.rnk: is not a known key",
        "stream.slots",
        "training.attention",
        "--set nonsense: expected a.b=value",
        "--set out=[1: the value is not YAML",
    ):
        assert words in message, words


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a: [", "is not YAML"),
        ("- a\n", "holds a list"),
        ("!!python/object/apply:os.system [true]", "is not YAML"),
        ("", "model: is required"),
        ("model: text\n", "model"),
        (b"\xff\xfe\x00", "can't read"),
    ],
)
def test_bad_files_are_refused(content: str | bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=words):
        load_config(file)


def test_configs_are_frozen_and_hash_their_values() -> None:
    config = load_config(None, GOOD)
    with pytest.raises(ValidationError):
        config.out = "elsewhere"
    assert config.hash == load_config(None, GOOD).hash
    assert config.hash != load_config(None, {**GOOD, "lora.rank": 8}).hash
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


def test_an_empty_part_means_its_defaults_and_one_target_needs_no_list(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: a}\ndata: {path: b}\nout: c\ntraining:\nlora:\n")
    config = load_config(file, {"training.steps": 3}, ["lora.targets=q_proj"])
    assert config.training.steps == 3
    assert config.lora.targets == ("q_proj",)


def test_no_target_is_refused() -> None:
    with pytest.raises(ConfigError, match="name at least one linear layer"):
        validated(LoraPart, {"targets": []}, "lora")
