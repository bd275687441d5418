"""Which exceptions mean that memory ran out, which may mean it, and which don't."""

import errno

import torch

__all__ = ["crash_says_out_of_memory", "is_out_of_memory", "may_be_out_of_memory"]

_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",  # Linux and macOS
    "DefaultCPUAllocator: not enough memory",  # Windows
    "MPS backend out of memory",
    "CUDA error: out of memory",  # raised outside the caching allocator
    "CUBLAS_STATUS_ALLOC_FAILED",  # no room for cuBLAS's own workspace
    "std::bad_alloc",  # C++'s own, passed on as text
)
_DOUBTFUL = (
    "could not create a",  # oneDNN: "could not create a primitive", "... a memory object": also of shapes it refuses
    "could not execute a primitive",  # oneDNN, whose scratch memory is of its own
    "can't start new thread",  # a thread's stack is memory, but threads are counted too
    "failed to map segment from shared object",  # a library that is loaded late
    "unable to mmap",
    "Cannot allocate memory",
    "error return without exception set",  # CPython, where memory ended within a failing call
)
_CRASHED = ("std::bad_alloc", "MemoryError", "Cannot allocate memory", "out of memory", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """True only where device or host memory ran out; a shape error or a CUDA fault is never read as that."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


def may_be_out_of_memory(error: BaseException) -> bool:
    """True where a library's words fit a lack of memory and other faults alike: only another run can tell."""
    return isinstance(error, RuntimeError | ImportError | OSError | SystemError) and any(
        message in str(error) for message in _DOUBTFUL
    )


def crash_says_out_of_memory(output: str) -> bool:
    """True where the last words of a process that crashed name a lack of memory."""
    return any(message in output for message in _CRASHED)
