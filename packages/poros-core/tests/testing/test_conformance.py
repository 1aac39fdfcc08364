"""The conformance suite itself: it can't be passed by leaving tests out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from poros.architecture import Unsupported
from poros.errors import UnsupportedError
from poros.parity import gate
from poros.plugins import Plugins
from poros.testing import conformance
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


REASON = "the family has no layer that could be kept"


def test_an_excused_test_runs_and_does_all_that_it_did() -> None:
    """Ways to look excused, and to pass or to be passed over by doing less."""

    def not_run() -> None:
        class NotRun(ArchitectureConformance):
            @pytest.mark.xfail(reason=REASON, run=False)
            def test_kept_activations(self, case: Any, checkpoint: Any, plugins: Any) -> None:
                super().test_kept_activations(case, checkpoint, plugins)

    def only_named() -> None:
        class OnlyNamed(ArchitectureConformance):
            @pytest.mark.xfail(reason=REASON)
            def test_kept_activations(self, case: Any, checkpoint: Any, plugins: Any) -> None:
                super().test_kept_activations  # noqa: B018

    def called_late() -> None:
        class CalledLate(ArchitectureConformance):
            @pytest.mark.xfail(reason=REASON)
            def test_kept_activations(self, case: Any, checkpoint: Any, plugins: Any) -> None:
                if case is not None:
                    pytest.skip("it is called behind this")
                super().test_kept_activations(case, checkpoint, plugins)

    def caught() -> None:
        class Caught(ArchitectureConformance):
            @pytest.mark.xfail(False, reason=REASON)
            def test_kept_activations(self, case: Any, checkpoint: Any, plugins: Any) -> None:
                with contextlib.suppress(AssertionError):
                    super().test_kept_activations(case, checkpoint, plugins)

    def other_test() -> None:
        class OtherTest(ArchitectureConformance):
            @pytest.mark.xfail(reason=REASON)
            def test_kept_activations(self, case: Any, checkpoint: Any, plugins: Any) -> None:
                super().test_evaluation_equals_stock(case, checkpoint, plugins)

    def of_one_shape() -> None:
        class OfOneShape(ArchitectureConformance):
            @pytest.mark.xfail(reason=REASON)
            def test_every_surface(
                self, case: Any, padded: bool, block_size: int, checkpoint: Any, plugins: Any
            ) -> None:
                super().test_every_surface(case, False, block_size, checkpoint, plugins)

    def without_arguments() -> None:
        class WithoutArguments(ArchitectureConformance):
            @pytest.mark.xfail(reason=REASON)  # by the TypeError of the call
            def test_kept_activations(self, case: Any) -> None:  # type: ignore[override]
                super().test_kept_activations(case)  # type: ignore[call-arg]

    def with_defaults() -> None:
        class WithDefaults(ArchitectureConformance):
            @pytest.mark.xfail(reason=REASON)  # pytest gives nothing to an argument that has a default
            def test_kept_activations(self, case: Any = None, checkpoint: Any = None, plugins: Any = None) -> None:
                super().test_kept_activations(case, checkpoint, plugins)

    def skipping(function: Any) -> Any:
        @functools.wraps(function)
        def wrapped(self: Any, *args: Any, **named: Any) -> None:
            pytest.skip("before anything is called")

        return wrapped

    def wrapped() -> None:
        class Wrapped(ArchitectureConformance):
            @skipping
            @pytest.mark.xfail(reason=REASON)
            def test_kept_activations(self, case: Any, checkpoint: Any, plugins: Any) -> None:
                super().test_kept_activations(case, checkpoint, plugins)

    def between() -> None:
        class Empty:
            def test_kept_activations(self, case: Any, checkpoint: Any, plugins: Any) -> None:
                pass

        class Between(Empty, ArchitectureConformance):  # type: ignore[misc]
            @pytest.mark.xfail(reason=REASON)
            def test_kept_activations(self, case: Any, checkpoint: Any, plugins: Any) -> None:
                super().test_kept_activations(case, checkpoint, plugins)

    for define in (
        *(not_run, only_named, called_late, caught, other_test, without_arguments, with_defaults, wrapped, between),
    ):
        call = r"super\(\).test_kept_activations\(case, checkpoint, plugins\)"
        with pytest.raises(TypeError, match=f"overrides test_kept_activations.* without run.*{call}"):
            define()
    with pytest.raises(TypeError, match="OfOneShape overrides test_every_surface"):
        of_one_shape()


def test_nothing_around_the_tests_can_skip_them() -> None:
    def fixture() -> None:
        class Around(ArchitectureConformance):
            @pytest.fixture(autouse=True)
            def mine(self) -> None:
                pytest.skip("all of them")

    def mixed_in() -> None:
        class Mixin:
            @pytest.fixture(autouse=True, scope="class")
            def mine(self) -> None:
                pytest.skip("all of them")

        class Around(Mixin, ArchitectureConformance):
            pass

    for define in (fixture, mixed_in):
        with pytest.raises(TypeError, match="Around brings mine"):
            define()
    for name in ("setup_method", "setup_class", "teardown_method", "teardown_class"):
        with pytest.raises(TypeError, match=f"Around brings {name}"):
            type("Around", (ArchitectureConformance,), {name: lambda self: pytest.skip("all of them")})
    for mark in (pytest.mark.usefixtures("mine"), pytest.mark.parametrize("checkpoint", [])):
        with pytest.raises(TypeError, match=f"Around is marked {mark.name}"):
            type("Around", (ArchitectureConformance,), {"pytestmark": [mark]})


def test_a_class_that_is_marked_once_it_is_made_is_refused_when_it_is_collected(families: Any) -> None:
    @pytest.mark.skipif(True, reason="later")
    class Decorated(ArchitectureConformance):
        architecture = families["qwen2"]

    with pytest.raises(TypeError, match="Decorated is marked skipif"):
        Decorated().pytest_generate_tests(SimpleNamespace(fixturenames=()))


def test_an_override_runs_for_the_parameters_of_the_original() -> None:
    """pytest doesn't inherit them, and a test without them would be an error that xfail excuses."""

    class Excused(ArchitectureConformance):
        @pytest.mark.xfail(reason="the family can't be padded")
        def test_every_surface(self, case: Any, padded: bool, block_size: int, checkpoint: Any, plugins: Any) -> None:
            super().test_every_surface(case, padded, block_size, checkpoint, plugins)

    class Again(ArchitectureConformance):
        @pytest.mark.parametrize("padded", [True, False], ids=["padded", "unpadded"])
        @pytest.mark.parametrize("block_size", [1, 3])
        @pytest.mark.xfail(reason="the family can't be padded")
        def test_every_surface(self, case: Any, padded: bool, block_size: int, checkpoint: Any, plugins: Any) -> None:
            super().test_every_surface(case, padded, block_size, checkpoint, plugins)

    for made in (Excused, Again):
        marks = [mark for mark in made.test_every_surface.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
        assert {mark.args[0]: mark.args[1] for mark in marks} == {"padded": [True, False], "block_size": [1, 3]}
        assert len(marks) == 2

    with pytest.raises(TypeError, match="Fewer overrides test_every_surface with other parameters"):

        class Fewer(ArchitectureConformance):
            @pytest.mark.parametrize("padded", [False])
            @pytest.mark.parametrize("block_size", [1])
            @pytest.mark.xfail(reason="the family can't be padded")
            def test_every_surface(
                self, case: Any, padded: bool, block_size: int, checkpoint: Any, plugins: Any
            ) -> None:
                super().test_every_surface(case, padded, block_size, checkpoint, plugins)


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "gemma3_multimodal"])
def test_a_multimodal_family_must_name_its_text_tower(
    family: str, families: Any, checkpoint: Any, plugins: Plugins, tmp_path: Path
) -> None:
    """A comparison of two classes that isn't made must not look like one that there is no need of."""

    class Forgetful(ArchitectureConformance):
        architecture = families[family]

    case = families[family].parity_cases[0]
    multimodal = family.endswith("multimodal")
    expected: Any = AssertionError if multimodal else pytest.skip.Exception
    with pytest.raises(expected, match="as text_only" if multimodal else "the family has one class"):
        Forgetful().test_text_only_and_multimodal_class_agree(
            case, lambda case: checkpoint(family, dict(case.config)), tmp_path, plugins
        )


