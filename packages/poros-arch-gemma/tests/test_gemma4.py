"""The Gemma 4 family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import poros
from poros import ParityCase, PublishedShape
from poros.errors import CheckpointError, UnsupportedError
from poros.parity.resident import random_resident
from poros.testing.checkpoints import make_checkpoint
from poros.testing.conformance import ArchitectureConformance, Checkpoint
from poros_arch_gemma.gemma4 import E_SERIES, GEMMA4, GEMMA4_MULTIMODAL

OLD = pytest.mark.xfail(
    Version(transformers.__version__) < Version("5.10"),
    reason="transformers 5.5 builds keys and values for layers that share, and uses them when there is no cache",
)


class TestGemma4(ArchitectureConformance):
    architecture = GEMMA4

    @OLD
    def test_published_shapes_have_the_published_number_of_parameters(self, shape: PublishedShape) -> None:
        super().test_published_shapes_have_the_published_number_of_parameters(shape)

    @OLD
    def test_the_dimensions_are_the_models(self, case: ParityCase, checkpoint: Checkpoint) -> None:
        super().test_the_dimensions_are_the_models(case, checkpoint)


class TestGemma4Multimodal(ArchitectureConformance):
    architecture = GEMMA4_MULTIMODAL
    text_only = GEMMA4

    @OLD
    def test_the_dimensions_are_the_models(self, case: ParityCase, checkpoint: Checkpoint) -> None:
        super().test_the_dimensions_are_the_models(case, checkpoint)


@OLD
def test_keys_and_values_that_nobody_uses_may_be_in_the_files(tmp_path: Path) -> None:
    """Released E-series checkpoints hold them for layers that read those of others; stock ignores them too."""
    directory = make_checkpoint(tmp_path, GEMMA4, E_SERIES)
    weights = load_file(directory / "model.safetensors")
    assert "model.layers.5.self_attn.k_proj.weight" not in weights
    weights["model.layers.5.self_attn.k_proj.weight"] = torch.zeros(32, 96, dtype=torch.bfloat16)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    assert poros.load(directory, device="cpu") is not None
    weights["model.layers.5.self_attn.x_proj.weight"] = torch.zeros(32, 96, dtype=torch.bfloat16)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="x_proj"):
        poros.load(directory, device="cpu")


def test_layer_kinds_say_who_reads_shared_keys_and_values() -> None:
    dense = AutoConfig.for_model(**GEMMA4.tiny_config)
    assert set(GEMMA4.layer_kinds(dense)) == {"sliding_attention", "full_attention"}
    assert not GEMMA4.has_side_outputs(dense)
    sharing = AutoConfig.for_model(**{**GEMMA4.tiny_config, **E_SERIES})
    assert [("shared" in kind) for kind in GEMMA4.layer_kinds(sharing)] == [False] * 3 + [True] * 3
    assert GEMMA4.has_side_outputs(sharing)


def test_what_is_refused_is_refused_by_name() -> None:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    for values, name in (
        (experts, "mixture of experts"),
        ({"use_bidirectional_attention": "all"}, "bidirectional attention"),
    ):
        refusal = GEMMA4.refusal(AutoConfig.for_model(**{**GEMMA4.tiny_config, **values}))
        assert refusal is not None
        assert refusal.name == name


@OLD
@pytest.mark.parametrize("layers", [1, 3, 4, 5])
def test_a_model_that_shares_can_be_cut_anywhere(layers: int) -> None:
    """Layers that share are counted from the last one; the first layers of a model stay what they are."""
    config = {**GEMMA4.tiny_config, **E_SERIES}
    whole = AutoConfig.for_model(**config)
    kinds = GEMMA4.layer_kinds(whole)
    model = random_resident(GEMMA4, config, torch.device("cpu"), layers).train()
    assert list(GEMMA4.layer_kinds(model.config)) == list(kinds[:layers])
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        right = model(input_ids=ids, use_cache=False).logits
        assert torch.equal(poros.attach(model)(input_ids=ids, use_cache=False).logits, right)


def test_one_tensor_of_all_layers_embeddings_is_not_cut(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, GEMMA4, E_SERIES)
    with pytest.raises(UnsupportedError, match="published shape"):
        poros.load(directory, device="cpu", num_layers=2)
