"""Find a user's function by path: `pkg.mod:fn` or `file.py:fn`. Errors name what is missing and what is near."""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from stoker.errors import RewardError

__all__ = ["load", "nearest"]


def nearest(name: str, known: list[str]) -> str:
    """`; did you mean 'x'?`, or what there is."""
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; there is: {', '.join(sorted(known)[:20])}" if known else ""


def _file(path: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        folder = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise RewardError(f"reward function file {file} does not exist{nearest(file.name, folder)}")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # so that it can import its neighbours; last: they replace nothing
    name = f"_reward_{file.stem}"  # a user's math.py must not replace the module of that name
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise  # the module is there, and imports something that isn't
        raise RewardError(
            f"reward function: no module '{error.name}' (looked in the working directory and the environment); "
            "install it, or give a file: `file.py:fn`"
        ) from None


def load(path: str) -> Callable[..., Any]:
    """The callable at `pkg.mod:fn` or `file.py:fn`. Raises RewardError; errors of the user's module pass through."""
    where, colon, name = path.rpartition(":")
    if not colon or not where or not name:
        raise RewardError(f"reward function '{path}' is not of the form `pkg.mod:fn` or `file.py:fn`")
    module = _file(where) if where.endswith(".py") else _module(where)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [n for n in dir(found) if not n.startswith("_")]
            raise RewardError(f"reward function '{path}': {where} has no '{part}'{nearest(part, known)}")
        found = getattr(found, part)
    if not callable(found):
        raise RewardError(f"reward function '{path}' is a {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function