def test_published_shapes_are_planned_as_the_command_line_plans_them(families: Any) -> None:
    """With what the family refuses: a predicate that can't bear a missing value would stop every plan."""
    item = Unsupported(name="many experts", applies=lambda config: config.num_experts > 1, example={"num_experts": 4})

    class Demanding(ArchitectureConformance):
        architecture = dataclasses.replace(families["qwen2"], unsupported=(item,))

    with pytest.raises(UnsupportedError, match="has no num_experts"):
        Demanding().test_published_shapes_can_be_planned(Demanding.architecture.published[0])


def test_bytes_are_changed_in_every_kind_of_layer(
    families: Any, checkpoint: Any, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kinds may have the same fields in the same layout and be run by other code."""
    family = families["gemma3"]
    changed: list[tuple[str, str]] = []

    def corrupt(engine: Any, layer: int, field: str, byte: int) -> None:
        changed.append((family.tiny_config["layer_types"][layer], field))
        gate.corrupt(engine, layer, field, byte)

    class Sliding(ArchitectureConformance):
        architecture = dataclasses.replace(family, parity_cases=family.parity_cases[:1])

    monkeypatch.setattr(conformance, "corrupt", corrupt)
    Sliding().test_a_changed_byte_is_found(lambda case: checkpoint("gemma3", dict(case.config)), plugins)
    kinds = sorted(set(family.tiny_config["layer_types"]))
    assert len(kinds) == 2
    fields = [sorted({field for of, field in changed if of == kind}) for kind in kinds]
    assert fields[0] == fields[1]
    assert len(fields[0]) > 30


def test_every_family_in_this_repository_is_proven(plugins: Plugins) -> None:
    """By a class of its own in the tests of the package that brings it; other installed packages prove theirs."""
    for package in sorted(ROOT.glob("packages/poros-arch-*")):
        plugin = importlib.import_module(package.name.replace("-", "_"))
        families = {architecture.family.upper() for architecture in plugin.poros_architectures()}
        sources = "".join(path.read_text() for path in package.glob("tests/test_*.py"))
        proven = re.findall(r"\(ArchitectureConformance\):\n    architecture = (\w+)\n", sources)
        assert families
        assert set(proven) == families, package.name
