"""Where a checkpoint is: a local directory or a download, its config, and what its tensors are called."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants

from poros.errors import CheckpointError, one_line

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
SHOWN = 10  # of a list in an error


def resolve(path: str, revision: str | None = None) -> Path:
    """The directory of a checkpoint: a local one as it is, or a download of a hub id.

    Args:
        path: A directory, or `name` or `org/name` on the hub. A directory wins over a hub id of the same name.
        revision: Branch, tag or commit of a hub id; a local directory has none, so it isn't looked at.

    Raises:
        CheckpointError: `path` is a file, is written like a path but isn't there, or the hub doesn't give it.
    """
    try:
        local = Path(path).expanduser()
        if local.is_dir():
            return local
        exists = local.exists()
    except (OSError, RuntimeError) as error:  # no permission, name too long, ~nobody
        raise CheckpointError(f"can't look up the checkpoint {path}: {one_line(error)}") from error
    if exists:
        raise CheckpointError(f"the checkpoint {path} is a file, not a directory", f"did you mean {local.parent}?")
    if not _HUB_ID.fullmatch(path):
        raise CheckpointError(
            f"there is no checkpoint directory {path!r}",
            "give an existing directory in Hugging Face format, or a hub id: NAME or ORG/NAME",
        )
    offline = constants.HF_HUB_OFFLINE
    try:
        return Path(
            huggingface_hub.snapshot_download(
                path,
                revision=revision,
                allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"],
                # A second copy of the weights in another layout, as Mistral and OpenAI publish them.
                ignore_patterns=["*/*.safetensors", "consolidated*.safetensors"],
                local_files_only=offline,
            )
        )
    except Exception as error:  # the hub's own errors, its HTTP library's, a full disk: all mean the same here
        at = f" at revision {revision}" if revision is not None else ""
        where = "the hub's cache (HF_HUB_OFFLINE is set)" if offline else "the Hugging Face hub"
        raise CheckpointError(
            f"{path} is not a directory here ({Path.cwd()}), and {where} didn't give it{at}:\n"
            f"  {type(error).__name__}: {one_line(error)}",
            "check the spelling and the revision; a gated or private repository needs `hf auth login`; "
            + ("unset HF_HUB_OFFLINE to download it" if offline else "without a network, give a local directory"),
        ) from error


def read_config(directory: Path) -> dict[str, Any]:
    """A checkpoint's `config.json`, which names at least its `model_type`.

    Raises:
        CheckpointError: the file is missing, isn't a JSON object, or has no `model_type`.
    """
    file = directory / "config.json"
    config = read_json(file)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise CheckpointError(
            f"{file} has no model_type, so the model's architecture isn't known",
            "this should be the config.json of a causal language model in Hugging Face format",
        )
    return config


def find_prefix(names: Iterable[str], candidates: Sequence[str], probe: str, layers: str = "layers") -> str:
    """What stands before the names of the text decoder's tensors: one family is saved under several paths.

    Args:
        names: The names of a checkpoint's tensors.
        candidates: Prefixes to try, the likeliest first, each empty or with its trailing dot: `model.`.
        probe: A name every decoder has, without the prefix: `embed_tokens.weight`.
        layers: What the decoder calls its list of layers.

    Returns:
        The first candidate under which there is the probe, or a layer 0.

    Raises:
        CheckpointError: none of them fits; the message lists the paths that are there.
    """
    names = set(names)
    for candidate in candidates:
        if candidate + probe in names or any(name.startswith(f"{candidate}{layers}.0.") for name in names):
            return candidate
    found = sorted({".".join(name.split(".")[:2]) for name in names})
    raise CheckpointError(
        f"the checkpoint's tensors have none of the prefixes {', '.join(map(repr, candidates))} before {probe}; "
        f"their names start with: {few(found)}",
        "the weights and the model_type of config.json don't belong together, or this layout isn't supported yet",
    )


def read_json(file: Path) -> dict[str, Any]:
    """A file that holds a JSON object."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"can't read {file}: {one_line(error)}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {one_line(error)}", "fetch it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a JSON {type(value).__name__}, not an object", "fetch it again")
    return value


def few(items: Sequence[str]) -> str:
    """The first of many items, and how many more there are."""
    rest = len(items) - SHOWN
    return ", ".join(items[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
