"""Find a Hugging Face checkpoint, verify its safetensors shards, and read single tensors from them.

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
import json
import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

import huggingface_hub
import torch
from huggingface_hub import constants
from safetensors import SafetensorError, safe_open

from poros.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "C64": torch.complex64, "BOOL": torch.bool,
}  # fmt: skip
"""What a header calls a dtype -> torch's dtype. Those of less than a byte per number (F4, F6) are left out."""

_HEADER_LIMIT = 100_000_000  # bytes; the safetensors library refuses longer headers too
_SHORTEST = 8 + len("{}")
_POINTER = re.compile(rb"version https://git-lfs.*?^size (\d+)$", re.DOTALL | re.MULTILINE)
_PART = re.compile(r"-of-(?!0*1\.)\d+\.safetensors$")  # one file of several
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_SHOWN = 10  # of a list in an error


@dataclass(frozen=True)
class TensorInfo:
    """What a shard's header says of a tensor; `nbytes` is its length in the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    nbytes: int


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
                raise CheckpointError(f"can't open {file}: {_one_line(error)}") from error

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
            _Problem(f"{INDEX} names the shard {name!r}, which isn't a plain name of a file beside it", INDEX)
            for name in files
            if not _is_plain(name)
        ]
        # A shard in the hub's cache is a link to somewhere else, which is fine: is_file() follows it.
        missing = [name for name in files if _is_plain(name) and not (directory / name).is_file()]
        if missing:
            are = "is" if len(missing) == 1 else "are"
            problems.append(
                _Problem(f"{len(missing)} of {len(files)} shards {are} missing: {', '.join(missing)}", *missing)
            )
        held: dict[str, dict[str, TensorInfo]] = {}
        for name in files:
            if _is_plain(name) and name not in missing:
                try:
                    held[name] = _read_header(directory / name)
                except _Problem as problem:
                    problems.append(problem)
                except OSError as error:
                    problems.append(_Problem(f"{name} can't be read: {_one_line(error)}"))
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
            raise CheckpointError(f"can't read {name} from {file}: {_one_line(error)}") from error
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
        raise CheckpointError(f"can't look up the checkpoint {path}: {_one_line(error)}") from error
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
            f"  {type(error).__name__}: {_one_line(error)}",
            "check the spelling and the revision; a gated or private repository needs `hf auth login`; "
            + ("unset HF_HUB_OFFLINE to download it" if offline else "without a network, give a local directory"),
        ) from error


def read_config(directory: Path) -> dict[str, Any]:
    """A checkpoint's `config.json`, which names at least its `model_type`.

    Raises:
        CheckpointError: the file is missing, isn't a JSON object, or has no `model_type`.
    """
    file = directory / "config.json"
    config = _read_json(file)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise CheckpointError(
            f"{file} has no model_type, so the model's architecture isn't known",
            "this should be the config.json of a causal language model in Hugging Face format",
        )
    return config


def find_prefix(names: Iterable[str], candidates: Sequence[str], probe: str) -> str:
    """What stands before the names of the text decoder's tensors: one family is saved under several paths.

    Args:
        names: The names of a checkpoint's tensors.
        candidates: Prefixes to try, the likeliest first, each empty or with its trailing dot: `model.`.
        probe: A name every decoder has, without the prefix: `embed_tokens.weight`.

    Returns:
        The first candidate under which there is the probe, or a layer 0.

    Raises:
        CheckpointError: none of them fits; the message lists the paths that are there.
    """
    names = set(names)
    for candidate in candidates:
        if candidate + probe in names or any(name.startswith(f"{candidate}layers.0.") for name in names):
            return candidate
    found = sorted({".".join(name.split(".")[:2]) for name in names})
    raise CheckpointError(
        f"the checkpoint's tensors have none of the prefixes {', '.join(map(repr, candidates))} before {probe}; "
        f"their names start with: {_few(found)}",
        "the weights and the model_type of config.json don't belong together, or this layout isn't supported yet",
    )


class _Problem(Exception):
    """One thing wrong with a checkpoint, and the files to fetch again to put it right."""

    def __init__(self, text: str, *fetch: str) -> None:
        super().__init__(text)
        self.fetch = fetch


def _read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one shard, in the order of their bytes.

    Raises:
        _Problem: the first thing wrong with the file.
        OSError: the file can't be read.
    """
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        start = stream.read(1024)
        length = int.from_bytes(start[:8], "little")
        if pointer := _POINTER.match(start):
            what = f"is a git-lfs pointer (`git lfs pull` fetches the file): expected {int(pointer[1])} bytes"
        elif size < _SHORTEST:
            what = f"is {'too short' if size else 'empty'}: expected at least {_SHORTEST} bytes"
        elif length > min(size - 8, _HEADER_LIMIT):
            what = f"is cut short or not safetensors: expected a header of {length} bytes after the first 8"
        else:
            what = ""
        if what:
            raise _Problem(f"{file.name} {what}, found {size} bytes", file.name)
        stream.seek(8)
        raw = stream.read(length)
    spans: list[tuple[int, int, str, str, tuple[int, ...]]] = []
    try:
        for name, entry in json.loads(raw.decode()).items():
            match entry:
                case _ if name == "__metadata__":
                    pass
                case {"dtype": str(code), "shape": [*sizes], "data_offsets": [begin, end]} if all(
                    type(number) is int and number >= 0 for number in (*sizes, begin, end)
                ):
                    spans.append((begin, end, name, code, tuple(sizes)))
                case _:
                    raise ValueError(f"{name} is described as {str(entry)[:200]}")
    except (ValueError, AttributeError, RecursionError) as error:  # AttributeError: JSON, but not an object
        raise _Problem(f"{file.name} has a damaged header: {_one_line(error)}", file.name) from error

    tensors: dict[str, TensorInfo] = {}
    filled = 0
    for begin, end, name, code, shape in sorted(spans):
        dtype = DTYPES.get(code)
        if dtype is None:
            raise _Problem(f"{file.name} holds {name} as {code}, which is none of {', '.join(DTYPES)}")
        nbytes = math.prod(shape) * dtype.itemsize
        if end - begin != nbytes:
            raise _Problem(
                f"{file.name} has a damaged header: {name}, {code} of shape {list(shape)}, "
                f"expected {nbytes} bytes, found offsets {begin} to {end}, {end - begin} bytes",
                file.name,
            )
        if begin != filled:
            how = "overlaps the tensor before it" if begin < filled else "leaves a gap before it"
            raise _Problem(
                f"{file.name} has a damaged header: {name} {how}: expected offset {filled}, found {begin}", file.name
            )
        tensors[name] = TensorInfo(name, dtype, shape, file, nbytes)
        filled = end
    if not tensors:
        raise _Problem(f"{file.name} holds no tensors", file.name)
    expected = 8 + length + filled
    if size != expected:
        what = "is cut short" if size < expected else "goes on after its last tensor"
        raise _Problem(f"{file.name} {what}: expected {expected} bytes, found {size} bytes", file.name)
    return tensors


