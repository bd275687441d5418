"""Number and word problems that SmolLM2-135M-Instruct solves a third of the time, so that RL has something to lift.

Two solved problems in front show the form, "9 + 2 = 11": short answers, checked by their last number
(reward `math` with the form `last_number`). Run files name it as `examples/arithmetic.py:problems`.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

SYSTEM = "Write one equation."
SHOWN = (("Jo has 9 cups and buys 2 more. How many now?", "9 + 2 = 11"), ("What is 6 * 3?", "6 * 3 = 18"))
NAMES = ("Tom", "Anna", "Ben", "Mia", "Sam", "Lily", "Max", "Emma")
THINGS = ("apples", "books", "coins", "cards", "pens", "shells", "eggs", "stamps")

Problem = tuple[str, int]


def plus(rng: random.Random) -> Problem:
    """A two-digit and a one-digit number."""
    a, b = rng.randint(10, 40), rng.randint(2, 9)
    return f"What is {a} + {b}?", a + b


def minus(rng: random.Random) -> Problem:
    """A two-digit less a one-digit number."""
    a, b = rng.randint(10, 40), rng.randint(2, 9)
    return f"What is {a} - {b}?", a - b


def gets(rng: random.Random) -> Problem:
    """An addition told as a story."""
    a, b = rng.randint(3, 30), rng.randint(2, 9)
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    return f"{name} has {a} {things} and gets {b} more. How many now?", a + b


def gives(rng: random.Random) -> Problem:
    """A subtraction told as a story."""
    a, b = rng.randint(10, 30), rng.randint(2, 9)
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    return f"{name} has {a} {things} and gives away {b}. How many are left?", a - b


def boxes(rng: random.Random) -> Problem:
    """A multiplication told as a story."""
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    things = rng.choice(THINGS)
    return f"There are {a} boxes with {b} {things} each. How many {things}?", a * b


KINDS: dict[str, Callable[[random.Random], Problem]] = {
    "plus": plus,
    "minus": minus,
    "gets": gets,
    "gives": gives,
    "boxes": boxes,
}


def messages(question: str) -> list[dict[str, str]]:
    """The conversation that ends with the question."""
    turns = [{"role": "system", "content": SYSTEM}]
    for shown, equation in SHOWN:
        turns += [{"role": "user", "content": shown}, {"role": "assistant", "content": equation}]
    return [*turns, {"role": "user", "content": question}]


def problems(count: int = 1000, seed: int = 0) -> Iterator[dict[str, Any]]:
    """`count` different problems of all kinds in turn: {"prompt": messages, "answer": "13", "kind": "gets"}."""
    rng = random.Random(seed)
    seen: set[str] = set()
    misses = 0
    while len(seen) < count:
        kind = list(KINDS)[len(seen) % len(KINDS)]
        question, answer = KINDS[kind](rng)
        if question in seen:
            misses += 1
            if misses > 100 * count:
                raise ValueError(f"there are fewer than count = {count} different problems of kind '{kind}'")
            continue
        seen.add(question)
        yield {"prompt": messages(question), "answer": str(answer), "kind": kind}
