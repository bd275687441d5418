"""A trial's memory limit, real on each kind of device, and the peak under it.

On a CPU the limit is on the process's address space. It is counted from what the process has when it has loaded torch
and nothing of the target's: libraries and thread stacks are mapped by then, and are no memory that a target takes.
On CUDA it is on what torch's caching allocator may take from the device; the device's own end is real as well.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from stoker.errors import ConfigError

__all__ = ["Meter", "capacity_bytes", "limited", "reset_peak_resident", "status_bytes", "warm_up"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def warm_up() -> None:
    """Start what every training starts, so that it isn't counted as the target's.

    The thread pool, autograd, and what an optimizer's first step imports: libraries of 70 MiB of address space.
    """
    weight = torch.nn.Parameter(torch.ones(256, 256))
    optimizer = torch.optim.AdamW([weight])
    torch.autograd.backward((weight @ weight).sum())
    optimizer.step()


def capacity_bytes(device: torch.device) -> int | None:
    """What this process could take on a CUDA device, what it has already included; None on other devices."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


class Meter:
    """Peak memory from its making on: bytes over what the process had then."""

    def __init__(self, *, fresh: bool) -> None:
        """`fresh`: nothing of the target's has been in this process. Where it has, a CPU's peak is of resident memory,
        which can be counted anew; that of the address space can't.
        """
        self.fresh = fresh
        self._before = status_bytes("VmSize" if fresh else "VmRSS")
        if not fresh and self._before is not None:
            reset_peak_resident()

    def peak_bytes(self, device: torch.device) -> int | None:
        """None where it can't be measured."""
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        peak = status_bytes("VmPeak" if self.fresh else "VmHWM")
        return None if peak is None or self._before is None or device.type != "cpu" else peak - self._before

    @contextlib.contextmanager
    def limited(self, device: torch.device, limit_bytes: int | None) -> Iterator[None]:
        """Within, memory ends at the limit. MemoryError at once where it is exceeded already."""
        if device.type == "cpu" and limit_bytes is not None and self.fresh:
            peak = self.peak_bytes(device)
            if peak is not None and peak > limit_bytes:
                raise MemoryError(f"making the target took {peak:,} bytes, the limit is {limit_bytes:,}")
        with limited(device, limit_bytes, self._before if self.fresh else None):
            yield


@contextlib.contextmanager
def limited(device: torch.device, limit_bytes: int | None, counted_from: int | None = None) -> Iterator[None]:
    """Within, memory ends at the limit; afterwards it ends where it did.

    `counted_from`: bytes of address space that are not counted; None: what there is now. ConfigError where the device
    knows no limit.
    """
    if limit_bytes is None:
        yield
    elif device.type == "cuda":
        before = torch.cuda.get_per_process_memory_fraction(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / _total(device)), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, device)
    elif device.type == "cpu" and sys.platform == "linux":
        import resource  # not on Windows

        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        uncounted = counted_from if counted_from is not None else status_bytes("VmSize") or 0
        wanted = min(uncounted + limit_bytes, sys.maxsize)  # the most that the system takes for a number
        known = [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([wanted, *known]), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    else:
        raise ConfigError(
            f"limit_bytes = {limit_bytes}: memory can be limited on CUDA devices and, on Linux, on the CPU, not on "
            f"'{device.type}' under {sys.platform}; leave it out"
        )


def _total(device: torch.device) -> int:
    _, total = torch.cuda.mem_get_info(device)
    return total


def reset_peak_resident() -> bool:
    """Linux's high-water mark (VmHWM) becomes what is resident now; False where there is none or it mayn't be."""
    try:
        _CLEAR.write_text("5", encoding="ascii")  # proc(5)
    except OSError:
        return False
    return True


def status_bytes(key: str) -> int | None:
    """A line of this process's status, in bytes; None where the system has no such file."""
    try:
        text = _STATUS.read_text(encoding="ascii")
    except FileNotFoundError:
        return None
    found = [line.split()[1] for line in text.splitlines() if line.startswith(f"{key}:")]
    return int(found[0]) * 1024 if found else None
