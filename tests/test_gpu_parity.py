"""The gate on a GPU.

    POROS_GPU_TEST_MODEL=qwen2.5-7b pytest -m gpu tests/test_gpu_parity.py

The model is a directory, a hub id, or the id of a published shape, which gets random weights. POROS_GPU_TEST_LAYERS
cuts a published shape to its first layers, POROS_GPU_TEST_STEPS sets the optimizer steps, and POROS_GPU_TEST_RECEIPTS
names a file to which a receipt of each run is added."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from poros.config import LoraPart, StreamConfig
from poros.engine.adapters import lora_config
from poros.parity.gate import CheckResult, check, receipt_of
from poros.parity.lockstep import check_in_lockstep
from poros.parity.source import find_published
from poros.parity.stock import Work
from poros.parity.surfaces import SURFACES
from poros.plugins import load_plugins

pytestmark = pytest.mark.gpu

MODEL = os.environ.get("POROS_GPU_TEST_MODEL", "qwen2.5-0.5b")
LAYERS = int(os.environ["POROS_GPU_TEST_LAYERS"]) if "POROS_GPU_TEST_LAYERS" in os.environ else None
STEPS = int(os.environ.get("POROS_GPU_TEST_STEPS", "5"))


@pytest.fixture(autouse=True)
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def run(attention: Any, dropout: float, work: Work, **stream: Any) -> CheckResult:
    part, config = LoraPart(dropout=dropout), StreamConfig(**stream)
    found = find_published(MODEL, load_plugins())
    if config.executor == "graphs" and found is not None:
        shape = AutoConfig.for_model(**found[1].config).get_text_config()
        if found[0].has_side_outputs(shape):
            pytest.skip("layers that share keys and values run eagerly")
    result = check(MODEL, lora_config(part), work, stream=config, attention=attention, layers=LAYERS)
    if "POROS_GPU_TEST_RECEIPTS" in os.environ:
        receipt_of(result, part).append(Path(os.environ["POROS_GPU_TEST_RECEIPTS"]))
    return result


def assert_identical(result: CheckResult) -> None:
    assert result.verdict == "identical", str(result.streamed.difference)
    assert result.surfaces == dict.fromkeys(SURFACES, True)
    assert result.control_found == result.control_block


@pytest.mark.parametrize("executor", ["graphs", "eager"])
@pytest.mark.parametrize("attention", ["fused", "math"])
def test_identical(attention: str, executor: str) -> None:
    work = Work(steps=STEPS, batch_size=1, length=512, accumulation=1)
    assert_identical(run(attention, 0.1, work, executor=executor))


@pytest.mark.parametrize("executor", ["graphs", "eager"])
def test_accumulation_and_padding(executor: str) -> None:
    work = Work(steps=STEPS, batch_size=2, length=192, accumulation=3)
    assert_identical(run("fused", 0.1, work, executor=executor, block_size=3, slots=2))


@pytest.mark.parametrize("executor", ["graphs", "eager"])
@pytest.mark.parametrize("resident", ["all", 5])
def test_kept_activations(resident: Any, executor: str) -> None:
    work = Work(steps=STEPS, batch_size=2, length=192, accumulation=1)
    assert_identical(run("fused", 0.1, work, executor=executor, resident=resident, recompute=False))


def test_in_lockstep() -> None:
    work = Work(steps=4 * STEPS, batch_size=1, length=512, accumulation=1)
    part, config = LoraPart(dropout=0.1), StreamConfig()
    result = check_in_lockstep(MODEL, lora_config(part), work, stream=config, layers=LAYERS)
    if "POROS_GPU_TEST_RECEIPTS" in os.environ:
        receipt_of(result, part).append(Path(os.environ["POROS_GPU_TEST_RECEIPTS"]))
    assert_identical(result)


def test_the_default_path_is_identical_or_not_reproducible() -> None:
    work = Work(steps=STEPS, batch_size=1, length=512, accumulation=1)
    result = run("default", 0.0, work)
    assert result.verdict in ("identical", "not reproducible on this path")
