"""The noise scale of policy gradients: the unit is a prompt with its group of samples. No torch.

A prompt's samples share it, and often a baseline, so single samples aren't independent: groups are. The gradient of
P prompts has noise V(n) / P, where for groups of n samples

    V(n) = V_between + V_within / n + c / (n (n - 1)).

V_between is of what prompts differ in, V_within of the samples of one prompt, and c is there with a baseline from the
group itself (its mean, or that of the others), which is noise of its own. One n shows V_between and the sum of the
other two: two samples of one prompt multiply to |G|^2 + V_between, two of different prompts to |G|^2.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from stoker.batch.estimates.smoothed import Mean, Smoothed, require_keys
from stoker.batch.noise import NoiseEstimate, NoiseSample, NoiseScale, from_parts
from stoker.batch.tradeoff import doubling
from stoker.config.schema import RunConfig
from stoker.rl.batches import counted_tokens
from stoker.rl.types import TrainRow

__all__ = ["GroupNoise", "GroupSample", "Part", "baseline_factor", "from_groups", "parts_of", "split", "to_metrics"]

PARTS = 8
"""An update is measured in at most so many: more would know |G|^2 hardly better, and cost more."""
SMOOTHING = 0.95
"""Of about the last 40 measured updates: a policy moves fast."""
Half = Literal[0, 1]


@dataclass(frozen=True)
class Part:
    """Some of an update's groups, all of each, and the halves they are cut into."""

    halves: tuple[tuple[TrainRow, ...], tuple[TrainRow, ...]]
    shares: tuple[tuple[float, float], ...]
    """Of each of its prompts: the share that its first and its second half have in the update's mean."""

    @property
    def share(self) -> float:
        return math.fsum(share for both in self.shares for share in both)


