"""Micro-batches under a token budget: what one forward/backward holds.

Rows of a micro-batch are padded to its longest, so it costs rows x longest. Packing changes memory and
speed, never the gradient.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from stoker.errors import ConfigError

__all__ = ["pack", "padded_tokens"]


def pack(
    lengths: Sequence[int],
    ceiling: int,
    *,
    oversized: Literal["raise", "alone"] = "raise",
    overhead: int | None = None,
) -> list[list[int]]:
    """Row indices of each micro-batch, longest rows first, so that a lack of memory shows at once.

    `lengths` and `ceiling` count tokens, prompt and response. No micro-batch pads to more than `ceiling`.
    Without an `overhead` their number is the least possible, and among packings of that many in order of
    length the largest is as small as can be. With one, the time that a micro-batch costs on top of its
    padded tokens, as so many tokens more, the packing in order of length is the one that costs least: it
    cuts more often where that saves padding. A row longer than the ceiling raises ConfigError, or with "alone" gets a
    micro-batch of its own, the only kind that exceeds the ceiling. Deterministic: ties keep their order.
    """
    sizes = np.maximum(np.asarray(lengths, dtype=np.int64), 1)
    order = np.argsort(-sizes, kind="stable")
    too_long = [int(row) for row in order if sizes[row] > ceiling]
    if too_long and oversized == "raise":
        raise ConfigError(
            f"{len(too_long)} of {len(sizes)} rows don't fit into a micro-batch of {ceiling} tokens (row {too_long[0]} "
            f"has {sizes[too_long[0]]}): raise update.tokens_per_microbatch to at least that, or shorten the texts"
        )
    rest = order[len(too_long) :]
    cuts = _balanced(sizes[rest], ceiling) if overhead is None else _cheapest(sizes[rest], ceiling, overhead)
    return [[row] for row in too_long] + [rest[a:b].tolist() for a, b in cuts]


def padded_tokens(lengths: Sequence[int], microbatches: Sequence[Sequence[int]]) -> int:
    """Tokens computed over all micro-batches, padding included."""
    return sum(len(rows) * max(lengths[row] for row in rows) for rows in microbatches)


def _balanced(sizes: np.ndarray[tuple[int], np.dtype[np.int64]], ceiling: int) -> list[tuple[int, int]]:
    """The greedy cut at the lowest ceiling that needs no more micro-batches than the given one."""
    if not len(sizes):
        return []
    least = len(_greedy(sizes, ceiling))
    low, high = int(sizes[0]), ceiling
    while low < high:
        middle = (low + high) // 2
        if len(_greedy(sizes, middle)) > least:
            low = middle + 1
        else:
            high = middle
    return _greedy(sizes, low)


def _cheapest(sizes: np.ndarray[tuple[int], np.dtype[np.int64]], ceiling: int, overhead: int) -> list[tuple[int, int]]:
    """Ranges of the descending sizes with the least overhead and padded tokens: a shortest path over the cuts."""
    cost = np.full(len(sizes) + 1, np.iinfo(np.int64).max)  # (n + 1,) of the best packing of the rows before
    cost[0] = 0
    previous = np.zeros(len(sizes) + 1, dtype=np.int64)  # where its last micro-batch starts
    for start, longest in enumerate(sizes.tolist()):
        stops = np.arange(start + 1, min(start + ceiling // longest, len(sizes)) + 1)
        through = cost[start] + overhead + longest * (stops - start)
        better = stops[through < cost[stops]]
        cost[better], previous[better] = through[better - start - 1], start
    cuts = [len(sizes)]
    while cuts[-1] > 0:
        cuts.append(int(previous[cuts[-1]]))
    return list(pairwise(reversed(cuts)))


def _greedy(sizes: np.ndarray[tuple[int], np.dtype[np.int64]], ceiling: int) -> list[tuple[int, int]]:
    """Ranges of the descending sizes, each as many rows as fit below its first: no packing needs fewer."""
    cuts = [0]
    while cuts[-1] < len(sizes):
        cuts.append(min(cuts[-1] + ceiling // int(sizes[cuts[-1]]), len(sizes)))
    return list(pairwise(cuts))
