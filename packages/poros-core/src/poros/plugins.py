"""Finding plugins and calling their hooks, with one typed pass-through per hook.

There is no global registry: whoever needs plugins calls `load_plugins()` and hands the result on. A plugin that fails
to import becomes a warning that names it; plugins that contradict each other are an error that names both.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pluggy

from poros import hookspecs
from poros.architecture import Architecture, PublishedShape
from poros.errors import PluginError, UnsupportedError

if TYPE_CHECKING:
    import typer

    from poros.training.progress import StepRecord

PROJECT = "poros"
"""The pluggy project name and the entry-point group."""

KNOWN_PACKAGES = {"qwen": "poros-arch-qwen", "gemma": "poros-arch-gemma"}
"""Where to find families that aren't installed, by the word a model type starts with."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PluginInfo:
    """One installed plugin, as `poros plugins` lists it."""

    name: str
    distribution: str
    version: str
    hooks: Sequence[str]
    families: Sequence[str]
    model_types: Sequence[str]


class Plugins:
    """The loaded plugins.

    Args:
        manager: A pluggy manager with every plugin registered.
        distributions: Plugin name -> (distribution name, version).

    Raises:
        PluginError: two plugins claim the same family or model type, or a plugin implements an unknown hook.
    """

    def __init__(self, manager: pluggy.PluginManager, distributions: dict[str, tuple[str, str]]) -> None:
        self._pluggy = manager
        self._distributions = distributions
        try:
            manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise PluginError(
                f"a plugin doesn't fit the hooks of this version of Poros: {error}",
                "install versions of the Poros packages that belong together",
            ) from error
        self._claims()

    # -- pass-throughs ------------------------------------------------------------------------------------------------

    def architectures(self) -> Sequence[Architecture]:
        """Every family that is installed, in order of registration."""
        return tuple(architecture for architecture, _ in self._claimed)

    def commands(self, app: typer.Typer) -> None:
        """Let plugins add their commands to the command line."""
        self._pluggy.hook.poros_commands(app=app)

    def step_end(self, step: StepRecord) -> None:
        """Tell plugins about a finished step."""
        self._pluggy.hook.poros_step_end(step=step)

    def methods(self) -> Sequence[object]:
        """Benchmark methods; empty when no plugin brings that hook."""
        hook: Any = getattr(self._pluggy.hook, "poros_bench_methods", None)
        return () if hook is None else tuple(method for group in hook() for method in group)

    # -- look-ups -----------------------------------------------------------------------------------------------------

    def published(self, name: str) -> tuple[Architecture, PublishedShape] | None:
        """The family and the published shape whose id is `name`; None if there is none."""
        return next(
            ((family, shape) for family in self.architectures() for shape in family.published if shape.id == name), None
        )

    def architecture_for(self, model_type: str) -> Architecture:
        """The family of a `model_type`.

        Raises:
            UnsupportedError: no installed plugin knows it; the hint says what is installed and what to install.
        """
        for architecture in self.architectures():
            if model_type in architecture.model_types:
                return architecture
            if model_type in architecture.refused_model_types:
                raise UnsupportedError(
                    f"the model type {model_type!r} is not supported: {architecture.refused_model_types[model_type]}",
                    f"the family {architecture.family} runs: {', '.join(architecture.model_types)}",
                )
        installed = sorted(kind for a in self.architectures() for kind in a.model_types)
        package = next((p for word, p in KNOWN_PACKAGES.items() if model_type.startswith(word)), None)
        hint = f"installed: {', '.join(installed) or 'none'}"
        if package is not None and package not in {name for name, _ in self._distributions.values()}:
            hint += f"; try: python -m pip install {package}"
        raise UnsupportedError(f"no installed plugin knows the model type {model_type!r}", hint)

    def infos(self) -> Sequence[PluginInfo]:
        """What is installed, for `poros plugins` and for provenance."""
        infos = []
        for name, plugin in self._pluggy.list_name_plugin():
            if plugin is None or name not in self._distributions:
                continue
            distribution, version = self._distributions[name]
            mine = [a for a, owner in self._claimed if owner == name]
            callers = self._pluggy.get_hookcallers(plugin) or []
            infos.append(
                PluginInfo(
                    name=name,
                    distribution=distribution,
                    version=version,
                    hooks=tuple(sorted(caller.name for caller in callers)),
                    families=tuple(a.family for a in mine),
                    model_types=tuple(kind for a in mine for kind in a.model_types),
                )
            )
        return tuple(infos)

    # -- consistency --------------------------------------------------------------------------------------------------

    @cached_property
    def _claimed(self) -> list[tuple[Architecture, str]]:
        """Every architecture with the name of the plugin that brought it."""
        caller = self._pluggy.hook.poros_architectures
        claimed: list[tuple[Architecture, str]] = []
        for implementation in caller.get_hookimpls():
            brought: Any = implementation.function()
            claimed.extend((architecture, implementation.plugin_name) for architecture in brought)
        return claimed

    def _claims(self) -> None:
        owners: dict[tuple[str, str], str] = {}
        for architecture, owner in self._claimed:
            words = [("family", architecture.family)] + [("model type", kind) for kind in architecture.model_types]
            for claim in words:
                if claim in owners:
                    first, second = (self._distributions.get(n, (n, ""))[0] for n in (owners[claim], owner))
                    raise PluginError(
                        f"{first} and {second} both bring the {claim[0]} {claim[1]!r}", "uninstall one of the two"
                    )
                owners[claim] = owner


def load_plugins(extra: Iterable[tuple[str, object]] = ()) -> Plugins:
    """Load every installed plugin of the entry-point group `poros`.

    Args:
        extra: Further plugins as (name, module or object), for programs that bring their own.

    Raises:
        PluginError: see `Plugins`.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    distributions: dict[str, tuple[str, str]] = {}
    loaded: list[tuple[str, object]] = []
    for entry in sorted(importlib.metadata.entry_points(group=PROJECT), key=lambda e: e.name):
        distribution = entry.dist.name if entry.dist is not None else entry.name
        version = entry.dist.version if entry.dist is not None else ""
        try:
            loaded.append((entry.name, entry.load()))
        except Exception as error:  # noqa: BLE001 - a broken plugin must not take the others down
            log.warning("plugin %s (%s %s) failed to import: %s", entry.name, distribution, version, error)
            continue
        distributions[entry.name] = (distribution, version)
    loaded.extend(extra)
    # A plugin may bring hook specifications of its own (poros-bench does); all must be known before check_pending().
    for _, plugin in loaded:
        for specification in getattr(plugin, "poros_hookspecs", ()):
            manager.add_hookspecs(specification)
    for name, plugin in loaded:
        distributions.setdefault(name, (name, ""))
        try:
            manager.register(plugin, name=name)
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(f"plugin {name} doesn't fit this version of Poros: {error}") from error
    return Plugins(manager, distributions)
