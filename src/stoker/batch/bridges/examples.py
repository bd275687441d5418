"""Examples of data sets made for other libraries: how long one is, and whether the longest can be found."""

from collections.abc import Mapping, Sized
from typing import Any

from stoker.errors import DataError

__all__ = ["extent", "readable"]


def extent(example: Any) -> int:
    """How many numbers (or characters) an example holds, in whatever it is made of."""
    if hasattr(example, "numel"):
        return int(example.numel())
    if hasattr(example, "size") and isinstance(example.size, int):  # numpy
        return example.size
    if isinstance(example, str | bytes):
        return len(example)
    if isinstance(example, Mapping):
        return sum(map(extent, example.values()))
    if isinstance(example, list | tuple):
        plain = not example or isinstance(example[0], int | float)
        return len(example) if plain else sum(map(extent, example))
    if hasattr(example, "__dict__"):
        return sum(map(extent, vars(example).values()))
    return 1


def readable(data: Any) -> Any:
    """A map-style data set as it is. DataError for a stream, whose longest examples aren't known."""
    if not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
        raise DataError(
            f"a {type(data).__name__} can't be read by place, so its longest examples aren't known: give a data set "
            "with a length, or write a stoker.batch.Target whose make_batch makes examples of the greatest length"
        )
    return data
