"""Batches of a data set's longest examples: what a size has to stand, wherever in the data they lie."""

from collections.abc import Callable, Sequence
from typing import Any

from stoker.errors import DataError

__all__ = ["LongestExamples"]


class LongestExamples:
    """A target's `make_batch` from its data set: `LongestExamples(rows, collate, length=lambda row: len(row["ids"]))`.

    All lengths are read once, the last example's too: a long one that comes late in an epoch is in every batch here.
    A batch of `size` holds the `size` longest. `collate` makes of them what the loss takes, on the model's device.
    Memory taken is as long as that of any training batch where examples are padded to the longest or packed.
    """

    def __init__(
        self, examples: Sequence[Any], collate: Callable[[list[Any]], Any], length: Callable[[Any], int] = len
    ) -> None:
        """`length`: tokens of one example. DataError where there are none."""
        if not len(examples):
            raise DataError("the data set has no examples: there is no batch to try")
        lengths = [length(examples[place]) for place in range(len(examples))]
        self._examples, self._collate = examples, collate
        self._order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
        self.longest = lengths[self._order[0]]
        """Tokens of the longest example: for `fit(..., longest=...)`."""
        self.most = len(lengths)
        """Examples in the data set: for `Target(most=...)`."""

    def __call__(self, size: int) -> Any:
        """DataError beyond the data set."""
        if size > self.most:
            raise DataError(f"a batch of {size} examples is larger than the data set, which has {self.most}")
        return self._collate([self._examples[place] for place in self._order[:size]])
