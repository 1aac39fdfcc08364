"""The configuration of a run: frozen pydantic models, read from YAML, `--set a.b=c` and flags.

Every problem of a config is reported at once. Values are checked where they are written, so a run that starts has a
config that makes sense; what depends on the model or the data is checked by whoever reads those.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator, model_validator

from poros.errors import ConfigError, one_line

AttentionPath = Literal["math", "fused", "default"]
"""`math`: deterministic algorithms, math attention only. `fused`: deterministic algorithms, fused kernels left on.
`default`: torch as it comes, where stock itself may not repeat."""

Tier = Literal["auto", "pinned", "pageable"]
"""Where the HostStore lives: page-locked host memory, ordinary host memory, or whichever suits the device."""


ExecutorName = Literal["auto", "eager", "graphs"]
"""What runs a block: ordinary Python, or recorded CUDA graphs."""


LEAST = "least"
"""The budget that is the smallest which works."""

Place = Literal["device", "host"]
"""Where something lives: in the GPU's memory, or in the host's."""


class Part(BaseModel):
    """A part of a config: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(Part):
    """Which checkpoint."""

    path: str = Field(description="a local directory in Hugging Face format, or a hub id")
    revision: str | None = Field(None, description="branch, tag or commit of a hub id")


class DataConfig(Part):
    """Which rows, and how they become tokens."""

    path: str = Field(description="a .jsonl or .json file, or the name of a dataset")
    split: str = Field("train", description="split of a named dataset")
    format: Literal["auto", "chat", "completion", "text"] = Field(
        "auto", description="chat: `messages`; completion: `prompt` and `completion`; text: `text`"
    )
    max_length: PositiveInt = Field(1024, description="longest row in tokens; longer rows lose their end")
    eval_path: str | None = Field(None, description="rows to evaluate on, read as `path` is")
    chat_template: str | None = Field(None, description="a Jinja file to use in place of the tokenizer's own template")
    pad_to_multiple_of: PositiveInt = Field(8, description="rows of a batch are padded to a multiple of this")


class LoraPart(Part):
    """The adapters, in the words of peft's `LoraConfig`."""

    rank: PositiveInt = 16
    alpha: PositiveInt = 32
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    targets: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear", description="names of the linear layers to adapt, within the decoder layers"
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        """One name may be given as it is."""
        return (value,) if isinstance(value, str) and value != "all-linear" else value

    @model_validator(mode="after")
    def _some_target(self) -> LoraPart:
        if not self.targets:
            raise ValueError("targets is empty: name at least one linear layer, or say all-linear")
        return self


class TrainingConfig(Part):
    """The optimizer loop, in the words of `transformers.TrainingArguments`."""

    steps: PositiveInt | None = Field(None, description="optimizer steps; overrides epochs")
    epochs: Annotated[float, Field(gt=0.0)] = 1.0
    batch_size: PositiveInt = Field(1, description="rows per micro-batch")
    accumulation: PositiveInt = Field(1, description="micro-batches per optimizer step")
    learning_rate: Annotated[float, Field(gt=0.0)] = 2e-4
    schedule: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    attention: AttentionPath = "fused"
    log_every: PositiveInt = Field(1, description="optimizer steps between two points of the loss curve")
    save_every: PositiveInt | None = Field(None, description="optimizer steps between two checkpoints; none by default")
    eval_every: PositiveInt | None = Field(
        None, description="optimizer steps between two evaluations on `data.eval_path`; before and after by default"
    )
    keep_checkpoints: Annotated[int, Field(ge=2)] = Field(
        2, description="how many checkpoints stay on disk; at least two, so that a whole one is always there"
    )


class StreamConfig(Part):
    """How the base streams."""

    block_size: PositiveInt = Field(1, description="consecutive decoder layers that travel together")
    slots: Annotated[int, Field(ge=1)] = Field(2, description="device buffers, each of one block")
    tier: Tier = "auto"
    executor: ExecutorName = Field("auto", description="`graphs` replays CUDA graphs; `auto` does so on a GPU")
    resident: Annotated[int, Field(ge=0)] | Literal["all"] = Field(
        0, description="blocks that stay on the device for good, evenly spread; `all` for every one"
    )
    recompute: bool = Field(
        True, description="run resident blocks again for the backward pass instead of keeping their activations"
    )
    restore_once: bool = Field(
        True,
        description="restore a block's 4-bit weights once a visit: less GPU time, one block in bf16 more GPU memory",
    )
    embedding: Place = Field("device", description="`host` gathers its rows in host memory and sends them")
    head: Place = Field(
        "device",
        description="`host` brings it once a step, to the memory that the blocks have at other times; where it is the "
        "embedding's own matrix, both are on the host or neither",
    )
    optimizer: Place = Field("device", description="the moments of AdamW; the update is always on the device")
    gradients: Place = Field(
        "device", description="the adapters' gradients; on the host only with `optimizer` there too, which uses them"
    )
    boundaries: Place = Field("device", description="the inputs of the blocks, kept for the backward pass")
    loss_rows: PositiveInt | None = Field(
        None, description="tokens whose loss is worked out at a time; all together by default"
    )
    vram: str | None = Field(
        None,
        description="GPU memory that the process may take: `12GB`, `11.5GiB`, `auto` for what is free, or `least`; "
        "settings of this part that aren't given are chosen so that the run is the fastest that fits",
    )
    tokens: PositiveInt | None = Field(
        None, description="tokens of a micro-batch, padding included, to plan for; known from the rows in `poros train`"
    )

    @model_validator(mode="after")
    def _together(self) -> StreamConfig:
        if self.gradients == "host" and self.optimizer == "device":
            raise ValueError("gradients on the host need the optimizer there too: set optimizer to host")
        return self

    @field_validator("vram", mode="before")
    @classmethod
    def _a_size(cls, value: Any) -> Any:
        if value is not None and value not in ("auto", LEAST):
            parse_size(value)
            return str(value)
        return value


