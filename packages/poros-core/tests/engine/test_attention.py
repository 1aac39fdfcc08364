"""The attention paths set torch's switches and put them back."""

from __future__ import annotations

import pytest
import torch

from poros.engine.attention import attention_backends, attention_path


@pytest.mark.parametrize(
    ("path", "deterministic", "fused"), [("math", True, False), ("fused", True, True), ("default", False, True)]
)
def test_switches(path: str, deterministic: bool, fused: bool) -> None:
    before = attention_backends()
    with attention_path(path):  # type: ignore[arg-type]
        assert torch.are_deterministic_algorithms_enabled() is deterministic
        assert attention_backends() == ((True, True, True, True) if fused else (False, False, True, False))
        assert torch.utils.deterministic.fill_uninitialized_memory is not deterministic  # type: ignore[attr-defined]
    assert attention_backends() == before
    assert not torch.are_deterministic_algorithms_enabled()


def test_switches_come_back_after_a_failure() -> None:
    before = attention_backends()
    with pytest.raises(RuntimeError, match="boom"), attention_path("math"):
        raise RuntimeError("boom")
    assert attention_backends() == before
    assert not torch.are_deterministic_algorithms_enabled()
