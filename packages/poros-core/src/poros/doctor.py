"""What stands in the way of training on this machine, found by looking and by trying."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from poros.plugins import Plugins
from poros.provenance import host_ram_bytes, package_version

PACKAGES = ("poros-core", "torch", "transformers", "peft", "bitsandbytes", "accelerate", "trl", "datasets", "triton")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: Its name.
        state: "ok"; "warning": training works, but less well than it could; "error": training can't work.
        found: What is there.
        hint: What to do; empty when there is nothing to do.
    """

    what: str
    state: Literal["ok", "warning", "error"]
    found: str
    hint: str = ""


def examine(plugins: Plugins, path: Path) -> list[Finding]:
    """Look at everything; a look that fails is a finding itself.

    Args:
        plugins: Loaded plugins.
        path: Where runs will write.
    """
    looks: dict[str, Callable[[], Iterator[Finding]]] = {
        "python": _python,
        "versions": _versions,
        "torch": _torch,
        "bitsandbytes": _bitsandbytes,
        "RAM": _ram,
        "pinned memory": _pinning,
        "disk": lambda: _disk(path),
        "families": lambda: _families(plugins),
    }
    findings: list[Finding] = []
    for what, look in looks.items():
        try:
            findings.extend(look())
        except Exception as error:  # noqa: BLE001 - whatever goes wrong is what doctor is asked about
            findings.append(Finding(what, "error", f"{type(error).__name__}: {error}"))
    return findings


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("python", "ok", version)


def _versions() -> Iterator[Finding]:
    for name in PACKAGES:
        version = package_version(name)
        if version is not None:
            yield Finding(name, "ok", version)
        elif name not in ("trl", "triton"):
            yield Finding(name, "error", "not installed", f"python -m pip install {name}")


def _torch() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else " (this torch was built without CUDA)"
        yield Finding("CUDA", "warning", f"no usable device{built}", "training runs on the CPU: right, but slow")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        bf16 = properties.major >= 8
        yield Finding(
            f"GPU {index}",
            "ok" if bf16 else "warning",
            f"{properties.name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free, CUDA {torch.version.cuda}",
            "" if bf16 else "this card has no bf16 units; bf16 is emulated and slow",
        )


def _bitsandbytes() -> Iterator[Finding]:
    import bitsandbytes as bnb
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = torch.randn(64, 64, dtype=torch.bfloat16, device=device)
    packed, state = bnb.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    back = bnb.functional.dequantize_4bit(packed, state)
    if bool(torch.isfinite(back).all()) and float((back - weight).abs().max()) < 1.0:
        yield Finding("NF4", "ok", f"bitsandbytes quantises and restores on {device}")
    else:
        yield Finding("NF4", "error", f"bitsandbytes restores nonsense on {device}", "reinstall bitsandbytes")


def _ram() -> Iterator[Finding]:
    import psutil

    total, free = host_ram_bytes(), psutil.virtual_memory().available
    # An NF4 base takes about 0.52 bytes a parameter.
    yield Finding(
        "RAM",
        "ok" if free > 8e9 else "warning",
        f"{min(free, total) / 1e9:.1f} of {total / 1e9:.1f} GB free",
        "" if free > 8e9 else "the base must fit in RAM: about 0.52 GB for each billion parameters",
    )


def _pinning() -> Iterator[Finding]:
    import resource

    import torch

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 1e9:.2f} GB"
    if not torch.cuda.is_available():
        yield Finding("pinned memory", "ok", f"limit {limit}; not needed without a GPU")
        return
    from poros.errors import StreamError
    from poros.store.tiers import PinnedStore

    try:
        PinnedStore([256 * 2**20], torch.device("cuda", torch.cuda.current_device())).close()
    except StreamError as error:
        yield Finding("pinned memory", "warning", error.message, error.hint)
    else:
        yield Finding("pinned memory", "ok", f"limit {limit}; 0.27 GB pinned and released")


def _disk(path: Path) -> Iterator[Finding]:
    there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    yield Finding(
        "disk",
        "ok" if free > 2e9 else "warning",
        f"{free / 1e9:.1f} GB free at {there}",
        "" if free > 2e9 else "an adapter with its checkpoints may take a few GB",
    )


def _families(plugins: Plugins) -> Iterator[Finding]:
    architectures = plugins.architectures()
    if not architectures:
        yield Finding("families", "error", "none installed", "python -m pip install poros-arch-qwen poros-arch-gemma")
        return
    yield Finding("families", "ok", ", ".join(f"{a.family} ({', '.join(a.model_types)})" for a in architectures))
