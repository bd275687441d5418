"""Arrays of different lengths laid end to end, so that a step's arithmetic runs over all its rows at once.

A step may hold thousands of rows of a few tokens each, where the cost of a numpy call is that of the call.
R rows, N numbers over all of them.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["joined", "lengths", "places", "split", "sums"]

Scalar = TypeVar("Scalar", bound=np.generic)
Counts = NDArray[np.int64]


def lengths(rows: Sequence[Any]) -> Counts:
    """(R,)."""
    return np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))


def joined(rows: Sequence[NDArray[Scalar]], dtype: type[Scalar]) -> NDArray[Scalar]:
    """(N,). `dtype` is that of the rows, needed where there are none."""
    return np.concatenate([np.empty(0, dtype), *rows])


def places(counts: Counts) -> Counts:
    """(N,) the index of each number in its row: counts 3, 1 give 0 1 2 0."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def split(values: NDArray[Scalar], counts: Counts) -> list[NDArray[Scalar]]:
    """The rows again, as views."""
    return [values[start:stop] for start, stop in pairwise([0, *np.cumsum(counts).tolist()])]


def sums(values: NDArray[Any], counts: Counts) -> NDArray[np.float64]:
    """(R,) fp64 sum of each row, 0 for an empty one: to the bit what `row.sum(dtype=float64)` gives."""
    found = np.zeros(len(counts))
    filled = counts > 0
    if filled.any():
        found[filled] = np.add.reduceat(values, (np.cumsum(counts) - counts)[filled], dtype=np.float64)
    return found
