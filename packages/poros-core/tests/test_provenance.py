"""What a machine says of itself."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from poros.provenance import host_ram_bytes

GB = 10**9


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("", {}, None),
        ("", {"memory.max": "max"}, None),
        ("0::/\n", {"memory.max": "1000000000"}, GB),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "1000000000"}, GB),
        ("0::/a/b\n", {"a/b/memory.max": "1000000000", "a/memory.max": "2000000000"}, GB),
        ("0::/a\n", {"b/memory.max": "1000000000"}, None),
        ("0::/../b\n", {"memory.max": "1000000000"}, GB),
        ("5:cpu,memory:/a/b\n0::/\n", {"memory/a/memory.limit_in_bytes": "1000000000"}, GB),
        ("5:memory:/not/seen/from/here\n", {"memory/memory.limit_in_bytes": "1000000000"}, GB),
        ("5:cpuset:/a\n", {"memory/a/memory.limit_in_bytes": "1000000000"}, None),
        ("5:memory:/a:b\n", {"memory/a:b/memory.limit_in_bytes": "1000000000"}, GB),
        ("nonsense\n", {}, None),
    ],
)
def test_control_groups_limit_memory(groups: str, limits: dict[str, str], expected: int | None, tmp_path: Path) -> None:
    for name, limit in limits.items():
        file = tmp_path / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(limit + "\n")
    (tmp_path / "cgroup").write_text(groups)
    whole = psutil.virtual_memory().total
    assert host_ram_bytes(tmp_path / "cgroup", tmp_path / "fs") == (expected or whole)
    assert host_ram_bytes(tmp_path / "missing", tmp_path / "nowhere") == whole
