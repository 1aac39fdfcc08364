"""The rules of the house, read from the tree: one-way imports, lockstep versions, small modules, documented hooks."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from poros import hookspecs
from poros.architecture import Architecture
from poros.config import Part, RunConfig, load_config
from poros_bench import hookspecs as bench_hookspecs

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path for path in (ROOT / "packages").iterdir() if path.is_dir())
CORE = ROOT / "packages" / "poros-core" / "src" / "poros"

RANKS = {
    "errors": 0,
    "config": 1,
    "dimensions": 1,
    "architecture": 2,
    "provenance": 1,
    "hookspecs": 3,
    "receipt": 3,
    "plugins": 4,
    "store": 5,
    "stream": 6,
    "checkpoint": 6,
    "plan": 7,
    "engine": 8,
    "parity": 9,
    "training": 9,
    "doctor": 9,
    "testing": 10,
    "cli": 10,
}
"""A part of core may import from parts of a lower rank, and from itself."""


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports at run time; imports for type checking only don't count."""

    def walk(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")))


def part_of(module: str) -> str | None:
    steps = module.split(".")
    return steps[1] if steps[0] == "poros" and len(steps) > 1 and steps[1] in RANKS else None


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda path: str(path.relative_to(CORE)))
def test_imports_go_one_way(path: Path) -> None:
    mine = path.relative_to(CORE).with_suffix("").parts[0]
    if mine == "__init__":
        return  # public names only; the heavy ones are imported on first use
    assert mine in RANKS, f"give {mine} a rank"
    for module in imports(path):
        other = part_of(module)
        assert other is None or other == mine or RANKS[other] < RANKS[mine], f"{path.name} imports {module}"


def test_the_import_reader_can_fail(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import poros.cli\n"
        "def f():\n    from poros.training import run\nimport poros.engine.load\n"
    )
    assert {part_of(module) for module in imports(file)} == {None, "training", "engine"}


@pytest.mark.parametrize("part", ["engine", "checkpoint", "store", "stream", "parity", "training"])
def test_core_names_no_family(part: str) -> None:
    for path in (CORE / part).rglob("*.py"):
        code = re.sub(r'""".*?"""|#.*', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.search(r"qwen|gemma|llama", code, re.IGNORECASE), path


@pytest.mark.parametrize("package", ["poros-arch-qwen", "poros-arch-gemma"])
def test_an_arch_package_holds_no_engine_code(package: str) -> None:
    source = ROOT / "packages" / package / "src"
    allowed = {"__future__", "collections", "dataclasses", "typing", "poros", package.replace("-", "_")}
    for path in source.rglob("*.py"):
        assert {module.split(".")[0] for module in imports(path)} <= allowed, path


def test_no_module_is_too_long() -> None:
    files = [*CORE.rglob("*.py"), *(p for package in PACKAGES for p in (package / "src").rglob("*.py"))]
    long = {str(path.relative_to(ROOT)): n for path in files if (n := path.read_text().count("\n")) > 400}
    assert not long


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_every_package_is_whole(package: Path) -> None:
    module = "poros" if package.name == "poros-core" else package.name.replace("-", "_")
    for name in ("pyproject.toml", "README.md", f"src/{module}/py.typed", f"src/{module}/__init__.py", "tests"):
        assert (package / name).exists(), name


def test_versions_are_in_lockstep() -> None:
    projects = {p.name: tomllib.loads((p / "pyproject.toml").read_text())["project"] for p in PACKAGES}
    versions = {project["version"] for project in projects.values()}
    assert len(versions) == 1
    version = versions.pop()
    major, minor, _ = map(int, version.split("."))
    for name, project in projects.items():
        module = "poros" if name == "poros-core" else name.replace("-", "_")
        init = (ROOT / "packages" / name / "src" / module / "__init__.py").read_text()
        assert f'__version__ = "{version}"' in init, name
        if name != "poros-core":
            assert f"poros-core>={major}.{minor},<{major}.{minor + 1}" in project["dependencies"], name
            assert "poros" in project["entry-points"], name
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def hooks() -> dict[str, tuple[str, ...]]:
    """Name -> arguments of every hook specification."""
    return {
        name: tuple(inspect.signature(function).parameters)
        for module in (hookspecs, bench_hookspecs)
        for name, function in vars(module).items()
        if name.startswith("poros_")
    }


def test_every_hook_is_documented_with_its_arguments() -> None:
    assert len(hooks()) == 4
    text = (ROOT / "docs" / "plugins.md").read_text()
    for name, arguments in hooks().items():
        assert f"### `{name}({', '.join(arguments)})`" in text
    for module in (hookspecs, bench_hookspecs):
        for name in hooks():
            function = getattr(module, name, None)
            if function is not None:
                for slot in ("When:", "Receives:", "Return:", "Don't:"):
                    assert slot in (function.__doc__ or ""), f"{name}: {slot}"


def test_every_hook_is_tested() -> None:
    tests = "".join(path.read_text() for package in PACKAGES for path in (package / "tests").rglob("test_*.py"))
    for name in hooks():
        assert f"def {name}(" in tests, name


def keys(part: type[Part], prefix: str = "") -> Iterator[str]:
    for name, field in part.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Part):
            yield from keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_every_key_of_the_config_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    listed = re.findall(r"^\| `([a-z_.]+)` \|", text, re.MULTILINE)
    assert listed == list(keys(RunConfig))


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "train").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_config_loads(path: Path) -> None:
    load_config(path)


def test_the_readmes_commands_exist() -> None:
    text = (ROOT / "README.md").read_text()
    sessions = set(re.findall(r"nox -s ([a-z ]+)", text))
    noxfile = ast.parse((ROOT / "noxfile.py").read_text())
    functions = {node.name: node for node in noxfile.body if isinstance(node, ast.FunctionDef) and node.decorator_list}
    assert {"demo", "tests"} <= sessions
    for session in {name for group in sessions for name in group.split()}:
        assert session in functions
    assert all(ast.get_docstring(node) for node in functions.values())
    assert "nox -s lint types tests" in (ROOT / ".ci" / "run").read_text()


def test_links_between_documents_lead_somewhere() -> None:
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(p / "README.md" for p in PACKAGES)]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_every_field_of_an_architecture_is_in_its_document() -> None:
    text = (ROOT / "docs" / "adding-an-architecture.md").read_text()
    table = "".join(line.split("|")[1] for line in text.splitlines() if line.startswith("|"))
    for field in dataclasses.fields(Architecture):
        assert f"`{field.name}`" in table, field.name


def test_the_tests_that_documents_name_exist() -> None:
    defined = set()
    for path in [*ROOT.glob("packages/*/tests/**/*.py"), *ROOT.glob("tests/*.py"), *CORE.rglob("*.py")]:
        defined.update(re.findall(r"def (test_\w+)", path.read_text()))
    for path in (ROOT / "docs").rglob("*.md"):
        for name in re.findall(r"`(test_\w+)`", path.read_text()):
            assert name in defined, f"{path.name} names {name}"