def _read_weight_map(directory: Path) -> dict[str, str] | None:
    """The index's map of tensor name -> file name; None when there is no index.

    The index's `metadata.total_size` isn't looked at: it is known to be unreliable, as writers needn't agree on what
    to count (tied tensors, say), and a whole checkpoint must not be refused for it. The headers say it exactly.
    """
    file = directory / INDEX
    if not file.is_file():
        return None
    weight_map = _read_json(file).get("weight_map")
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
            f"{directory} has parts of a checkpoint but no {INDEX}: {_few(found)}", _fetch_hint(directory, [INDEX])
        )
    if any(name.endswith((".bin", ".pt", ".pth")) for name in there):
        hint = (
            "Poros reads safetensors only, as a pickle can run code; if you trust these files, convert them with "
            f"transformers: AutoModelForCausalLM.from_pretrained({str(directory)!r}).save_pretrained(NEW_DIRECTORY)"
        )
    else:
        hint = "this should be a causal language model in Hugging Face format, with its weights as safetensors"
    raise CheckpointError(f"{directory} has no safetensors files; it holds {_few(there) or 'nothing'}", hint)


def _is_plain(name: str) -> bool:
    """Whether a name stays inside its directory, whatever system reads it: no separator, drive or dots alone."""
    return name not in ("", "..") and PureWindowsPath(name).name == name


def _disagreements(weight_map: Mapping[str, str], held: Mapping[str, Mapping[str, TensorInfo]]) -> Iterator[_Problem]:
    """Where the index and the shards that could be read (file name -> their tensors) contradict each other."""
    places: dict[str, list[str]] = {}
    for file, tensors in held.items():
        for name in tensors:
            places.setdefault(name, []).append(file)
    for name, files in places.items():
        if len(files) > 1:
            yield _Problem(f"{name} is in {len(files)} shards: {', '.join(files)}", INDEX, *files)
        elif name not in weight_map:
            yield _Problem(f"{files[0]} holds {name}, which {INDEX} doesn't list", INDEX, *files)
        elif weight_map[name] != files[0]:
            yield _Problem(f"{files[0]} holds {name}, which {INDEX} puts in {weight_map[name]}", INDEX, *files)
    for name, file in weight_map.items():
        if file in held and name not in places:
            yield _Problem(f"{file} doesn't hold {name}, which {INDEX} puts there", INDEX, file)


def _refusal(directory: Path, problems: Sequence[_Problem]) -> CheckpointError:
    count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
    lines = [f"  - {problem}" for problem in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        lines.append(f"  - and {len(problems) - _SHOWN} more")
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


def _read_json(file: Path) -> dict[str, Any]:
    """A file that holds a JSON object."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"can't read {file}: {_one_line(error)}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {_one_line(error)}", "fetch it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a JSON {type(value).__name__}, not an object", "fetch it again")
    return value


def _few(items: Sequence[str]) -> str:
    rest = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
