"""A task that a small model learns in minutes: the sum of two numbers."""

import random
from collections.abc import Iterator

__all__ = ["problems"]


def problems(digits: int = 2, count: int = 2000, seed: int = 0) -> Iterator[dict[str, str]]:
    """`count` different problems such as {"prompt": "12+34=", "answer": "46"}, with numbers of `digits` digits.

    Raises ValueError where there are fewer problems than `count`.
    """
    low, high = 10 ** (digits - 1), 10**digits
    there_are = (high - low) ** 2
    if not 0 < count <= there_are:
        raise ValueError(f"{digits}-digit numbers make {there_are} different sums, not count = {count}")
    for code in random.Random(seed).sample(range(there_are), count):
        a, b = divmod(code, high - low)
        yield {"prompt": f"{a + low}+{b + low}=", "answer": str(a + b + 2 * low)}
