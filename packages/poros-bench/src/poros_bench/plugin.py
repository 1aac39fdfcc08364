"""poros-bench as a plugin of Poros: its hook, its methods and the verb `poros bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import typer

from poros import hookimpl
from poros.errors import ConfigError
from poros.plugins import Plugins, load_plugins
from poros_bench import hookspecs
from poros_bench.methods import CHECKPOINTING, POROS, RESIDENT, SOUP, UNSLOTH, Method

poros_hookspecs = (hookspecs,)
"""Hook specifications that Poros adds to its own when it loads this plugin."""


@hookimpl
def poros_commands(app: typer.Typer) -> None:
    """Add `poros bench`."""
    from poros_bench.cli import bench

    app.add_typer(bench, name="bench")


@hookimpl
def poros_bench_methods() -> Sequence[Method]:
    """The methods of this package."""
    return (POROS, RESIDENT, CHECKPOINTING, UNSLOTH, SOUP)


def installed_methods(plugins: Plugins | None = None) -> dict[str, Method]:
    """Every method of every plugin by its name."""
    found = cast(Sequence[Method], (plugins or load_plugins()).methods())
    return {method.name: method for method in found}


def find_method(name: str, plugins: Plugins | None = None) -> Method:
    """A method by its name.

    Raises:
        ConfigError: there is none of that name.
    """
    methods = installed_methods(plugins)
    if name not in methods:
        raise ConfigError(f"no method is called {name}", f"installed are: {', '.join(methods)}")
    return methods[name]
