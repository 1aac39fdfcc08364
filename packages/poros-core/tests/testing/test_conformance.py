"""The conformance suite itself: it can't be passed by leaving tests out."""

from __future__ import annotations

from pathlib import Path

import pytest

from poros.plugins import Plugins
from poros.testing.conformance import ArchitectureConformance

ROOT = Path(__file__).parents[4]


def test_overriding_a_test_needs_a_reason() -> None:
    with pytest.raises(TypeError, match="Silent overrides test_every_surface"):

        class Silent(ArchitectureConformance):
            def test_every_surface(self) -> None:  # type: ignore[override]
                pass

    with pytest.raises(TypeError, match="Unreasoned overrides test_kept_activations"):

        class Unreasoned(ArchitectureConformance):
            @pytest.mark.xfail
            def test_kept_activations(self) -> None:  # type: ignore[override]
                pass

    with pytest.raises(TypeError, match="Removed overrides"):

        class Removed(ArchitectureConformance):
            test_kept_activations = None  # type: ignore[assignment]

    class Excused(ArchitectureConformance):
        @pytest.mark.xfail(reason="the family has no layer that could be kept")
        def test_kept_activations(self) -> None:  # type: ignore[override]
            pass

        def test_something_of_its_own(self) -> None:
            pass


def test_every_family_in_this_repository_is_proven(plugins: Plugins) -> None:
    sources = "".join(path.read_text() for path in ROOT.glob("packages/poros-arch-*/tests/test_*.py"))
    for architecture in plugins.architectures():
        assert f"architecture = {architecture.family.upper()}" in sources, architecture.family
