"""Compiles the C++ of decoding and of updates for this machine's processor, once, and loads it.

The library is kept in the user's cache folder under a name that its source, its compiler and the processor make, so
a change of any of them compiles anew, and machines that share a home folder don't share code. It ends with the hash of
what comes before, and one that doesn't is compiled again: opening a file that was cut short would end the process.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from stoker.record.disk import fsync_path
from stoker.record.environment import cpu

__all__ = ["Library", "arithmetic", "load_library"]

_UNITS, _HEADERS = (
    tuple(Path(__file__).with_name(name) for name in names)
    for names in (("decode.cpp", "training.cpp"), ("attention.h", "dots.h", "numbers.h", "tiles.h"))
)
_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_SECONDS = 120
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class Library:
    """The compiled functions."""

    functions: ctypes.CDLL
    tiles: bool
    """The processor multiplies matrices in tiles (AMX), so `tiles.h` is of use."""
    dots: bool
    """Its registers are wide enough for `dots.h` (AVX-512)."""
    compiler: str
    """Its version line: another may round otherwise."""
    seconds: float
    """What compiling took just now; 0: it was done before."""

    def function(self, name: str, *arguments: Any) -> Callable[..., None]:
        """One that gives nothing back, by name and C types."""
        found = getattr(self.functions, name)
        found.argtypes, found.restype = arguments, None
        called: Callable[..., None] = found
        return called


def arithmetic(library: Library | None) -> str:
    """What computes, for a manifest: other arithmetic rounds otherwise."""
    return "PyTorch's operators" if library is None else f"compiled by {library.compiler}"


@cache
def load_library() -> Library | str:
    """The library, or why there is none, as a clause."""
    if sys.platform != "linux":
        return "they are compiled on Linux only"
    try:
        return _load()
    except (OSError, subprocess.SubprocessError) as error:
        return _reason(error)


def _load() -> Library | str:
    path = next(filter(None, map(shutil.which, [os.environ.get("CXX", ""), *_COMPILERS])), None)
    if path is None:
        return f"no C++ compiler was found ({', '.join(_COMPILERS)}, or CXX)"
    compiler = next(iter(_run([path, "--version"]).splitlines()), Path(path).name)
    kept = _folder() / _name(compiler)
    seconds = 0.0 if _is_whole(kept) else _compile(path, kept)
    functions = ctypes.CDLL(str(kept))
    return Library(functions, bool(functions.has_tiles()), bool(functions.has_dots()), compiler, seconds)


def _name(compiler: str) -> str:
    """Of the library's file."""
    name, flags = cpu()
    parts = [*(source.read_text(encoding="utf-8") for source in _UNITS + _HEADERS), compiler, *_FLAGS, name, *flags]
    return f"stoker-{hashlib.sha256('/'.join(parts).encode()).hexdigest()[:16]}.so"


def _compile(path: str, kept: Path) -> float:
    """Make the library with the compiler at `path`; how long it took, in seconds."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=kept.parent) as place:
        built = Path(place) / kept.name
        _run([path, *_FLAGS, *map(str, _UNITS), "-o", str(built)])
        if not built.exists():
            raise OSError(f"{Path(path).name} ended without an error and without a library")
        digest = _digest(built.read_bytes())
        with built.open("ab") as file:  # what loads libraries doesn't look there
            file.write(digest)
        fsync_path(built)  # a disk that is full may say so only now
        built.replace(kept)  # whole or not at all, whoever else compiles it
    return time.monotonic() - started


def _is_whole(kept: Path) -> bool:
    if not kept.is_file():
        return False
    data = kept.read_bytes()
    return _digest(data[:-_DIGEST_BYTES]) == data[-_DIGEST_BYTES:]


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _folder() -> Path:
    """Where libraries are kept. Raises OSError where there is no such place, or where somebody else could have put one
    there.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(base) if base else Path.home() / ".cache") / "stoker"
    except RuntimeError as error:  # a user without an entry in the system's list, as containers have
        raise OSError("there is no home folder to keep them in: set XDG_CACHE_HOME to a folder of your own") from error
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"they can't be kept in {folder} ({error.strerror}): set XDG_CACHE_HOME to a folder of your own"
        ) from error
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{folder} is another user's, or others may write to it: set XDG_CACHE_HOME to a folder of your own"
        )
    return folder


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=True)
    return done.stdout


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        said = (error.stderr or "").strip().splitlines()
        return f"{Path(error.cmd[0]).name} failed: {said[0] if said else f'exit status {error.returncode}'}"
    return str(error)
