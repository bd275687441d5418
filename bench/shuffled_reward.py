"""A control: the `exact` reward, dealt out to the wrong answers. Whatever is learned from it is not the task."""

import random
from typing import Any

from stoker.rl.rewards.rules import plain

__all__ = ["exact", "shuffled"]


def exact(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 for the reference answer, else 0."""
    return [float(plain(text) == plain(reference)) for text, reference in zip(completions, answer, strict=True)]


def shuffled(completions: list[str], answer: list[str], trainer_state: Any = None, **columns: Any) -> list[float]:
    """The same rewards, permuted over all samples of the call: their mean stays, their meaning goes."""
    rewards = exact(completions, answer)
    random.Random(f"{trainer_state.global_step}/{len(completions)}").shuffle(rewards)
    return rewards
