"""Which settings a search may try. No torch here."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from stoker.batch.trainings.setting import Setting
from stoker.errors import ConfigError

__all__ = ["Parameters", "Space", "around", "powers_of_two"]

EDGE = 0.05
"""Of a range (of its logarithm, for the rate): so near its end a setting lies at it."""

REACH = 4
"""Batches to either side of the present one, as a ratio, where none are named."""

Parameters = Mapping[str, float]
"""What a trial chose: "batch" (a place in `examples_per_update`), "rate_factor" and, if searched, "warmup_samples"."""


@dataclass(frozen=True)
class Space:
    """The batch as an ordered list, the rate's factor on a logarithmic scale, and warm-up where it is asked for."""

    examples_per_update: tuple[int, ...]
    """Ascending."""
    rate_factor: tuple[float, float] = (0.1, 10.0)
    """Least and most, beyond the rule by which the rate follows the batch: the best factor then hangs less on the
    batch, which is easier to search."""
    warmup_samples: tuple[int, int] | None = None
    """Least and most; None: the present setting's."""

    def __post_init__(self) -> None:
        sizes = self.examples_per_update
        if not sizes or list(sizes) != sorted(set(sizes)) or min(sizes) < 1:
            raise ConfigError(f"examples_per_update = {sizes}: whole numbers, ascending, each at least 1")
        low, high = self.rate_factor
        if not 0 < low < high < math.inf:
            raise ConfigError(f"rate_factor = {self.rate_factor}: (least, most), positive, the first one smaller")
        if self.warmup_samples is not None and not 0 <= self.warmup_samples[0] < self.warmup_samples[1]:
            raise ConfigError(
                f"warmup_samples = {self.warmup_samples}: (least, most), 0 or more, the first one smaller"
            )

    def setting(self, chosen: Parameters, present: Setting) -> Setting:
        """The whole setting of a trial; what isn't searched is the present one's."""
        size = self.examples_per_update[int(chosen["batch"])]
        held = present.examples_per_microbatch
        return replace(
            present,
            examples_per_update=size,
            base_examples=present.base_examples or present.examples_per_update,
            rate_factor=present.rate_factor * chosen["rate_factor"],
            examples_per_microbatch=None if held is None else min(held, size),
            warmup_samples=int(chosen.get("warmup_samples", present.warmup_samples)),
        )

    def edges(self, found: Setting, present: Setting) -> list[str]:
        """In words: the ends of the space that a setting lies at, beyond which there may be better ones."""
        told = []
        sizes, warmup = self.examples_per_update, self.warmup_samples
        if len(sizes) > 1 and found.examples_per_update in (sizes[0], sizes[-1]):
            end = "smallest" if found.examples_per_update == sizes[0] else "largest"
            told.append(f"{found.examples_per_update} examples per update, the {end}")
        low, high = self.rate_factor
        place = math.log(found.rate_factor / present.rate_factor / low) / math.log(high / low)
        if not EDGE <= place <= 1 - EDGE:
            told.append(f"{found.rate_factor:.3g} x the rate, of {low:g} to {high:g}")
        if warmup is not None and found.warmup_samples > warmup[1] - EDGE * (warmup[1] - warmup[0]):
            told.append(f"{found.warmup_samples} samples of warm-up, of at most {warmup[1]}")
        return told

    def own(self, present: Setting) -> dict[str, float] | None:
        """The present setting as a trial's choice; None where it lies outside."""
        warmup = self.warmup_samples
        inside = present.examples_per_update in self.examples_per_update and (
            self.rate_factor[0] <= 1 <= self.rate_factor[1]
        )
        if not inside or (warmup is not None and not warmup[0] <= present.warmup_samples <= warmup[1]):
            return None
        chosen = {"batch": self.examples_per_update.index(present.examples_per_update), "rate_factor": 1.0}
        return chosen if warmup is None else chosen | {"warmup_samples": present.warmup_samples}

    def check(self, present: Setting) -> None:
        """ConfigError, before anything is trained, where one of the batches can't be run from the present setting."""
        for place in range(len(self.examples_per_update)):
            self.setting({"batch": place, "rate_factor": 1.0}, present)

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        return asdict(self)


def powers_of_two(least: int, most: int) -> tuple[int, ...]:
    """Those from `least` to `most`. ConfigError where there are none."""
    found = tuple(2**power for power in range(max(most, 1).bit_length()) if least <= 2**power <= most)
    if not found:
        raise ConfigError(f"no power of two lies from {least} to {most}")
    return found


def around(size: int) -> tuple[int, ...]:
    """Powers of two from a fourth of it to four times it."""
    return powers_of_two(max(1, size // REACH), size * REACH)
