"""Which compute dtype this machine multiplies fastest: measured, since a CPU may take bfloat16 and be slow in it.

A CPU without bfloat16 arithmetic emulates it (about a hundredth of its float32 speed was seen); one with it,
and any recent accelerator, gains two to ten times.
"""

import time

import torch

__all__ = ["fastest_dtype", "slowdown", "wasteful"]

SIZE, ROUNDS = 256, 5
GAIN = 1.2
"""bfloat16 must be faster by this factor: for less, its rounding isn't worth having."""


def fastest_dtype(device: torch.device) -> str:
    """`bfloat16` where its matrix products clearly beat float32's on this device, else `float32`. Takes under 0.2 s."""
    return "bfloat16" if slowdown("bfloat16", device) < 1 / GAIN else "float32"


def slowdown(dtype: str, device: torch.device) -> float:
    """Time of a matrix product in `dtype` over that in float32."""
    return _seconds(getattr(torch, dtype), device) / _seconds(torch.float32, device)


def wasteful(dtype: str, device: torch.device) -> str:
    """A warning where `dtype` makes this device slower than float32 would; empty where it doesn't."""
    if dtype == "float32" or (factor := slowdown(dtype, device)) < 2:
        return ""
    return (
        f"model.dtype = {dtype!r}: matrix products take {factor:.0f} times as long as in float32 on this {device.type} "
        "(it has no such arithmetic); set model.dtype = 'auto' or 'float32'"
    )


def _seconds(dtype: torch.dtype, device: torch.device) -> float:
    """The best of a few square products, in seconds."""
    factor = torch.ones(SIZE, SIZE, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        (factor @ factor)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return best
