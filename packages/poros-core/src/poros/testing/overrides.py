"""What a family may change in the conformance suite: nothing, but for saying why a test can't pass yet."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from typing import Any

_MAY_CHANGE = frozenset({"architecture", "text_only"})
_WAYS_OUT = frozenset({"skip", "skipif", "xfail", "usefixtures", "parametrize"})
_XUNIT = ("setup_", "teardown_")
_EXCUSE = frozenset({"condition", "reason", "strict", "raises"})
"""What an xfail may say. With `run=False` the test isn't run, and nobody learns that it passes by now."""


def check_overrides(cls: type, base: type) -> None:
    """Refuse a class that leaves out, replaces or skips a part of the suite.

    An override that is in order gets the parametrization of the test it overrides, which pytest doesn't inherit.

    Args:
        cls: A subclass of the suite, with whatever else it inherits from.
        base: The suite.

    Raises:
        TypeError: it replaces a test without a reason and without calling it, or a helper; it brings fixtures or
            methods around every test; or marks them all.
    """
    # Those that come before the suite, each by itself: an override may call one that another class has put between.
    for owner in cls.__mro__[: cls.__mro__.index(base)]:
        for name, found in vars(owner).items():
            if name == "pytestmark":
                for mark in found if isinstance(found, (list, tuple)) else [found]:
                    if mark.name in _WAYS_OUT:
                        raise TypeError(
                            f"{cls.__name__} is marked {mark.name} as a whole; mark single tests, with a reason"
                        )
            elif name in vars(base) and not name.startswith("__"):
                if name.startswith("test_"):
                    _check_test(cls, name, found, vars(base)[name])
                elif name not in _MAY_CHANGE:
                    raise TypeError(
                        f"{cls.__name__} overrides {name}, which the tests rely on; give yours another name"
                    )
            elif name.startswith(_XUNIT) or _is_fixture(found):
                raise TypeError(
                    f"{cls.__name__} brings {name}, which could skip the tests of the suite; "
                    "write fixtures outside the class, and use them in tests of your own"
                )


def _check_test(cls: type, name: str, found: Any, original: Any) -> None:
    arguments = list(inspect.signature(original).parameters)
    call = f"super().{name}({', '.join(arguments[1:])})"
    parameters = [mark for mark in getattr(original, "pytestmark", []) if mark.name == "parametrize"]
    repeated = [mark for mark in getattr(found, "pytestmark", []) if mark.name == "parametrize"]
    if not (_is_excused(found) and _takes(found, arguments) and _begins_with(found, call)):
        raise TypeError(
            f"{cls.__name__} overrides {name}; mark it with pytest.mark.xfail(reason=...), without run, "
            f"give it the same arguments, and begin it with {call}"
        )
    if repeated and _values(repeated) != _values(parameters):
        raise TypeError(f"{cls.__name__} overrides {name} with other parameters; leave them out, they stay the same")
    if not repeated and parameters:
        found.pytestmark = [*found.pytestmark, *parameters]


def _is_excused(method: Any) -> bool:
    marks = [mark for mark in getattr(method, "pytestmark", []) if mark.name != "parametrize"]
    return bool(marks) and all(
        mark.name == "xfail" and mark.kwargs.get("reason") and mark.kwargs.keys() <= _EXCUSE for mark in marks
    )


def _takes(method: Any, arguments: Sequence[str]) -> bool:
    """Whether a method has these parameters. pytest passes nothing for one that has a default."""
    if not inspect.isfunction(method):
        return False
    own = inspect.signature(method, follow_wrapped=False).parameters
    return list(own) == arguments and all(parameter.default is parameter.empty for parameter in own.values())


def _begins_with(method: Any, call: str) -> bool:
    """Whether a call is the first thing that a method does: what comes before it could return or skip."""
    try:
        made = ast.parse(textwrap.dedent(inspect.getsource(method.__code__))).body[0]
    except (OSError, SyntaxError):
        return False
    if not isinstance(made, ast.FunctionDef):
        return False
    steps = made.body[1:] if ast.get_docstring(made) is not None else made.body
    return bool(steps) and isinstance(steps[0], ast.Expr) and ast.unparse(steps[0]) == call


def _values(marks: Sequence[Any]) -> list[Any]:
    return [(mark.args, mark.kwargs) for mark in marks]


def _is_fixture(value: Any) -> bool:
    """As pytest marks them: a kind of object since 8.4, a function with an attribute before."""
    return type(value).__name__ == "FixtureFunctionDefinition" or hasattr(value, "_pytestfixturefunction")
