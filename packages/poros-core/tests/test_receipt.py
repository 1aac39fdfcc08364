"""Receipts: the contract's names, and nothing that isn't one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from poros.errors import PorosError
from poros.provenance import provenance
from poros.receipt import Receipt, read_receipts

CONTRACT = (
    "schema kind case method model_type config config_hash data_hash tokens_per_step trainable_parameters dtype_policy "
    "s_step_median s_step_std passes steps vram_allocated_gb vram_reserved_gb vram_device_gb host_peak_gb "
    "copied_gb_per_step link_gb_s link_share stall_s_per_step plan parity status reason provenance"
).split()
PROVENANCE = (
    "poros commit torch cuda transformers peft bitsandbytes triton python gpu_name gpu_uuid driver pcie_gen pcie_width "
    "cpu cores host_ram_gb date"
).split()


def receipt() -> Receipt:
    return Receipt(
        kind="check",
        case="c",
        method="poros",
        model_type="qwen2",
        config={"a": 1},
        config_hash="0",
        dtype_policy="d",
        parity={"loss": True, "logits": None},
        provenance=provenance(),
    )


def test_names_are_the_contract() -> None:
    values = json.loads(receipt().to_json())
    assert set(CONTRACT) <= set(values)
    assert list(values["provenance"]) == PROVENANCE
    assert values["schema"] == 1


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "receipts.jsonl"
    one = receipt()
    one.append(path)
    one.append(path)
    assert read_receipts(path) == [one, one]


def test_values_that_are_not_finite_survive(tmp_path: Path) -> None:
    made = receipt().model_copy(update={"losses": [1.0, float("nan"), float("inf")]})
    made.append(tmp_path / "r.jsonl")
    (found,) = read_receipts(tmp_path / "r.jsonl")
    assert str(found.losses) == "[1.0, nan, inf]"


@pytest.mark.parametrize("line", ["{", "{}", '{"schema": 1, "kind": "rumour"}'])
def test_what_is_no_receipt_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "receipts.jsonl"
    receipt().append(path)
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(PorosError, match="line 2 is not a receipt"):
        read_receipts(path)
