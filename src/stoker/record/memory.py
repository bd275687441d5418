"""How much memory this process has used and what there is for it: of the machine, within what a container allows."""

import resource
import sys

import psutil

from stoker.record import groups

__all__ = ["address_space_left", "available_bytes", "peak_resident_bytes", "total_bytes"]


def peak_resident_bytes() -> int:
    """Largest resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in kB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_bytes() -> int:
    """Memory that can still be had: of the machine, or of a control group (a container, a job) that has less left."""
    return min([int(psutil.virtual_memory().available), *(limit.left for limit in groups.limits())])


def total_bytes() -> int:
    """Memory of the machine, or the limit of a control group where that is less."""
    return min([int(psutil.virtual_memory().total), *(limit.most for limit in groups.limits())])


def address_space_left() -> int | None:
    """What a limit on this process's address space (`ulimit -v`) leaves it; None: there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else max(0, limit - psutil.Process().memory_info().vms)