class StreamOptions(TypedDict, total=False):
    """The keys of `StreamConfig`, as keyword arguments."""

    block_size: int
    slots: int
    tier: Tier
    executor: ExecutorName
    resident: int | Literal["all"]
    recompute: bool
    restore_once: bool
    embedding: Place
    head: Place
    optimizer: Place
    gradients: Place
    boundaries: Place
    loss_rows: int | None
    vram: str | None
    tokens: int | None


_UNITS = {"": 10**9, "gb": 10**9, "gib": 2**30, "mb": 10**6, "mib": 2**20}


def parse_size(text: str | float) -> int:
    """Bytes of a size as people write it: `12GB`, `11.5 GiB`, `800MB`, or a number of GB. GB = 1e9 bytes.

    Raises:
        ValueError: it isn't one.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    if match is None or match[2].lower() not in _UNITS or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is not a size; write 12GB, 11.5GiB or 800MB")
    return round(float(match[1]) * _UNITS[match[2].lower()])


class RunConfig(Part):
    """A whole training run."""

    model: ModelConfig
    data: DataConfig
    out: str = Field(description="folder for the adapter, the receipt and the loss curve")
    overwrite: bool = Field(False, description="replace what is in `out`")
    resume: bool = Field(False, description="go on from the newest complete checkpoint in `out`")
    lora: LoraPart = LoraPart()
    training: TrainingConfig = TrainingConfig()
    stream: StreamConfig = StreamConfig()

    @property
    def hash(self) -> str:
        """A short hash of every value, the same for equal configs."""
        return hash_of(self.model_dump(mode="json"))


def hash_of(value: Any) -> str:
    """Sixteen hex digits of the SHA-256 of a JSON value with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def load_config(
    path: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    assignments: Iterable[str] = (),
) -> RunConfig:
    """Read a run's config.

    Args:
        path: A YAML file, or None to start from nothing.
        overrides: Dotted key -> value, from named flags; None values are left out.
        assignments: `a.b=c` strings, the value in YAML.

    Raises:
        ConfigError: with every problem found, each with its dotted key.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values = read_yaml(Path(path))
    problems: list[str] = []
    for text in assignments:
        problems.extend(_assign_text(values, text))
    for key, value in (overrides or {}).items():
        if value is not None:
            problems.extend(_assign(values, key, value))
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        problems.extend(describe_problems(error))
        config = None
    if problems or config is None:
        where = f" in {path}" if path is not None else ""
        raise ConfigError(
            f"{len(problems)} problem{'s' if len(problems) != 1 else ''} with the configuration{where}:\n"
            + "\n".join(f"  - {problem}" for problem in problems),
            "the keys are listed by `poros train --help` and in docs/configuration.md",
        )
    return config


def assigned(assignments: Iterable[str]) -> dict[str, Any]:
    """Values from `a=b` strings, the value in YAML.

    Raises:
        ConfigError: with everything that isn't one.
    """
    values: dict[str, Any] = {}
    problems = [problem for text in assignments for problem in _assign_text(values, text)]
    if problems:
        raise ConfigError("; ".join(problems))
    return values


PartType = TypeVar("PartType", bound=Part)


def validated(part: type[PartType], values: Mapping[str, Any], where: str) -> PartType:
    """A part of a config from plain values.

    Args:
        part: Its class.
        values: Key -> value.
        where: What the keys belong to, put before each problem.

    Raises:
        ConfigError: with every problem found.
    """
    try:
        return part.model_validate(values)
    except ValidationError as error:
        lines = [f"{where}.{line}" if where else line for line in describe_problems(error)]
        raise ConfigError("; ".join(lines)) from error


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping.

    Raises:
        ConfigError: the file can't be read, isn't YAML, or isn't a mapping.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"can't read the config file {path}: {one_line(error)}", "give the path of a YAML file"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {one_line(error)}", "mend the line that it names") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds a {type(values).__name__}, not a mapping of keys to values", "write `key: value` lines"
        )
    # A part with nothing under it is read as None; it means the defaults.
    return {key: {} if value is None and key in _PARTS else value for key, value in values.items()}


def describe_problems(error: ValidationError) -> list[str]:
    """Each problem of a validation error as one line that starts with the dotted key."""
    lines = []
    for problem in error.errors():
        key = ".".join(str(step) for step in problem["loc"]) or "config"
        message = {"missing": "is required", "extra_forbidden": "is not a known key"}.get(problem["type"])
        if message is None:
            message = f"{problem['msg']} (got {problem['input']!r})"
        lines.append(f"{key}: {message}")
    return lines


_PARTS = {
    name
    for name, field in RunConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Part)
}
"""Keys of a run's config that hold further keys."""


def _assign_text(values: dict[str, Any], text: str) -> list[str]:
    """Set what an `a.b=c` string says; returns what is wrong with it, if anything."""
    key, separator, raw = text.partition("=")
    if not separator or not key.strip():
        return [f"--set {text}: expected a.b=value"]
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError as error:
        return [f"--set {text}: the value is not YAML: {one_line(error)}"]
    return _assign(values, key.strip(), value)


def _assign(values: dict[str, Any], dotted: str, value: Any) -> list[str]:
    """Set a dotted key in nested mappings; returns what is wrong with that, if anything."""
    *path, last = dotted.split(".")
    here = values
    for step in path:
        inner = here.setdefault(step, {})
        if not isinstance(inner, dict):
            return [f"{dotted}: {step} holds a value, not a part with keys"]
        here = inner
    here[last] = value
    return []