def parts_of(rows: Sequence[TrainRow], weighting: str, most: int = PARTS) -> list[Part]:
    """An update's rows, weighed by `weighting`, in parts of whole groups, dealt in the order they came.

    The order says nothing of what was sampled, so parts are independent. A group whose advantages are all 0 is there
    with a gradient of 0: that is what it adds to the update. Samples that left count nowhere.
    """
    tokens = counted_tokens(rows).tolist()
    staying = sum(map(bool, tokens))
    groups: dict[str, list[tuple[TrainRow, float]]] = {}
    for row, counted in zip(rows, tokens, strict=True):
        if counted:
            share = 1 / staying if weighting == "fixed" else float(row.weights.sum(dtype=np.float64))
            groups.setdefault(row.sample_id.rpartition("/")[0], []).append((row, share))
    found = list(groups.values())
    count = min(most, len(found))
    cuts = [len(found) * place // count for place in range(count + 1)] if found else []
    return [_part(found[start:end]) for start, end in pairwise(cuts)]


def _part(groups: Sequence[Sequence[tuple[TrainRow, float]]]) -> Part:
    def half(which: Half) -> tuple[TrainRow, ...]:
        return tuple(row for group in groups for row, _ in group[which::2])

    def share(group: Sequence[tuple[TrainRow, float]], which: Half) -> float:
        return math.fsum(share for _, share in group[which::2])

    return Part((half(0), half(1)), tuple((share(group, 0), share(group, 1)) for group in groups))


@dataclass(frozen=True)
class GroupSample:
    """One update's unbiased look. Each may be negative."""

    noise: NoiseSample
    """With the prompt as unit: the trace is V(n)."""
    between: float | None
    """V_between; None: no prompt has two samples."""


def from_groups(
    shares: Sequence[Sequence[tuple[float, float]]],
    squared: Sequence[float],
    products: Sequence[float],
    whole: float,
    factor: float,
) -> GroupSample:
    """From parts of whole groups, k >= 2, each in two halves with half of each of its groups' samples.

    `shares` (k lists): of each prompt of a part, the shares of its halves in the update (all add up to 1). `squared`
    (k,) are the squared norms of each part's own sum in the update's gradient, `products` (k,) the products of its two
    halves, `whole` the squared norm of it all. `factor`: see `baseline_factor`.

    ConfigError for fewer than two parts.
    """
    weights = [math.fsum(share for both in part for share in both) for part in shares]
    prompts = sum(map(len, shares))
    noise = from_parts(
        [square / weight**2 for square, weight in zip(squared, weights, strict=True)],
        whole,
        [prompts * weight for weight in weights],
    )
    same = math.fsum(first * second for part in shares for first, second in part)
    if not same:
        return GroupSample(noise, None)
    pairs = math.fsum(math.fsum(a for a, _ in part) * math.fsum(b for _, b in part) for part in shares)
    own = (math.fsum(products) - noise.signal * (pairs - same)) / same
    return GroupSample(noise, own / factor - noise.signal)


def baseline_factor(config: RunConfig) -> float:
    """What E[x_1 x_2] of two samples of one prompt is of that prompt's squared gradient.

    1 where samples are independent given the prompt. With the mean of a group of n, or of the others in it, as
    baseline 1 + 1 / (n - 1)^2: each of the two is in the other's baseline. That is exact for advantages without a
    scale and weights that don't depend on a sample's length, and otherwise to a share of about 1 / n.
    """
    n, algorithm = config.sampling.samples_per_prompt, config.algorithm
    shared = not algorithm.needs_critic and algorithm.advantage in ("group", "leave_one_out")
    return 1 + 1 / (n - 1) ** 2 if shared and n > 1 else 1.0


RAW = "noise/"
"""Of the keys by which a learner tells the loop what it measured; the record has the smoothed values."""


def to_metrics(sample: GroupSample | None) -> dict[str, float]:
    """As a learner's metrics; None: there weren't two prompts to compare."""
    if sample is None:
        return {f"{RAW}trace": math.nan, f"{RAW}signal": math.nan}
    between = {} if sample.between is None else {f"{RAW}between": sample.between}
    return {f"{RAW}trace": sample.noise.trace, f"{RAW}signal": sample.noise.signal, **between}


def split(metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """A learner's metrics as (what it measured of the noise, all others)."""
    looked = {key: value for key, value in metrics.items() if key.startswith(RAW)}
    return looked, {key: value for key, value in metrics.items() if key not in looked}


class GroupNoise:
    """Smooths what the updates of a run showed. Units are prompts."""

    def __init__(self, smoothing: float = SMOOTHING) -> None:
        self._scale = NoiseScale(unit="prompts", smoothing=smoothing, every=1)
        self._split = Smoothed(2, smoothing)

    def add(self, looked: Mapping[str, float]) -> None:
        """One measured update's `to_metrics`. One that overflowed or had a single prompt is skipped, and counted."""
        trace, signal = looked[f"{RAW}trace"], looked[f"{RAW}signal"]
        between = looked.get(f"{RAW}between")
        if not all(map(math.isfinite, (trace, signal, between or 0.0))):
            self._scale.skip()
            return
        self._scale.add(NoiseSample(trace, signal))
        if between is not None:
            self._split.add((between, trace - between))

    def estimate(self) -> NoiseEstimate:
        """Of V(n), |G|^2 and the noise scale."""
        return self._scale.estimate()

    @property
    def between(self) -> Mean | None:
        """V_between; None: no update showed it."""
        return self._split.mean(0) if self._split.updates else None

    @property
    def within(self) -> Mean | None:
        """The rest of V(n), from the samples of one prompt and their baseline."""
        return self._split.mean(1) if self._split.updates else None

    def metrics(self) -> dict[str, float]:
        """`batch/noise_*`, as far as they are known."""
        found = self.estimate()
        known = {"trace": found.trace, "signal": found.signal, "between": self.between, "within": self.within}
        metrics = {f"batch/noise_{name}": mean.value for name, mean in known.items() if mean is not None}
        if found.scale is not None and found.scale.interval is not None:
            low, high = found.scale.interval
            metrics |= {"batch/noise_scale": found.scale.value}
            metrics |= {"batch/noise_scale_low": low, "batch/noise_scale_high": high}
        return metrics

    def summary(self, prompts_per_update: float) -> list[str]:
        """In words: the scale, what a doubling would do, and where the noise comes from."""
        found = self.estimate()
        lines = [str(found)]
        if found.scale is not None and found.scale.value > 0:
            what = doubling(prompts_per_update, found.scale.value, interval=found.scale.interval, unit="prompts")
            lines.append(f"prompts per update {what}")
        if self.between is not None and self.within is not None:
            lines.append(f"of tr(Sigma), {self.between} is between prompts and {self.within} within their groups")
        return lines

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep, in plain types."""
        return {"scale": self._scale.state_dict(), "split": self._split.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, to the bit. ConfigError for one of another layout."""
        require_keys(state, self.state_dict(), "of a noise meter")
        self._scale.load_state_dict(state["scale"])
        self._split.load_state_dict(state["split"])
