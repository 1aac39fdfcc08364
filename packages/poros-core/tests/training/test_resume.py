"""Resuming goes on from the newest complete checkpoint and from no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from poros.config import load_config
from poros.errors import ConfigError
from poros.training.resume import MANIFEST, find_resumable, run_identity, write_manifest

FILES = ("adapter_model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json")


def checkpoint(out: Path, step: int, identity: str = "same") -> Path:
    folder = out / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_bytes(name.encode() * 10)
    write_manifest(folder, identity)
    return folder


def test_the_newest_is_taken(tmp_path: Path) -> None:
    for step in (5, 20, 100):
        checkpoint(tmp_path, step)
    assert find_resumable(tmp_path, "same").folder == tmp_path / "checkpoint-100"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncate", "delete", "empty"])
def test_an_incomplete_one_is_passed_over_and_named(name: str, damage: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, 10)
    path = checkpoint(tmp_path, 20) / name
    {
        "truncate": lambda: path.write_bytes(path.read_bytes()[:-1]),
        "delete": path.unlink,
        "empty": lambda: path.write_bytes(b""),
    }[damage]()
    found = find_resumable(tmp_path, "same")
    assert found.folder == tmp_path / "checkpoint-10"
    assert len(found.passed_over) == 1
    assert "checkpoint-20" in found.passed_over[0]
    assert name in found.passed_over[0]


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}"])
def test_one_that_was_never_finished_is_passed_over(content: str | None, tmp_path: Path) -> None:
    manifest = checkpoint(tmp_path, 20) / MANIFEST
    if content is None:
        manifest.unlink()
    else:
        manifest.write_text(content)
    found = find_resumable(tmp_path, "same")
    assert found.folder is None
    assert len(found.passed_over) == 1


def test_one_of_another_run_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, 20, "other")
    with pytest.raises(ConfigError, match="another config or other data"):
        find_resumable(tmp_path, "same")


def test_nothing_there(tmp_path: Path) -> None:
    assert find_resumable(tmp_path, "same").folder is None


def config(**values: Any) -> Any:
    return load_config(None, {"model.path": "m", "data.path": "d", "out": "o", **values})


def test_identity_is_what_decides_the_numbers() -> None:
    base = run_identity(config(), "rows")
    for values in (
        {"out": "elsewhere", "resume": True},
        {"stream.slots": 5, "stream.block_size": 2, "stream.tier": "pageable"},
        {"training.log_every": 7, "training.keep_checkpoints": 5, "training.eval_every": 3, "data.eval_path": "x"},
    ):
        assert base == run_identity(config(**values), "rows"), values
    assert base != run_identity(config(), "other rows")
    assert base != run_identity(config(**{"training.seed": 1}), "rows")
