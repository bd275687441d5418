"""Packages whose names come from their modules when asked for: light to import, whatever those modules need."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["lazy"]


def lazy(package: str, homes: dict[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`. `homes`: for each name the module of the package that defines it.

    No module may be named as one of the names: an imported module would hide it. Type checkers must not see the two
    functions, or a misspelt name would be one more that comes when asked for.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names
