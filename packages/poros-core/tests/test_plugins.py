"""Plugins: found, checked against each other, and refused by name."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from poros import Architecture, hookimpl
from poros.errors import PluginError, UnsupportedError
from poros.plugins import Plugins, load_plugins


def architecture(family: str = "other", *model_types: str) -> Architecture:
    return Architecture(
        family=family,
        model_types=model_types or (family,),
        layer_kinds=lambda config: (),
        tiny_config={},
        parity_cases=(),
    )


class Brings:
    """A plugin with the given architectures."""

    def __init__(self, *architectures: Architecture) -> None:
        self._architectures = architectures

    @hookimpl
    def poros_architectures(self) -> Sequence[Architecture]:
        return self._architectures


def test_a_further_family_needs_no_change_in_core() -> None:
    loaded = load_plugins([("other", Brings(architecture("other", "other_text")))])
    assert loaded.architecture_for("other_text").family == "other"
    assert {"qwen2", "qwen3", "gemma3", "gemma3_multimodal", "gemma4", "gemma4_multimodal", "other"} == {
        a.family for a in loaded.architectures()
    }


@pytest.mark.parametrize(
    ("second", "claim"),
    [(architecture("qwen2", "new"), "family 'qwen2'"), (architecture("new", "qwen2"), "model type 'qwen2'")],
)
def test_two_plugins_with_one_claim_are_named(second: Architecture, claim: str) -> None:
    with pytest.raises(PluginError, match=claim) as caught:
        load_plugins([("rival", Brings(second))])
    assert "poros-arch-qwen" in caught.value.message
    assert "rival" in caught.value.message


def test_a_misspelt_hook_is_an_error() -> None:
    class Misspelt:
        @hookimpl
        def poros_architecture(self) -> None:
            """One letter short."""

    with pytest.raises(PluginError, match="poros_architecture"):
        load_plugins([("misspelt", Misspelt())])


def test_a_hook_with_unknown_arguments_is_an_error() -> None:
    class Eager:
        @hookimpl
        def poros_step_end(self, step: Any, everything: Any) -> None:
            """There is no such argument."""

    with pytest.raises(PluginError, match="everything"):
        load_plugins([("eager", Eager())])


def test_a_plugin_that_fails_to_import_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = importlib.metadata.EntryPoint("broken", "no_such_module_anywhere", "poros")
    found = importlib.metadata.entry_points(group="poros")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [*found, broken])
    with caplog.at_level(logging.WARNING):
        loaded = load_plugins()
    assert "plugin broken" in caplog.text
    assert "no_such_module_anywhere" in caplog.text
    assert loaded.architecture_for("qwen2")


def test_an_unknown_model_type_lists_what_is_installed(plugins: Plugins) -> None:
    with pytest.raises(UnsupportedError, match="'llama'") as caught:
        plugins.architecture_for("llama")
    assert "gemma3, gemma3_text, gemma4, gemma4_text, qwen2, qwen3" in caught.value.hint


def test_an_unknown_model_type_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    with pytest.raises(UnsupportedError) as caught:
        load_plugins().architecture_for("qwen2")
    assert "python -m pip install poros-arch-qwen" in caught.value.hint


def test_every_hook_is_called_in_the_order_of_a_run() -> None:
    calls: list[str] = []

    class Every:
        @hookimpl
        def poros_architectures(self) -> Sequence[Architecture]:
            calls.append("architectures")
            return ()

        @hookimpl
        def poros_commands(self, app: Any) -> None:
            calls.append("commands")

        @hookimpl
        def poros_step_end(self, step: Any) -> None:
            calls.append("step_end")

        @hookimpl
        def poros_bench_methods(self) -> Sequence[Any]:
            calls.append("methods")
            return ()

    loaded = load_plugins([("every", Every())])
    import typer

    loaded.commands(typer.Typer())
    loaded.step_end(None)  # type: ignore[arg-type]
    loaded.methods()
    assert calls == ["architectures", "commands", "step_end", "methods"]
