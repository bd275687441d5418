"""What a measurement reads: a clock, the peak of memory, how busy the processor is; of a real device or a simulated."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from stoker.batch.limits import capacity_bytes, reset_peak_resident, status_bytes
from stoker.batch.speed import synchronize
from stoker.record.memory import available_bytes

__all__ = ["Instruments", "instruments_of"]


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Instruments:
    """Functions without arguments; the defaults read nothing."""

    clock: Callable[[], float]
    """Seconds."""
    synchronize: Callable[[], None] = _nothing
    """Returns when the device has done what it was given."""
    asynchronous: bool = False
    """The host issues steps ahead of the device."""
    busy: Callable[[], float] = time.process_time
    """Processor seconds of this process, all threads."""
    reset_peak: Callable[[], object] = _nothing
    peak: Callable[[], int | None] = _nothing
    """Bytes, the most since the last reset; None where it can't be read."""
    utilisation: Callable[[], float | None] = _nothing
    """The driver's, 0 to 1: the share of time in which any kernel ran, however small. Shown, never decided by."""
    capacity: int | None = None
    """Bytes that the device has for this process; None: not known."""
    cores: int = 1
    """That this process may use."""
    survives: bool = True
    """Running out of memory raises an error, instead of the system ending the process."""


def instruments_of(device: torch.device) -> Instruments:
    """The real ones. Peak memory: CUDA's allocator; on Linux the process's resident memory; elsewhere none."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if device.type == "cuda":
        return Instruments(
            clock=time.perf_counter,
            synchronize=lambda: synchronize(device),
            asynchronous=True,
            reset_peak=lambda: torch.cuda.reset_peak_memory_stats(device),
            peak=lambda: torch.cuda.max_memory_allocated(device),
            utilisation=lambda: _cuda_utilisation(device),
            capacity=capacity_bytes(device),
            cores=cores,
        )
    if device.type != "cpu":
        return Instruments(
            clock=time.perf_counter, synchronize=lambda: synchronize(device), asynchronous=True, cores=cores
        )
    resettable = reset_peak_resident()
    return Instruments(
        clock=time.perf_counter,
        reset_peak=reset_peak_resident if resettable else _nothing,
        peak=(lambda: status_bytes("VmHWM")) if resettable else _nothing,
        capacity=_host_capacity(),
        cores=cores,
        survives=False,
    )


def _cuda_utilisation(device: torch.device) -> float | None:
    try:
        return torch.cuda.utilization(device) / 100
    except (ModuleNotFoundError, RuntimeError):  # without nvidia-ml-py, or where the driver doesn't tell
        return None


def _host_capacity() -> int:
    """What this process has and could still get: of the machine, or of its container."""
    own: int = psutil.Process().memory_info().rss
    return own + available_bytes()
