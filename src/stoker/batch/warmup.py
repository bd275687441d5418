"""A watch over the gradient's norm while the learning rate rises: ends a run whose rate is about to be too high."""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.errors import CheckpointError, ConfigError, RunError

__all__ = ["WarmupWatch", "running_median"]

NORMS_REMEMBERED = 64
NORMS_NEEDED = 8
"""Updates before a running median of the gradient norm means anything."""
NORMS_TOLD = 20


def running_median(past: Sequence[float]) -> float | None:
    """Of past gradient norms; None where there are too few for it to mean anything."""
    return statistics.median(past) if len(past) >= NORMS_NEEDED else None


class WarmupWatch:
    """Call it with every update's gradient norm, before clipping; it raises where the warm-up goes wrong.

    A fault of the learning rate shows late in a linear warm-up, when the rate is no longer tiny, so the whole of it is
    watched: the first twenty steps of three hundred reach 7 % of the rate.
    """

    def __init__(self, warmup_samples: float, *, ratio: float = 5.0) -> None:
        """`ratio`: how many running medians (of the last 64 norms) a norm may have."""
        if not warmup_samples >= 0:
            raise ConfigError(f"warmup_samples = {warmup_samples}: 0 or more")
        if not ratio > 1:
            raise ConfigError(f"ratio = {ratio}: more than 1, as many running medians are let pass")
        self._warmup_samples, self._ratio = warmup_samples, ratio
        self._past: deque[float] = deque(maxlen=NORMS_REMEMBERED)
        self.first: list[float] = []
        """The norms of the first 20 updates."""

    def __call__(self, norm: float, samples_seen: float) -> None:
        """`samples_seen`: this update's own included. Nothing is watched beyond the warm-up.

        RunError where the norm isn't finite or is over `ratio` times its running median.
        """
        norm = float(norm)
        if samples_seen > self._warmup_samples:
            return
        reached = f"at {samples_seen / self._warmup_samples:.0%} of the peak learning rate" if samples_seen else ""
        if not math.isfinite(norm):
            raise RunError(
                f"stopped in the warm-up {reached}: the gradient norm is {norm}. Lower the peak learning rate, and "
                "look for a division by zero or an overflow (fp16 without a loss scaler) in the loss"
            )
        median = running_median(self._past)
        if median is not None and norm > self._ratio * median:
            raise RunError(
                f"stopped in the warm-up {reached}: the gradient norm {norm:.3g} is "
                f"{norm / median:.3g} times its running median {median:.3g}, more than "
                f"{self._ratio:g}. Lower the peak learning rate (halve it), make the warm-up longer than "
                f"{self._warmup_samples:,.0f} samples, or look at this batch; WarmupWatch(ratio=...) lets more pass"
            )
        if norm:  # 0: nothing in the batch had anything to teach
            self._past.append(norm)
        if len(self.first) < NORMS_TOLD:
            self.first.append(norm)

    def __str__(self) -> str:
        """The first norms, one line."""
        return f"gradient norms of the first {len(self.first)} updates: " + " ".join(f"{n:.3g}" for n in self.first)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: plain lists of floats."""
        return {"past": list(self._past), "first": list(self.first)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """CheckpointError where it isn't one of a watch."""
        if set(state) != {"past", "first"}:
            raise CheckpointError(f"a warm-up watch's state has 'past' and 'first', not {sorted(state)}")
        self._past = deque(map(float, state["past"]), maxlen=NORMS_REMEMBERED)
        self.first = [float(norm) for norm in state["first"]]
