"""The least time that a machine needs for a phase, and how cost grows: arithmetic alone."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from stoker.batch.flops import Work

__all__ = ["Answer", "Limits", "Sequences", "cache_elements", "exponent"]


@dataclass(frozen=True)
class Limits:
    """What a device was measured to do."""

    flops: float
    """FLOP/s of its fastest matrix product."""
    bandwidth: float
    """Bytes/s that a copy reads and writes."""

    def seconds(self, flops: float, moved: float) -> float:
        """Arithmetic and memory traffic can overlap: the slower of the two decides."""
        return max(flops / self.flops, moved / self.bandwidth)


@dataclass(frozen=True)
class Answer:
    """One sampled sequence: whose prompt, and how many tokens of each."""

    prompt: str
    prompt_tokens: int
    tokens: int


@dataclass(frozen=True)
class Sequences:
    """Answers decoded side by side, and the sizes of their model."""

    answers: Sequence[Answer]
    work: Work
    element_bytes: int
    cache_elements: int
    """Of keys and values, that a token adds over all layers."""

    def seconds(self, limits: Limits) -> float:
        """Each distinct prompt once, then a step for each position, of the answers that are still growing.

        A step reads the weights once, the keys and values of each prompt once for its group, and those of each answer.
        """
        prompts = {answer.prompt: answer.prompt_tokens for answer in self.answers}
        prefill = sum(self.work.prefill(tokens) for tokens in prompts.values())
        total = limits.seconds(prefill, self._weight_bytes())
        for step in range(1, max((answer.tokens for answer in self.answers), default=0)):
            live = [answer for answer in self.answers if answer.tokens > step]
            flops = sum(self.work.decode(answer.prompt_tokens + step - 1) for answer in live)
            shared = sum(prompts[name] for name in {answer.prompt for answer in live})
            cached = (shared + step * len(live)) * self.cache_elements * self.element_bytes
            total += limits.seconds(flops, self._weight_bytes() + cached)
        return total

    def _weight_bytes(self) -> int:
        return (self.work.linear + self.work.head + self.work.adapters) * self.element_bytes


def cache_elements(config: Any) -> int:
    """Of a text config: keys and values of one token over all layers."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    return 2 * int(config.num_hidden_layers) * groups * int(width)


def exponent(points: Iterable[tuple[float, float]]) -> dict[str, float]:
    """Slope of log y over log x by least squares, with its standard error (0 where two points leave none to tell)."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    middle = mean(x for x, _ in logs), mean(y for _, y in logs)
    spread = sum((x - middle[0]) ** 2 for x, _ in logs)
    slope = sum((x - middle[0]) * (y - middle[1]) for x, y in logs) / spread
    rest = sum((y - middle[1] - slope * (x - middle[0])) ** 2 for x, y in logs)
    error = math.sqrt(rest / (len(logs) - 2) / spread) if len(logs) > 2 else 0.0
    return {"exponent": round(slope, 3), "error": round(error, 3)}
