"""How much memory this process has used and the machine has left."""

import resource
import sys

import psutil

__all__ = ["address_space_left", "available_bytes", "peak_resident_bytes"]


def peak_resident_bytes() -> int:
    """Largest resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in kB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_bytes() -> int:
    """Memory that the machine can still give."""
    return int(psutil.virtual_memory().available)


def address_space_left() -> int | None:
    """What a limit on this process's address space (`ulimit -v`) leaves it; None: there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else max(0, limit - psutil.Process().memory_info().vms)
