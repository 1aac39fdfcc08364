"""The header of one safetensors file: what it says, and whether the file is what its header says."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from poros.errors import one_line

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


@dataclass(frozen=True)
class TensorInfo:
    """What a shard's header says of a tensor; `nbytes` is its length in the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    nbytes: int


class Problem(Exception):
    """One thing wrong with a checkpoint, and the files to fetch again to put it right."""

    def __init__(self, text: str, *fetch: str) -> None:
        super().__init__(text)
        self.fetch = fetch


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one shard, in the order of their bytes.

    Raises:
        Problem: the first thing wrong with the file.
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
            raise Problem(f"{file.name} {what}, found {size} bytes", file.name)
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
        raise Problem(f"{file.name} has a damaged header: {one_line(error)}", file.name) from error

    tensors: dict[str, TensorInfo] = {}
    filled = 0
    for begin, end, name, code, shape in sorted(spans):
        dtype = DTYPES.get(code)
        if dtype is None:
            raise Problem(f"{file.name} holds {name} as {code}, which is none of {', '.join(DTYPES)}")
        nbytes = math.prod(shape) * dtype.itemsize
        if end - begin != nbytes:
            raise Problem(
                f"{file.name} has a damaged header: {name}, {code} of shape {list(shape)}, "
                f"expected {nbytes} bytes, found offsets {begin} to {end}, {end - begin} bytes",
                file.name,
            )
        if begin != filled:
            how = "overlaps the tensor before it" if begin < filled else "leaves a gap before it"
            raise Problem(
                f"{file.name} has a damaged header: {name} {how}: expected offset {filled}, found {begin}", file.name
            )
        tensors[name] = TensorInfo(name, dtype, shape, file, nbytes)
        filled = end
    if not tensors:
        raise Problem(f"{file.name} holds no tensors", file.name)
    expected = 8 + length + filled
    if size != expected:
        what = "is cut short" if size < expected else "goes on after its last tensor"
        raise Problem(f"{file.name} {what}: expected {expected} bytes, found {size} bytes", file.name)
    return tensors
