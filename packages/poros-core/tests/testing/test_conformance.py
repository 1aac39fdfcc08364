"""The conformance suite itself: it can't be passed by leaving tests out."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

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

    with pytest.raises(TypeError, match="Uncalled overrides test_kept_activations"):

        class Uncalled(ArchitectureConformance):
            @pytest.mark.xfail(False, reason="it looks excused, and passes by doing nothing")
            def test_kept_activations(self) -> None:  # type: ignore[override]
                pass

    class Excused(ArchitectureConformance):
        @pytest.mark.xfail(reason="the family has no layer that could be kept")
        def test_kept_activations(self, case: Any, checkpoint: Any, plugins: Any) -> None:
            super().test_kept_activations(case, checkpoint, plugins)

        def test_something_of_its_own(self) -> None:
            pass


def test_there_is_no_way_round() -> None:
    class Mixin:
        def test_every_surface(self) -> None:
            pass

    with pytest.raises(TypeError, match="Mixed overrides test_every_surface"):

        class Mixed(Mixin, ArchitectureConformance):  # type: ignore[misc]
            pass

    with pytest.raises(TypeError, match="Eased overrides compared, which the tests rely on"):

        class Eased(ArchitectureConformance):
            def compared(self, *args: Any, **options: Any) -> Any:
                return None

    with pytest.raises(TypeError, match="Given overrides checkpoint"):

        class Given(ArchitectureConformance):
            @pytest.fixture
            def checkpoint(self) -> Any:  # type: ignore[override]
                return None

    with pytest.raises(TypeError, match="Skipped is marked skip as a whole"):

        class Skipped(ArchitectureConformance):
            pytestmark = pytest.mark.skip(reason="later")

    with pytest.raises(TypeError, match="Doubly overrides test_kept_activations"):

        class Doubly(ArchitectureConformance):
            @pytest.mark.skip
            @pytest.mark.xfail(reason="calls the test, if it ran")
            def test_kept_activations(self, case: Any, checkpoint: Any, plugins: Any) -> None:
                super().test_kept_activations(case, checkpoint, plugins)


def test_every_family_in_this_repository_is_proven(plugins: Plugins) -> None:
    """By a class of its own in the tests of the package that brings it; other installed packages prove theirs."""
    for package in sorted(ROOT.glob("packages/poros-arch-*")):
        plugin = importlib.import_module(package.name.replace("-", "_"))
        families = {architecture.family.upper() for architecture in plugin.poros_architectures()}
        sources = "".join(path.read_text() for path in package.glob("tests/test_*.py"))
        proven = re.findall(r"\(ArchitectureConformance\):\n    architecture = (\w+)\n", sources)
        assert families
        assert set(proven) == families, package.name
