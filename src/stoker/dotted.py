"""A user's function by its path: `pkg.mod:fn` or `file.py:fn`. Errors name what is missing and what is near."""

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from stoker.errors import StokerError

__all__ = ["load", "nearest", "users_traceback"]

_OURS = Path(__file__).parent


def nearest(name: str, known: list[str]) -> str:
    """`; did you mean 'x'?`, or what there is."""
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; there is: {', '.join(sorted(known)[:20])}" if known else ""


def users_traceback(error: BaseException) -> str:
    """What a user's code raised, told from its own first line on: without the frames that called or loaded it."""
    trace = error.__traceback__.tb_next if error.__traceback__ else None
    while trace is not None and _calls(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    if trace is None and not isinstance(error, SyntaxError):  # no line of the user's: all of it is told
        trace = error.__traceback__
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def _calls(file: str) -> bool:
    return file.startswith("<frozen importlib") or Path(file).is_relative_to(_OURS)


def load(path: str, what: str, error: type[StokerError]) -> Callable[..., Any]:
    """The callable at `path`, which errors call `what`. Raises `error`; those of the user's module pass through."""
    where, colon, name = path.rpartition(":")
    if not colon or not where or not name:
        raise error(f"{what} '{path}' is not of the form `pkg.mod:fn` or `file.py:fn`")
    module = _file(where, what, error) if where.endswith(".py") else _module(where, what, error)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [n for n in dir(found) if not n.startswith("_")]
            raise error(f"{what} '{path}': {where} has no '{part}'{nearest(part, known)}")
        found = getattr(found, part)
    if not callable(found):
        raise error(f"{what} '{path}' is a {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


def _file(path: str, what: str, error: type[StokerError]) -> ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        folder = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise error(f"{what}: the file {file} does not exist{nearest(file.name, folder)}")
    _search(file.parent)  # so that it can import its neighbours
    name = f"_user_{file.stem}"  # a user's math.py must not replace the module of that name
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except ImportError as failed:
        if "attempted relative import" not in str(failed):
            raise
        raise error(
            f"{what}: {file} imports from its own package (`from .name import ...`), which a file alone has none of: "
            "name it as a module, `package.module:fn`"
        ) from None
    return module


def _module(name: str, what: str, error: type[StokerError]) -> ModuleType:
    _search(Path.cwd())  # an installed command has its own folder on the path instead
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name is None or not (name == missing.name or name.startswith(missing.name + ".")):
            raise  # the module is there, and imports something that isn't
        raise error(
            f"{what}: no module '{missing.name}' (looked in the working directory and the environment); "
            "install it, or give a file: `file.py:fn`"
        ) from None


def _search(folder: Path) -> None:
    """Look for imports in this folder too; last, so that it replaces nothing."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
