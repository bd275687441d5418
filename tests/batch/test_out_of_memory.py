import pytest
import torch

from stoker.batch.out_of_memory import crash_says_out_of_memory, is_out_of_memory, may_be_out_of_memory


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


@pytest.mark.parametrize(
    "error", [OSError(12, "Cannot allocate memory"), RuntimeError("std::bad_alloc"), MemoryError("std::bad_alloc")]
)
def test_the_system_and_cxx_say_it_in_their_own_words(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("could not create a primitive"),
        ImportError("libopenblas.so: failed to map segment from shared object"),
        RuntimeError("can't start new thread"),
        SystemError("error return without exception set"),
    ],
)
def test_words_that_fit_other_faults_too_are_in_doubt(error: BaseException) -> None:
    assert may_be_out_of_memory(error)
    assert not is_out_of_memory(error)


def test_a_users_fault_is_not_even_in_doubt() -> None:
    assert not may_be_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not may_be_out_of_memory(ValueError("could not create a primitive"))


def test_last_words_of_a_crash() -> None:
    assert crash_says_out_of_memory("terminate called after throwing an instance of 'std::bad_alloc'")
    assert not crash_says_out_of_memory("Fatal Python error: Segmentation fault")
