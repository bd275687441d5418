"""What this device can do: measured, not looked up, so that a share of it means something."""

import math
import time
from collections.abc import Callable

import torch

__all__ = ["copy_bandwidth", "matmul_peak", "matmul_rate", "synchronize"]

SIDES = (256, 512, 1024, 2048, 4096, 8192)
"""Square products tried for the peak; the next size only where the last took less than `LONG` seconds."""
LONG = 0.1
ROUNDS = 5
"""At least: on a busy machine some of them go by undisturbed."""
COPIED_BYTES = 1 << 28
"""Far more than any cache holds."""


def matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """FLOP/s of the fastest square product found, each size given `seconds`. Draws nothing from torch's generators."""
    best = 0.0
    for side in SIDES:
        rate = matmul_rate(side, side, side, device, dtype, seconds)
        best = max(best, rate)
        if 2 * side**3 / rate > LONG:
            break
    return best


def matmul_rate(m: int, k: int, n: int, device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """FLOP/s of (m, k) @ (n, k)^T, as a linear layer multiplies: the best of repeats over `seconds`."""
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(shape, generator=generator, dtype=torch.float32).to(device, dtype) for shape in ((m, k), (n, k))
    )
    out = torch.empty(m, n, device=device, dtype=dtype)
    with torch.no_grad():
        return 2 * m * k * n / _best_seconds(lambda: torch.mm(left, right.t(), out=out), device, seconds)


def copy_bandwidth(device: torch.device, seconds: float = 0.5, size: int = COPIED_BYTES) -> float:
    """Bytes/s read and written by copying `size` bytes: what memory gives a kernel that does nothing else."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / _best_seconds(lambda: target.copy_(source), device, seconds)


def synchronize(device: torch.device) -> None:
    """Returns when the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _best_seconds(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Of one call: calls are timed in rounds of at least a hundredth of the budget, so that launches overlap."""
    work()
    once = _timed(work, device, 1)
    calls = max(1, math.ceil(seconds / 100 / max(once, 1e-7)))
    best, rounds, end = once, 0, time.perf_counter() + seconds
    while rounds < ROUNDS or time.perf_counter() < end:
        best = min(best, _timed(work, device, calls) / calls)
        rounds += 1
    return best


def _timed(work: Callable[[], object], device: torch.device, calls: int) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize(device)
    return time.perf_counter() - start
