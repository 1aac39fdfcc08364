"""The configuration of a matrix: cases and methods, read from YAML and validated as a whole.

    defaults: {steps: 200, passes: 3, length: 512}
    cases:
      - {name: Qwen2.5-32B, model: qwen2.5-32b}
    methods:
      - resident
      - {method: poros, vram: 11GB}

Every case is run by every method. What a case doesn't say is taken from `defaults`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError, field_validator, model_validator

from poros.config import AttentionPath, LoraPart, Part, describe_problems, parse_size, read_yaml
from poros.errors import ConfigError
from poros_bench.methods import Method

SYNTHETIC = "synthetic"
LEAST = "least"


class Case(Part):
    """What is trained."""

    name: str = Field(description="as it appears on pages")
    model: str = Field(description="a directory, a hub id, or a published shape, which gets random weights")
    layers: PositiveInt | None = Field(None, description="cut a published shape to its first layers")
    steps: PositiveInt = Field(200, description="optimizer steps of a pass")
    passes: PositiveInt = Field(3, description="repetitions, of which the median is reported")
    warm_up: NonNegativeInt = Field(5, description="steps before the first pass, which don't count")
    length: PositiveInt = Field(512, description="tokens of a row")
    batch_size: PositiveInt = Field(1, description="rows of a micro-batch")
    accumulation: PositiveInt = Field(1, description="micro-batches per optimizer step")
    lora: LoraPart = LoraPart()
    block_size: PositiveInt = Field(1, description="decoder layers that travel together, for methods that stream")
    dataset: str = Field(SYNTHETIC, description="`synthetic`: random tokens from a seed; or a .jsonl file of rows")
    attention: AttentionPath = Field("fused", description="attention path; `math` and `fused` are deterministic")
    seed: NonNegativeInt = 0

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, padding included."""
        return self.length * self.batch_size * self.accumulation


class MethodEntry(Part):
    """How it is trained."""

    method: str = Field(description="name of an installed method")
    vram: str | None = Field(None, description="GPU memory budget: a size, or `least`; for methods that take one")
    options: dict[str, Any] = Field(default_factory=dict, description="the method's own settings")
    label: str = Field("", description="as it appears on pages; made from the rest by default")

    @field_validator("vram")
    @classmethod
    def _a_size(cls, value: str | None) -> str | None:
        if value is not None and value != LEAST:
            parse_size(value)
        return value

    @property
    def name(self) -> str:
        """The label, or what it stands for."""
        if self.label:
            return self.label
        budget = {None: "", LEAST: " (smallest budget)"}.get(self.vram, f" ({self.vram})")
        options = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.method}{budget}" + (f" [{options}]" if options else "")


class MatrixConfig(Part):
    """Cases times methods."""

    title: str = ""
    cases: tuple[Case, ...] = Field(min_length=1)
    methods: tuple[MethodEntry, ...] = Field(min_length=1)
    timeout_s: PositiveInt = Field(3600, description="seconds after which a cell is stopped")
    note: str = Field("", description="printed on the page")
    hardware: Literal["any", "cpu", "cuda"] = Field("any", description="where this matrix makes sense")

    @model_validator(mode="after")
    def _names_of_their_own(self) -> MatrixConfig:
        for what, names in (("cases", [c.name for c in self.cases]), ("methods", [m.name for m in self.methods])):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{what} share a name: {', '.join(twice)}")
        for what, entries, label in (("cases", self.cases, "name"), ("methods", self.methods, "label")):
            seen: dict[str, str] = {}
            for entry in entries:
                content = entry.model_dump_json(exclude={label})
                if content in seen:
                    raise ValueError(f"{what} {seen[content]} and {entry.name} are the same but for their {label}")
                seen[content] = entry.name
        return self


def load_matrix(path: Path, installed: Mapping[str, Method]) -> MatrixConfig:
    """Read a matrix file.

    Args:
        path: A YAML file.
        installed: The methods that there are, by their names.

    Raises:
        ConfigError: with every problem found.
    """
    values = read_yaml(path)
    defaults = values.pop("defaults", {}) or {}
    cases = values.get("cases")
    if isinstance(defaults, Mapping) and isinstance(cases, list):
        values["cases"] = [{**defaults, **case} if isinstance(case, Mapping) else case for case in cases]
    methods = values.get("methods")
    if isinstance(methods, list):
        values["methods"] = [{"method": entry} if isinstance(entry, str) else entry for entry in methods]
    problems = [] if isinstance(defaults, Mapping) else ["defaults: is not a mapping"]
    try:
        config = MatrixConfig.model_validate(values)
    except ValidationError as error:
        problems += describe_problems(error)
        config = None
    entries = values.get("methods")
    listed = entries if isinstance(entries, list) else []
    named = {str(entry.get("method")) for entry in listed if isinstance(entry, Mapping)}
    problems += [f"methods: no method is called {name}" for name in sorted(named - {*installed, "None"})]
    for entry in listed:
        if isinstance(entry, Mapping):
            problems += _wrong_options(entry, installed)
    if config is not None:
        problems += _ignored(config, installed)
    if problems or config is None:
        raise ConfigError(
            f"{len(problems)} problem{'s' if len(problems) != 1 else ''} in {path}:\n"
            + "\n".join(f"  - {problem}" for problem in problems),
            f"installed methods: {', '.join(installed)}; the keys are in docs/benchmarking.md",
        )
    return config


def _ignored(config: MatrixConfig, installed: Mapping[str, Method]) -> list[str]:
    """Settings that would have no effect."""
    problems = [
        f"methods: {entry.method} takes no budget, so vram: {entry.vram} means nothing"
        for entry in config.methods
        if entry.vram is not None and entry.method in installed and not installed[entry.method].takes_budget
    ]
    return problems + [
        f"cases: {case.name} is a directory, and only published shapes can be cut to {case.layers} layers"
        for case in config.cases
        if case.layers is not None and Path(case.model).exists()
    ]


def _wrong_options(entry: Mapping[str, Any], installed: Mapping[str, Method]) -> list[str]:
    method, options = installed.get(str(entry.get("method"))), entry.get("options")
    if method is None or not options or not isinstance(options, Mapping):
        return []
    if method.options is None:
        return [f"methods: {method.name} has no options, so {', '.join(map(str, options))} would mean nothing"]
    try:
        method.options.model_validate(options)
    except ValidationError as error:
        return [f"methods: {method.name}: options.{problem}" for problem in describe_problems(error)]
    return []
