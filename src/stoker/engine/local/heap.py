"""Freed memory stays with the process.

glibc gives every large block back to the system as it is freed and asks for it again at the next layer: an update of
SmolLM2 in bfloat16 had a million pages mapped and cleared, a third of its time; steps of a model of 0.9 million
weights took half as long with this. The price is a heap with holes: of that small model 440 to 520 MiB at the peak
instead of 284; that update of SmolLM2, whose weights and states outweigh the rest, peaked where it had.
"""

import ctypes
import os
import sys
from functools import cache

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of malloc.h
_NEVER, _PAD_BYTES = 2**31 - 1, 4 * 2**20
_CHOSEN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")
"""What glibc reads as a process starts."""


@cache
def keep_freed_memory() -> None:
    """From now on, in this process. Nothing changes where malloc is another than glibc's, or where the environment has
    settings for it: `MALLOC_MMAP_THRESHOLD_=131072` is for the least memory.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _CHOSEN):
        return
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _PAD_BYTES)):
            adjust(option, value)
