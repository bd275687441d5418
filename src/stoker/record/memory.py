"""How much memory this process has used and the machine has left."""

import resource
import sys
from pathlib import Path

import psutil

__all__ = ["address_space_left", "available_bytes", "group_bytes_left", "peak_resident_bytes"]

_NO_LIMIT = 2**62
"""Control groups of the first kind write a number above this."""


def peak_resident_bytes() -> int:
    """Largest resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in kB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_bytes() -> int:
    """Memory that the machine can still give this process; in a container what that has left, where it is less."""
    return int(min([psutil.virtual_memory().available, *group_bytes_left()]))


def group_bytes_left(mounted: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """What each control group of this process that has a limit can still take: its own and those above it.

    Beyond it the kernel ends a process of the group, whatever the machine has free. Empty where there are none.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return []
    found = []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if not controllers:
            root, names = mounted, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = mounted / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = root / place.lstrip("/")
        found += [_left(each, *names) for each in (folder, *folder.parents) if each.is_relative_to(root)]
    return [left for left in found if left is not None]


def _left(group: Path, limit: str, used: str, freed: str) -> int | None:
    """`freed`: of its statistics, what of its use is files that the kernel drops first."""
    try:
        most, taken = (group / limit).read_text().strip(), int((group / used).read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:  # no such group here, or one without a limit
        return None
    if not most.isdigit() or int(most) >= _NO_LIMIT:
        return None
    return max(0, int(most) - taken + int(statistics.get(freed, 0)))


def address_space_left() -> int | None:
    """What a limit on this process's address space (`ulimit -v`) leaves it; None: there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else max(0, limit - psutil.Process().memory_info().vms)
