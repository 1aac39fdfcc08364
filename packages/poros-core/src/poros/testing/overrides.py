"""What a family may change in the conformance suite: nothing, but for saying why a test can't pass yet."""

from __future__ import annotations

import inspect
from typing import Any

_MAY_CHANGE = frozenset({"architecture", "text_only"})
_WAYS_OUT = frozenset({"skip", "skipif", "xfail", "usefixtures"})


def check_overrides(cls: type, base: type) -> None:
    """Refuse a class that leaves out, replaces or skips a part of the suite.

    Args:
        cls: A subclass of the suite, with whatever else it inherits from.
        base: The suite.

    Raises:
        TypeError: it replaces a test without a reason and without calling it, a helper or a fixture, or marks them all.
    """
    for name, own in vars(base).items():
        found = inspect.getattr_static(cls, name)
        if found is own or name in _MAY_CHANGE or name.startswith("__"):
            continue
        if not name.startswith("test_"):
            raise TypeError(f"{cls.__name__} overrides {name}, which the tests rely on; give yours another name")
        if not _is_excused(found, name):
            raise TypeError(
                f"{cls.__name__} overrides {name}; mark it with pytest.mark.xfail(reason=...), which says why, "
                f"and call super().{name} in it"
            )
    marks: Any = getattr(cls, "pytestmark", [])
    for mark in marks if isinstance(marks, (list, tuple)) else [marks]:
        if mark.name in _WAYS_OUT:
            raise TypeError(f"{cls.__name__} is marked {mark.name} as a whole; mark single tests, with a reason")


def _is_excused(method: Any, name: str) -> bool:
    if not inspect.isfunction(method):
        return False
    named = {mark.name: mark for mark in getattr(method, "pytestmark", [])}
    calls = {"super", name} <= set(method.__code__.co_names)
    return set(named) == {"xfail"} and bool(named["xfail"].kwargs.get("reason")) and calls
