"""Which exceptions mean that memory ran out, and nothing else."""

import torch

__all__ = ["is_out_of_memory"]

_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",  # Linux and macOS
    "DefaultCPUAllocator: not enough memory",  # Windows
    "MPS backend out of memory",
    "CUDA error: out of memory",  # raised outside the caching allocator
    "CUBLAS_STATUS_ALLOC_FAILED",  # no room for cuBLAS's own workspace
)


def is_out_of_memory(error: BaseException) -> bool:
    """True only where device or host memory ran out; a shape error or a CUDA fault is never read as that."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)
