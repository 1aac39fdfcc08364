"""poros-bench as a plugin."""

from __future__ import annotations

from typer.testing import CliRunner

from poros.cli.app import make_app
from poros.plugins import load_plugins
from poros_bench.methods import needs


def test_the_verb_lists_the_methods() -> None:
    result = CliRunner().invoke(make_app(load_plugins()), ["bench", "methods"])
    assert result.exit_code == 0
    assert "poros" in result.output
    assert "resident" in result.output


def test_missing_packages_are_named_without_importing_them() -> None:
    assert needs("json", "no_such_package_anywhere")() == ("no_such_package_anywhere",)
