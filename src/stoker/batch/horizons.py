"""Learning-rate schedules by samples seen, so that a batch that changes leaves them where they are. No torch here."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from stoker.errors import ConfigError

__all__ = ["Decay", "Horizon"]

Decay = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Horizon:
    """A rate that rises linearly over `warmup_samples`, then falls from its peak to its end at `samples`."""

    samples: float
    """Of the whole training: epochs x examples."""
    warmup_samples: float = 0
    decay: Decay = "cosine"
    final_fraction: float = 0.0
    """Of the peak, at the end of a decay and from there on."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.samples) and self.samples > 0):
            raise ConfigError(f"samples = {self.samples}: how many the whole training sees, more than 0")
        if not 0 <= self.warmup_samples <= self.samples:
            raise ConfigError(f"warmup_samples = {self.warmup_samples:g}: from 0 to samples = {self.samples:g}")
        if not 0 <= self.final_fraction <= 1:
            raise ConfigError(f"final_fraction = {self.final_fraction:g}: from 0 to 1")
        if self.decay not in get_args(Decay):
            raise ConfigError(f"decay = {self.decay!r}: one of {', '.join(get_args(Decay))}")

    def rate(self, peak: float, samples_seen: float) -> float:
        """Of the update that ends with `samples_seen` samples trained on (its own included)."""
        if samples_seen < self.warmup_samples:
            return peak * samples_seen / self.warmup_samples
        if self.decay == "constant" or self.samples <= self.warmup_samples:
            return peak
        progress = min(1.0, (samples_seen - self.warmup_samples) / (self.samples - self.warmup_samples))
        share = 1 - progress if self.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return peak * (self.final_fraction + (1 - self.final_fraction) * share)
