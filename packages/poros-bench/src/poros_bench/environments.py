"""Which Python runs a method: this one, or one of another environment, for methods whose needs can't be met here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from poros.errors import ConfigError, one_line
from poros.provenance import Provenance, provenance

Versions = tuple[str | None, ...]


@dataclass(frozen=True)
class Environments:
    """Method -> the Python that runs its cells; this one for every method that isn't named."""

    pythons: Mapping[str, str] = field(default_factory=dict)

    def python_of(self, method: str) -> str:
        """The interpreter of a method's cells."""
        return self.pythons.get(method, sys.executable)

    def versions_of(self, method: str) -> Versions:
        """What a method's cells would be measured with, as `versions` of their receipts would say."""
        python = self.pythons.get(method)
        return versions(provenance() if python is None else _ask(python))


HERE = Environments()


def parse(values: Sequence[str], installed: Mapping[str, object]) -> Environments:
    """Read `METHOD=PYTHON` as given on the command line.

    Args:
        values: One per method.
        installed: The methods that there are.

    Raises:
        ConfigError: no such method, no such Python, or poros-bench can't be imported there.
    """
    pythons: dict[str, str] = {}
    for value in values:
        method, equals, python = value.partition("=")
        if not equals or method not in installed:
            raise ConfigError(
                f"--python {value} is not METHOD=PYTHON",
                f"for example soup=~/soup/bin/python; methods: {', '.join(installed)}",
            )
        found = shutil.which(Path(python).expanduser())
        if found is None:
            raise ConfigError(f"--python {value}: {python} is no program")
        _ask(found)
        pythons[method] = found
    return Environments(pythons)


def versions(where: Provenance) -> Versions:
    """What decides whether a result still stands for what would be measured now."""
    return (where.poros, where.torch, where.transformers, where.peft, where.bitsandbytes, where.gpu_name)


@cache
def _ask(python: str) -> Provenance:
    """The provenance that a Python reports, which proves that poros-bench is there."""
    program = "import poros_bench.cell, poros.provenance as p; print(p.provenance().model_dump_json())"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0 or not lines:
        reason = one_line(Exception((done.stderr.strip().splitlines() or ["no output"])[-1]))
        raise ConfigError(f"{python} can't run cells: {reason}", "install poros-bench and a family's package there")
    return Provenance.model_validate_json(lines[-1])
