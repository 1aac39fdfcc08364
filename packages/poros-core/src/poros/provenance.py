"""What a number was measured with: versions, machine, commit. Read without importing torch unless it is loaded."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict


class Provenance(BaseModel):
    """Where a record comes from. GB = 1e9 bytes; None where a thing is absent or can't be told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    poros: str | None
    commit: str | None
    torch: str | None
    cuda: str | None
    transformers: str | None
    peft: str | None
    bitsandbytes: str | None
    triton: str | None
    python: str
    gpu_name: str | None
    gpu_uuid: str | None
    driver: str | None
    pcie_gen: int | None
    pcie_width: int | None
    cpu: str | None
    cores: int
    host_ram_gb: float
    date: str


def package_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def provenance() -> Provenance:
    """The provenance of this process, now."""
    gpu = _gpu()
    return Provenance(
        poros=package_version("poros-core"),
        commit=_commit(),
        torch=package_version("torch"),
        cuda=_cuda(),
        transformers=package_version("transformers"),
        peft=package_version("peft"),
        bitsandbytes=package_version("bitsandbytes"),
        triton=package_version("triton"),
        python=platform.python_version(),
        gpu_name=gpu.get("name"),
        gpu_uuid=gpu.get("uuid"),
        driver=gpu.get("driver_version"),
        pcie_gen=_int(gpu.get("pcie.link.gen.max")),
        pcie_width=_int(gpu.get("pcie.link.width.max")),
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1),
        host_ram_gb=round(host_ram_bytes() / 1e9, 1),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def host_ram_bytes(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of RAM this process may use: the machine's, or less where a control group says so.

    Args:
        groups: Names the groups that the process is in: `id:controllers:path`, a line each.
        root: Where the hierarchies of groups are mounted.
    """
    import psutil

    total = int(psutil.virtual_memory().total)
    for file in _limits_of_groups(groups, root):
        try:
            total = min(total, int(file.read_text()))
        except (OSError, ValueError):  # no such group seen from in here, or no limit: "max"
            continue
    return total


def _limits_of_groups(groups: Path, root: Path) -> Iterator[Path]:
    """The files that limit memory: of each group that the process is in and of all groups around it."""
    hierarchies = {root: ("memory.max", [Path()]), root / "memory": ("memory.limit_in_bytes", [Path()])}
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        base = root if not controllers else root / "memory" if "memory" in controllers.split(",") else None
        if base is not None:
            inside = Path(path.lstrip("/"))
            hierarchies[base][1].extend((inside, *inside.parents))
    for base, (name, folders) in hierarchies.items():
        yield from (base / folder / name for folder in folders)


def host_peak_bytes() -> int:
    """The largest resident set of this process so far, in bytes."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)


def gpu_name() -> str | None:
    """The name of the first GPU; None without one."""
    return _gpu().get("name")


def _gpu() -> dict[str, str]:
    """What nvidia-smi says of the first GPU; empty without one."""
    fields = ["name", "uuid", "driver_version", "pcie.link.gen.max", "pcie.link.width.max"]
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = done.stdout.strip().splitlines()
    return dict(zip(fields, (part.strip() for part in lines[0].split(",")), strict=False)) if lines else {}


def _cuda() -> str | None:
    torch: Any = sys.modules.get("torch")
    return None if torch is None else torch.version.cuda


def _commit() -> str | None:
    """The commit of the source tree Poros runs from; None for an installed wheel."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        inside = subprocess.run(
            ["git", "-C", str(here), "ls-files", "--error-unmatch", Path(__file__).name],
            capture_output=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if inside.returncode == 0 else None


def _cpu() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


def _int(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
