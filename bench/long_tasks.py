"""Tasks for `bench.vs_trl`: long prompts before short questions, and short prompts that ask for long answers."""

import random
from collections.abc import Iterator
from typing import Any

from examples.arithmetic import NAMES, THINGS, problems

LINES = 34
"""Of notes before the question: with it about 512 tokens of SmolLM2's."""


def long_prompts(count: int = 500, seed: int = 0) -> Iterator[dict[str, Any]]:
    """The problems of `examples/arithmetic.py` behind a page of notes that say nothing of them."""
    rng = random.Random(seed)
    for row in problems(count, seed):
        notes = [f"{rng.choice(NAMES)} keeps {rng.randint(100, 999)} {rng.choice(THINGS)}." for _ in range(LINES)]
        *before, question = row["prompt"]
        asked = {"role": "user", "content": " ".join(notes) + " " + question["content"]}
        yield {**row, "prompt": [*before, asked]}


def stories(count: int = 500, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Requests for long stories. Their answer is the number in the title, so that the same reward serves."""
    rng = random.Random(seed)
    for n in range(count):
        text = f"Write a very long story about {rng.choice(NAMES)} and {n} {rng.choice(THINGS)}, in many chapters."
        yield {"prompt": [{"role": "user", "content": text}], "answer": str(n)}
