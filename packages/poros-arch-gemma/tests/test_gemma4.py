"""The Gemma 4 family."""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version
from transformers import AutoConfig

from poros import PublishedShape
from poros.testing.conformance import ArchitectureConformance
from poros_arch_gemma.gemma4 import E_SERIES, GEMMA4


class TestGemma4(ArchitectureConformance):
    architecture = GEMMA4

    @pytest.mark.xfail(
        Version(transformers.__version__) < Version("5.10"),
        reason="transformers 5.5 builds keys and values for layers that read those of others",
    )
    def test_published_shapes_have_the_published_number_of_parameters(self, shape: PublishedShape) -> None:
        super().test_published_shapes_have_the_published_number_of_parameters(shape)


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
