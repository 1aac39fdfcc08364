"""Soup as a method. Most of it needs an environment of its own, holding `soup-cli` and `trl<1`; `-m rival`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from poros.config import LoraPart
from poros.plugins import load_plugins
from poros.testing.checkpoints import make_checkpoint
from poros_bench.cell import Cell, NotApplicableError, run
from poros_bench.config import Case, MethodEntry
from poros_bench.methods import SoupOptions
from poros_bench.plugin import find_method

PLUGINS = load_plugins()


def rival(test: Any) -> Any:
    """Mark a test that needs Soup."""
    return pytest.mark.rival(pytest.mark.skipif(find_spec("soup_cli") is None, reason="needs soup-cli")(test))


def cell(directory: Path, entry: MethodEntry) -> Cell:
    case = Case(
        name="a",
        model=str(directory),
        steps=2,
        passes=1,
        warm_up=1,
        length=16,
        lora=LoraPart(rank=4, alpha=8),
        attention="math",
    )
    return Cell(case, entry, directory, str(directory))


def test_its_options_are_its_own_defaults() -> None:
    assert SoupOptions().model_dump() == {
        "buffers": 2,
        "scale_cache": False,
        "recompute": True,
        "adapters": "float32",
    }


@pytest.mark.skipif(find_spec("soup_cli") is not None, reason="soup-cli is here")
def test_where_it_is_absent_it_is_skipped(tmp_path: Path) -> None:
    assert find_method("soup").missing() == ("soup_cli",)
    receipt = run(cell(tmp_path, MethodEntry(method="soup")))
    assert (receipt.status, receipt.reason) == ("skipped", "not installed: soup_cli")


def gradients(trainee: Any, adapters: dict[str, torch.Tensor] | None) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients over two micro-batches, from the adapters given."""
    own = {name: value for name, value in trainee.model.named_parameters() if value.requires_grad}
    with torch.no_grad():
        for name, value in (adapters or {}).items():
            own[name].copy_(value)
    trainee.model.train()
    ids = torch.arange(16)[None] % 50
    for shift in (0, 3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = trainee.model(input_ids=ids + shift, labels=ids + shift, use_cache=False).loss
        loss.backward()
    return loss.item(), {name: value.grad for name, value in own.items()}


@rival
@pytest.mark.parametrize(("shape", "layers"), [("qwen2.5-0.5b", 2), ("qwen3-0.6b", 2), ("gemma3-270m", 2)])
def test_it_trains_the_bytes_that_others_train(shape: str, layers: int, tmp_path: Path) -> None:
    """From one quantised checkpoint and one set of adapters, its loss and gradients are stock's, bit for bit."""
    from poros_bench.models import make
    from poros_bench.soup import soup
    from poros_bench.ways import resident

    make(shape, layers, tmp_path / "model")
    stock = resident(cell(tmp_path / "model", MethodEntry(method="resident")))
    adapters = {name: value.detach().clone() for name, value in stock.model.named_parameters() if value.requires_grad}
    expected = gradients(stock, None)
    trainee = soup(cell(tmp_path / "model", MethodEntry(method="soup")))
    loss, found = gradients(trainee, adapters)
    trainee.close()
    assert loss == expected[0]
    assert found.keys() == expected[1].keys() and len(found) == layers * 14
    assert all(torch.equal(found[name], expected[1][name]) for name in found)
    assert any(value.abs().max() > 0 for value in found.values())


@rival
@pytest.mark.parametrize("options", [{}, {"buffers": 3, "recompute": False, "adapters": "bfloat16"}])
def test_a_cell_of_a_16_bit_checkpoint(options: dict[str, Any], tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", PLUGINS.architecture_for("qwen2"), {})
    receipt = run(cell(tmp_path / "model", MethodEntry(method="soup", options=options)))
    assert receipt.status == "ok", receipt.reason
    assert receipt.config["stream"]["buffers"] == options.get("buffers", 2)
    assert receipt.dtype_policy is not None and options.get("adapters", "float32") in receipt.dtype_policy
    assert receipt.config["method_version"]


@rival
def test_a_family_it_does_not_know_is_skipped(tmp_path: Path) -> None:
    from poros_bench.soup import soup

    make_checkpoint(tmp_path / "model", PLUGINS.architecture_for("gemma4_text"), {})
    with pytest.raises(NotApplicableError, match="does not support"):
        soup(cell(tmp_path / "model", MethodEntry(method="soup")))
