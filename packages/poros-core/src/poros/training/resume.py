"""Checkpoints of a training run: which one is complete, and which one to go on from.

A checkpoint counts only when its manifest is there, and the manifest is written last, with the size of every file. A
run that was killed while saving leaves a folder without one; resume passes over it and says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from poros.config import RunConfig, hash_of
from poros.errors import ConfigError
from poros.training.output import flush

MANIFEST = "poros_manifest.json"


@dataclass(frozen=True)
class Resumable:
    """Where to go on.

    Attributes:
        folder: The newest complete checkpoint, or None to start from the beginning.
        passed_over: Newer checkpoints that are not complete, with what is wrong with each.
    """

    folder: Path | None
    passed_over: tuple[str, ...]


def run_identity(config: RunConfig, data_hash: str) -> str:
    """A hash of everything that decides the numbers, and so must be the same for a run to be resumed."""
    reporting = {"log_every", "save_every", "eval_every", "keep_checkpoints"}
    values = config.model_dump(
        mode="json",
        exclude={
            "out": True,
            "overwrite": True,
            "resume": True,
            "stream": True,
            "data": {"eval_path"},
            "training": reporting,
        },
    )
    return hash_of({"config": values, "data": data_hash})


def write_manifest(folder: Path, identity: str) -> None:
    """Declare a checkpoint complete: every file flushed and its size noted."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    for path in files:
        flush(path)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    unfinished = folder / f".{MANIFEST}"
    unfinished.write_text(json.dumps({"identity": identity, "files": sizes}, indent=1), encoding="utf-8")
    flush(unfinished)
    unfinished.replace(folder / MANIFEST)
    flush(folder)


def find_resumable(out: Path, identity: str) -> Resumable:
    """The newest complete checkpoint in an output folder.

    Raises:
        ConfigError: the newest complete one belongs to a run with another config or other data.
    """
    passed_over = []
    folders = [folder for folder in out.glob("checkpoint-*") if folder.name.removeprefix("checkpoint-").isdigit()]
    for folder in sorted(folders, key=lambda folder: -int(folder.name.removeprefix("checkpoint-"))):
        problem, found = _examine(folder)
        if problem:
            passed_over.append(f"{folder.name}: {problem}")
        elif found != identity:
            raise ConfigError(
                f"{folder} was made with another config or other data",
                "resume with the config and the data of that run, or start anew with --overwrite",
            )
        else:
            return Resumable(folder, tuple(passed_over))
    return Resumable(None, tuple(passed_over))


def is_finished(checkpoint: Path) -> bool:
    """Whether a complete checkpoint is of the run's last step."""
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    return int(state["global_step"]) >= int(state["max_steps"])


def _examine(folder: Path) -> tuple[str, str]:
    """What is wrong with a checkpoint (empty if nothing), and its identity."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, int] = manifest["files"]
        identity: str = manifest["identity"]
    except FileNotFoundError:
        return "it was never finished", ""
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} can't be read", ""
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing", ""
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}", ""
    return "", identity
