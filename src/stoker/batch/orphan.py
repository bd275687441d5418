"""A process that ends with the one that started it, however that one ends."""

import ctypes
import os
import signal
import sys

__all__ = ["end_with"]

_PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with(parent: int) -> None:
    """From now on this process is killed when `parent`, which started it, is gone, even where that was killed itself.

    Linux; on other systems nothing happens, and only the deadline of what the process does ends it.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)
