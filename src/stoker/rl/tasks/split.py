"""Held-out rows, duplicates and orders, all from hashes: they depend on the text, not on where a row stands."""

import hashlib
from collections import Counter
from collections.abc import Sequence

from stoker.errors import DataError
from stoker.rl.tasks.columns import Row
from stoker.rl.types import Message

__all__ = ["count_duplicates", "hold_out", "normalised", "rank", "repeated_names", "subset"]


def rank(seed: int, *parts: object) -> bytes:
    """A number in random order, the same on every machine and in every version."""
    return hashlib.blake2b("\0".join(map(str, (seed, *parts))).encode(), digest_size=8).digest()


def normalised(content: str | tuple[Message, ...]) -> str:
    """A prompt's text for comparison: case and white space don't count."""
    text = content if isinstance(content, str) else "\0".join(f"{m['role']}\0{m['content']}" for m in content)
    return " ".join(text.casefold().split())


def count_duplicates(rows: Sequence[Row]) -> int:
    """Rows whose prompt an earlier row has too."""
    return len(rows) - len({normalised(row.content) for row in rows})


def hold_out(rows: Sequence[Row], count: int, seed: int) -> tuple[list[Row], list[Row], int]:
    """Split rows into training and `count` held-out ones; third: copies of held-out prompts, in neither.

    The held-out prompts are those with the smallest hashes. So when rows are appended, a row that was
    trained on never becomes a validation row.
    """
    first = {normalised(row.content): row for row in reversed(rows)}
    if count >= len(first):
        raise DataError(
            f"validation.holdout = {count} leaves nothing to train on: the task has {len(first)} different prompts "
            f"in {len(rows)} rows; set it below {len(first)}"
        )
    chosen = set(sorted(first, key=lambda text: rank(seed, text))[:count])
    train = [row for row in rows if normalised(row.content) not in chosen]
    held_out = [row for row in rows if normalised(row.content) in chosen and first[normalised(row.content)] is row]
    return train, held_out, len(rows) - len(train) - len(held_out)


def subset(rows: Sequence[Row], count: int, seed: int) -> list[Row]:
    """`count` rows spread over all of them, in their order; all where count is 0."""
    if not count or count >= len(rows):
        return list(rows)
    chosen = set(sorted((row.id for row in rows), key=lambda row_id: rank(seed, row_id))[:count])
    return [row for row in rows if row.id in chosen]


def repeated_names(names: Sequence[str]) -> list[str]:
    """Names that occur more than once."""
    return [name for name, times in Counter(names).items() if times > 1]
