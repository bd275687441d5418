"""Memory limits of the control groups a process is in, as containers and job schedulers set them on Linux.

Both kinds are read: version 1, whose memory controller has a tree of its own, and version 2, one tree for all. A group
is bound by every group around it. See cgroups(7), and memory.rst of each version in the kernel's documentation.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Limit", "limits"]

_PROCESS = Path("/proc/self")


@dataclass(frozen=True)
class Limit:
    """Bytes of one group and all groups inside it."""

    most: int
    left: int
    """Of `most`, with what the kernel would give up first: cached files."""


@dataclass(frozen=True)
class _Files:
    """What a version calls its files, and in `memory.stat` the pages of cached files."""

    most: str
    used: str
    cached: tuple[str, str]


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_V2 = _Files("memory.max", "memory.current", ("active_file", "inactive_file"))


def limits() -> list[Limit]:
    """Of this process's group and those around it, whichever have one; none where the system knows no groups."""
    found = []
    for folder, files in _folders():
        most, used = (_bytes(folder / name) for name in (files.most, files.used))
        if most is not None and used is not None:
            found.append(Limit(most, max(0, most - used + _cached(folder, files))))
    return found


def _folders() -> Iterator[tuple[Path, _Files]]:
    """The process's own group of each tree that counts memory, then those around it as far as they can be seen."""
    own: dict[_Files, Path] = {}
    for line in _lines(_PROCESS / "cgroup"):
        _, controllers, group = line.split(":", 2)
        if not controllers:
            own[_V2] = Path(group)
        elif "memory" in controllers.split(","):
            own[_V1] = Path(group)
    for line in _lines(_PROCESS / "mountinfo"):
        where, _, what = line.partition(" - ")
        root, mount = where.split()[3:5]
        kind, *_, options = what.split()
        files = {"cgroup": _V1, "cgroup2": _V2}.get(kind)
        if files is None or files not in own or (files is _V1 and "memory" not in options.split(",")):
            continue
        top, path = Path(mount), own[files]
        inside = path.relative_to(root) if path.is_relative_to(root) and ".." not in path.parts else Path()
        yield from ((top / each, files) for each in (inside, *inside.parents))


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # not on Linux, a group that has none, or one that was just removed
        return []


def _bytes(file: Path) -> int | None:
    """None: "max", or no such file, which the outermost group hasn't."""
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdigit() else None


def _cached(folder: Path, files: _Files) -> int:
    pairs = (line.split() for line in _lines(folder / "memory.stat"))
    return sum(int(value) for name, value in pairs if name in files.cached)
