"""Writing that survives a kill, a power cut and a full disk."""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from stoker.errors import RunError

__all__ = ["Patience", "free_bytes", "fsync_path", "gigabytes", "is_full", "when_full", "write_json", "write_text"]

T = TypeVar("T")


def _no_warning(_text: str) -> None:
    return None


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Patience:
    """How long to wait for space on a full disk before the run ends cleanly. Times in seconds."""

    deadline: float = 600.0
    pause: float = 5.0
    warn: Callable[[str], None] = _no_warning
    called_off: Callable[[], bool] = _never
    """The run was asked to stop: no longer wait."""
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.monotonic


def gigabytes(count: float) -> str:
    """Bytes as a short decimal figure: 1.24 GB, 310 MB, 12 kB."""
    for size, unit, digits in ((1e9, "GB", 2), (1e6, "MB", 0), (1e3, "kB", 0)):
        if count >= size:
            return f"{count / size:.{digits}f} {unit}"
    return f"{count:.0f} B"


def free_bytes(path: Path) -> int:
    """Bytes a user may still write on the file system that holds path (or its nearest existing parent)."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def is_full(error: BaseException) -> bool:
    """True where the disk (or the quota) is full. Libraries in Rust report it as text, not as an errno."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(text in str(error) for text in ("No space left on device", "Disk quota exceeded"))


def when_full(action: Callable[[], T], what: str, path: Path, patience: Patience) -> T:
    """Do action; while the disk is full wait and try again, and after the deadline raise RunError.

    The action must be safe to repeat. Any other exception passes through.
    """
    started = patience.now()
    warned = False
    while True:
        try:
            return action()
        except Exception as error:
            if not is_full(error):
                raise
            full: Exception = error
        left = f"{gigabytes(free_bytes(path))} free at {path}"
        waited = patience.now() - started
        if waited >= patience.deadline or patience.called_off():
            raise RunError(
                f"disk full: {what} could not be written for {waited:.0f} s ({left}). Nothing written "
                "before is lost; make room and start the run again with --resume"
            ) from full
        if not warned:
            patience.warn(
                f"disk full: {what} is waiting for space ({left}); "
                f"make room within {patience.deadline:.0f} s, or the run stops cleanly"
            )
            warned = True
        patience.sleep(patience.pause)


def fsync_path(path: Path) -> None:
    """Make a file's bytes, or a folder's names, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Replace path in one go: a reader, or a run killed midway, sees the old text or the new, never a part."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON object atomically, with `schema_version` first."""
    text = json.dumps({"schema_version": 1, **data}, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")
