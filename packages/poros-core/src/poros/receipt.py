"""Receipts: the record of a run as one JSON object a line, with names that are a contract.

Every number in Poros's documents comes from a receipt. A receipt is written even when a run fails.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from poros.errors import PorosError
from poros.provenance import Provenance

SCHEMA = 1
"""Version of the names below."""

DTYPE_POLICY = "base nf4, rest and computation bfloat16, adapters float32"
"""What peft does by itself under bf16 autocast, and what Poros does."""


class Receipt(BaseModel):
    """The record of one run. GB = 1e9 bytes, seconds are wall time, None means not measured.

    Attributes:
        kind: "train" (poros train), "check" (one arm set of the gate) or "cell" (a benchmark cell).
        case: What was run: a model's name.
        method: How: "poros", "resident", ...
        config: The whole validated config.
        config_hash, data_hash: Of the config and of the token rows.
        tokens_per_step: Tokens per optimizer step, padding included.
        dtype_policy: dtypes of base, computation and adapters.
        s_step_median, s_step_std: Seconds per optimizer step.
        gpu_s_per_step: Time of all kernels of a step, copies from the host left out.
        passes: Median seconds per step of each pass.
        steps: Optimizer steps.
        vram_allocated_gb, vram_reserved_gb, vram_device_gb: Peaks: torch's tensors, torch's pool, the whole process.
        host_peak_gb: Largest resident set.
        copied_gb_per_step: Bytes that travelled into slots.
        link_gb_s, link_share: Measured link, and the share of it that was used.
        stall_s_per_step: Seconds the computation waited for copies.
        plan: Predicted bytes and seconds.
        arms: Arm of a check -> median seconds per step.
        parity: Surface -> equal, different, or not said.
        losses: Loss of each recorded step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, ser_json_inf_nan="strings")

    # `schema` is a method of pydantic models, hence the alias.
    schema_: int = Field(SCHEMA, alias="schema")
    kind: Literal["cell", "check", "train"]
    case: str
    method: str
    model_type: str
    config: dict[str, Any]
    config_hash: str
    data_hash: str | None = None
    tokens_per_step: int | None = None
    trainable_parameters: int | None = None
    dtype_policy: str
    s_step_median: float | None = None
    s_step_std: float | None = None
    gpu_s_per_step: float | None = None
    passes: list[float] = []
    steps: int = 0
    vram_allocated_gb: float | None = None
    vram_reserved_gb: float | None = None
    vram_device_gb: float | None = None
    host_peak_gb: float | None = None
    copied_gb_per_step: float | None = None
    link_gb_s: float | None = None
    link_share: float | None = None
    stall_s_per_step: float | None = None
    plan: dict[str, Any] | None = None
    arms: dict[str, float] = {}
    parity: dict[str, bool | None] = {}
    losses: list[float] = []
    status: Literal["ok", "oom", "error", "skipped"] = "ok"
    reason: str | None = None
    provenance: Provenance

    def to_json(self) -> str:
        """One line of JSON."""
        return self.model_dump_json(by_alias=True)

    def append(self, path: Path) -> None:
        """Add the receipt to a file of receipts."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            if file.tell() > 0:
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.write(b"\n")  # whoever wrote the line before was stopped in the middle of it
            file.write(self.to_json().encode() + b"\n")


def read_receipts(path: Path, torn: bool = False) -> list[Receipt]:
    """All receipts of a file.

    Args:
        path: One receipt a line.
        torn: Whether to pass over a line that breaks off: its writer was stopped in the middle.

    Raises:
        PorosError: a line is not a receipt of this schema.
    """
    receipts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or (torn and not line.rstrip().endswith("}")):
            continue
        try:
            receipts.append(Receipt.model_validate_json(line))
        except ValidationError as error:
            raise PorosError(f"{path}, line {number} is not a receipt: {' '.join(str(error).split())[:200]}") from error
    return receipts
