"""Which Python runs a method: this one, or one of another environment, for methods whose needs can't be met here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from poros.errors import ConfigError, one_line
from poros.provenance import Provenance, package_version, provenance
from poros_bench.methods import Method

Versions = tuple[str | None, ...]

ANSWERS_IN_S = 120
"""Seconds within which another Python must say what is installed there."""


@dataclass(frozen=True)
class Environments:
    """Method -> the Python that runs its cells; this one for every method that isn't named."""

    pythons: Mapping[str, str] = field(default_factory=dict)

    def python_of(self, method: str) -> str:
        """The interpreter of a method's cells."""
        return self.pythons.get(method, sys.executable)

    def versions_of(self, method: Method) -> Versions:
        """What a method's cells would be measured with, as `versions` of their receipts would say."""
        python, name = self.pythons.get(method.name), method.distribution
        if python is not None:
            return versions(*_ask(python, name))
        return versions(provenance(), name and package_version(name))


HERE = Environments()


def parse(values: Sequence[str], installed: Mapping[str, Method]) -> Environments:
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
        _ask(found, installed[method].distribution)
        pythons[method] = found
    return Environments(pythons)


def versions(where: Provenance, method: str | None = None) -> Versions:
    """What decides whether a result still stands for what would be measured now; `method` is the method's version."""
    return (where.poros, where.torch, where.transformers, where.peft, where.bitsandbytes, where.gpu_name, method)


@cache
def _ask(python: str, distribution: str | None) -> tuple[Provenance, str | None]:
    """The provenance and the version of a package that a Python reports, which proves that poros-bench is there."""
    program = (
        "import sys, json, poros_bench.cell, poros.provenance as p\n"
        "print(json.dumps([p.provenance().model_dump(), sys.argv[1] and p.package_version(sys.argv[1])]))"
    )
    command = [python, "-c", program, distribution or ""]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWERS_IN_S, check=True)
        where, method = json.loads(done.stdout.strip().splitlines()[-1])
        return Provenance.model_validate(where), method or None
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no output"])[-1]
    except subprocess.TimeoutExpired:
        reason = f"no answer within {ANSWERS_IN_S} s"
    except (OSError, ValueError, IndexError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise ConfigError(
        f"{python} can't run cells: {one_line(Exception(reason))[:300]}",
        "install poros-bench and a family's package there",
    )
