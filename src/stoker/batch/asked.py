"""Whether a batch maker gives what it is asked for: what a size takes is else said of another."""

import math
from typing import Any

from stoker.batch import nest
from stoker.errors import DataError, RunError

__all__ = ["Shapes", "alone", "check_growth", "check_size", "numbers", "shapes_of"]

Shapes = list[tuple[tuple[int, ...], str]]
"""Of every tensor of a batch: its lengths and its dtype's name."""


def shapes_of(batch: Any) -> Shapes:
    """Of all tensors in it."""
    return [(tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")) for leaf in nest.tensors(batch)]


def numbers(shapes: Shapes) -> int:
    """How many there are in the batch."""
    return sum(math.prod(shape) for shape, _ in shapes)


def alone(instead: str) -> str:
    """A hint for the error of a training on one example; what fails for other reasons fails at every size."""
    return f"one example alone may be what fails (BatchNorm refuses it): then {instead}"


def check_size(shapes: Shapes, size: int, longest: int | None, unit: str) -> None:
    """DataError where no tensor is as long as the size, or none has the length `longest` beside its examples."""
    lengths = {length for shape, _ in shapes for length in shape}
    if shapes and max(lengths, default=0) < size:
        raise DataError(
            f"make_batch({size}) gave tensors of {[list(shape) for shape, _ in shapes]}: fewer than {size} {unit}; "
            "it must give as many as it is asked for, or say by `most` how many there are"
        )
    if longest is not None and longest not in {length for shape, _ in shapes for length in shape[1:]}:
        raise DataError(
            f"make_batch({size}) gave tensors of {[list(shape) for shape, _ in shapes]}, none of the longest length, "
            f"{longest}: a size that fits shorter examples fails on the day a long one comes; see "
            "stoker.batch.longest"
        )


def check_growth(one: tuple[int, int], other: tuple[int, int], unit: str) -> None:
    """Of two sizes and the numbers in their batches. RunError where twice the size brought no more.

    A batch maker that stops at what it has would let every size run. Padding may make near sizes equal.
    """
    few, many = sorted([one, other])
    if few[1] and many[0] >= 2 * few[0] and many[1] <= few[1]:
        raise RunError(
            f"make_batch gave {many[1]:,} numbers for {many[0]} {unit} and {few[1]:,} for {few[0]}: "
            "it must give as many as it is asked for, or say by `most` how many there are"
        )
