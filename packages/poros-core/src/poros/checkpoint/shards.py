"""Verify the safetensors shards of a checkpoint, and read single tensors from them.

A safetensors file is eight bytes with the header's length (little endian), the header, then the tensors' bytes:

    <length> {"model.norm.weight": {"dtype": "BF16", "shape": [4096], "data_offsets": [0, 8192]}, ...} <data>

Offsets count from the end of the header, and the tensors fill the data without gap or overlap. So the header alone
says how long the file must be. That matters because a short file does not look broken to whoever maps it into memory
and reads by offset: the missing end reads as zeros, or as something else the next time. `Shards.open` therefore reads
every header before any tensor, and refuses shards that are missing, empty, cut short, too long or still git-lfs
pointers, and an index (`model.safetensors.index.json`, which says what tensor is in what file) that disagrees with its
files. This costs a few reads per shard, whatever the model's size. It can't see a flipped bit in the data: the format
has no checksums.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from poros.checkpoint.headers import Problem, TensorInfo, read_header
from poros.checkpoint.locate import SHOWN, few, read_json
from poros.errors import CheckpointError, one_line

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_PART = re.compile(r"-of-(?!0*1\.)\d+\.safetensors$")  # one file of several


class Shards:
    """The tensors of a verified checkpoint: known from its headers, read on demand.

    Iterating gives the names, sorted. Close it, or use it as a context manager: each shard stays mapped until then.
    """

    def __init__(self, directory: Path, tensors: Iterable[TensorInfo]) -> None:
        """Map the files of `tensors`, which must have been verified: `Shards.open` does both."""
        self.directory = directory
        self._tensors = {info.name: info for info in sorted(tensors, key=lambda info: info.name)}
        self._readers: dict[Path, Any] = {}
        for file in sorted({info.file for info in self._tensors.values()}):
            try:
                self._readers[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError, RuntimeError) as error:
                raise CheckpointError(f"can't open {file}: {one_line(error)}") from error

    @classmethod
    def open(cls, directory: Path) -> Shards:
        """Verify a checkpoint's shards by their headers and sizes.

        Args:
            directory: Holds either an index and its shards, or one safetensors file.

        Raises:
            CheckpointError: with everything that is wrong: each damaged file by name, its expected and actual bytes,
                and what to fetch again.
        """
        weight_map = _read_weight_map(directory)
        files = sorted(set(weight_map.values())) if weight_map is not None else [_only_file(directory)]
        problems = [
            Problem(f"{INDEX} names the shard {name!r}, which isn't a plain name of a file beside it", INDEX)
            for name in files
            if not _is_plain(name)
        ]
        # A shard in the hub's cache is a link to somewhere else, which is fine: is_file() follows it.
        missing = [name for name in files if _is_plain(name) and not (directory / name).is_file()]
        if missing:
            are = "is" if len(missing) == 1 else "are"
            problems.append(
                Problem(f"{len(missing)} of {len(files)} shards {are} missing: {', '.join(missing)}", *missing)
            )
        held: dict[str, dict[str, TensorInfo]] = {}
        for name in files:
            if _is_plain(name) and name not in missing:
                try:
                    held[name] = read_header(directory / name)
                except Problem as problem:
                    problems.append(problem)
                except OSError as error:
                    problems.append(Problem(f"{name} can't be read: {one_line(error)}"))
        if weight_map is not None:
            problems.extend(_disagreements(weight_map, held))
        if problems:
            raise _refusal(directory, problems)
        return cls(directory, (info for tensors in held.values() for info in tensors.values()))

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor's name, sorted."""
        return tuple(self._tensors)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, as they are in the files."""
        return sum(info.nbytes for info in self._tensors.values())

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def info(self, name: str) -> TensorInfo:
        """What is known of a tensor without reading it.

        Raises:
            CheckpointError: there is no such tensor; the hint has the names most like it.
        """
        try:
            return self._tensors[name]
        except KeyError:
            near = difflib.get_close_matches(name, self._tensors, n=3)
            raise CheckpointError(
                f"the checkpoint {self.directory} has no tensor {name}",
                f"it has {', '.join(near)}" if near else f"it has {len(self)} tensors, none with a name like that",
            ) from None

    def read(self, name: str) -> torch.Tensor:
        """A tensor on the CPU, in the file's dtype and shape.

        Its memory is the mapped file: pages come from the disk when they are first touched, and stay valid after
        `close`, for as long as a tensor of that shard lives. Don't write to it. The file would stay as it is, but
        whoever reads the tensor next from this `Shards` would see the change.

        Raises:
            CheckpointError: there is no such tensor, or the shards are closed.
        """
        file = self.info(name).file
        if file not in self._readers:
            raise CheckpointError(f"can't read {name}: the shards of {self.directory} are closed")
        try:
            tensor: torch.Tensor = self._readers[file].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"can't read {name} from {file}: {one_line(error)}") from error
        return tensor

    def close(self) -> None:
        """Let go of the files. Closing twice is fine; what the headers said stays known."""
        for reader in self._readers.values():
            reader.__exit__(None, None, None)
        self._readers.clear()

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _read_weight_map(directory: Path) -> dict[str, str] | None:
    """The index's map of tensor name -> file name; None when there is no index.

    The index's `metadata.total_size` isn't looked at: it is known to be unreliable, as writers needn't agree on what
    to count (tied tensors, say), and a whole checkpoint must not be refused for it. The headers say it exactly.
    """
    file = directory / INDEX
    if not file.is_file():
        return None
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{file} has no weight_map from tensor names to file names", "fetch it again")
    # Stock loading would take the one file and not look at the index: which weights are meant?
    if (directory / SINGLE).exists() and set(weight_map.values()) != {SINGLE}:
        raise CheckpointError(
            f"{directory} holds two checkpoints: {SINGLE}, and the shards that {INDEX} names",
            "move one of them elsewhere",
        )
    return weight_map


def _only_file(directory: Path) -> str:
    """The name of the one safetensors file of a directory without an index."""
    if not directory.is_dir():
        raise CheckpointError(f"there is no checkpoint directory {directory}")
    there = sorted(file.name for file in directory.iterdir())
    found = [name for name in there if name.endswith(".safetensors") and not name.startswith(".")]
    if SINGLE in found:
        return SINGLE
    if len(found) == 1 and not _PART.search(found[0]):
        return found[0]
    if found:
        raise CheckpointError(
            f"{directory} has parts of a checkpoint but no {INDEX}: {few(found)}", _fetch_hint(directory, [INDEX])
        )
    if any(name.endswith((".bin", ".pt", ".pth")) for name in there):
        hint = (
            "Poros reads safetensors only, as a pickle can run code; if you trust these files, convert them with "
            f"transformers: AutoModelForCausalLM.from_pretrained({str(directory)!r}).save_pretrained(NEW_DIRECTORY)"
        )
    else:
        hint = "this should be a causal language model in Hugging Face format, with its weights as safetensors"
    raise CheckpointError(f"{directory} has no safetensors files; it holds {few(there) or 'nothing'}", hint)


def _is_plain(name: str) -> bool:
    """Whether a name stays inside its directory, whatever system reads it: no separator, drive or dots alone."""
    return name not in ("", "..") and PureWindowsPath(name).name == name


def _disagreements(weight_map: Mapping[str, str], held: Mapping[str, Mapping[str, TensorInfo]]) -> Iterator[Problem]:
    """Where the index and the shards that could be read (file name -> their tensors) contradict each other."""
    places: dict[str, list[str]] = {}
    for file, tensors in held.items():
        for name in tensors:
            places.setdefault(name, []).append(file)
    for name, files in places.items():
        if len(files) > 1:
            yield Problem(f"{name} is in {len(files)} shards: {', '.join(files)}", INDEX, *files)
        elif name not in weight_map:
            yield Problem(f"{files[0]} holds {name}, which {INDEX} doesn't list", INDEX, *files)
        elif weight_map[name] != files[0]:
            yield Problem(f"{files[0]} holds {name}, which {INDEX} puts in {weight_map[name]}", INDEX, *files)
    for name, file in weight_map.items():
        if file in held and name not in places:
            yield Problem(f"{file} doesn't hold {name}, which {INDEX} puts there", INDEX, file)


def _refusal(directory: Path, problems: Sequence[Problem]) -> CheckpointError:
    count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
    lines = [f"  - {problem}" for problem in problems[:SHOWN]]
    if len(problems) > SHOWN:
        lines.append(f"  - and {len(problems) - SHOWN} more")
    fetch = sorted({name for problem in problems for name in problem.fetch})
    return CheckpointError(
        f"{count} with the checkpoint {directory}:\n" + "\n".join(lines),
        _fetch_hint(directory, fetch) if fetch else "",
    )


def _fetch_hint(directory: Path, names: Sequence[str]) -> str:
    """How to fetch files again; a snapshot in the hub's cache knows its own repository and commit."""
    cache = directory.parent.parent.name
    if directory.parent.name == "snapshots" and cache.startswith("models--"):
        source = [cache.removeprefix("models--").replace("--", "/"), "--revision", directory.name]
    else:
        source = ["ORG/NAME", "--local-dir", str(directory)]
    command = shlex.join(["hf", "download", source[0], *names, *source[1:], "--force-download"])
    return f"fetch {', '.join(names)} again; from the hub: `{command}`"
