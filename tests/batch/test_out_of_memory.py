import pytest
import torch

from stoker.batch.out_of_memory import is_out_of_memory


def test_a_real_allocation_that_fails() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), RuntimeError("MPS backend out of memory (..)")],
)
def test_out_of_memory(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("expected m1 and m2 to have the same dtype"),
        ValueError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_anything_else_is_not(error: BaseException) -> None:
    assert not is_out_of_memory(error)
