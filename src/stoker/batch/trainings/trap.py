"""The multi-device trap: a batch that is right on one device is, on all of them together, too large to train well.

With the batch of a device kept, more devices make the global batch larger: at equal samples there are fewer updates.
Judged from trainings that were measured, paired by seed; it trains nothing. No torch here.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, stdev
from typing import Any, Literal

from stoker.batch.scaling import rate_factor
from stoker.batch.scope import Scope
from stoker.batch.student import quantile
from stoker.errors import ConfigError

__all__ = ["Difference", "Measured", "Trap", "judge_trap"]

TOLERANCE = 0.02
"""Of the smaller batch's loss: a loss that is higher by less is none."""
SAME = 1e-3
"""Of the loss: two ways to compute one gradient may differ by so much, through rounding that updates carry on."""

State = Literal["holds", "doesn't hold", "not enough evidence"]


@dataclass(frozen=True)
class Measured:
    """Trainings on equal samples with one setting, one for each seed."""

    scope: Scope
    losses: tuple[float, ...]
    """Of held-out data at the end, in the order of the seeds; infinite where one diverged."""
    rate: float = 1.0
    """Of the learning rate that was right for `base_examples`."""
    name: str = ""
    """What else is special about it (a schedule, say)."""

    @property
    def examples(self) -> int:
        """Per update, over all ranks."""
        return self.scope.examples_per_update

    @property
    def loss(self) -> float:
        """The mean."""
        return mean(self.losses)

    def __str__(self) -> str:
        scope = self.scope
        made = f"{scope.examples_per_microbatch} x {scope.microbatches_per_update} x {scope.data_parallel_ranks}"
        return self.name or f"{made} = {self.examples} at {self.rate:.3g} x the rate"


@dataclass(frozen=True)
class Difference:
    """Of two measured, seed by seed."""

    mean: float
    low: float
    high: float
    """Of the mean, by Student's t, 95 %."""

    @property
    def surely_more(self) -> bool:
        return self.low > 0

    def __str__(self) -> str:
        return f"{self.mean:+.4g} ({self.low:+.4g} to {self.high:+.4g})"


@dataclass(frozen=True)
class Trap:
    """Made by `judge_trap`."""

    state: State
    smaller: Measured
    larger: Measured
    worse: Difference | None
    """The larger global batch's loss over the smaller's; None: fewer than two seeds, or one diverged."""
    same: tuple[tuple[Measured, float], ...]
    """The larger global batch made in other ways, and how far its losses are at most from the larger's, relatively."""
    cures: tuple[tuple[Measured, Difference | None, float], ...]
    """The larger global batch trained otherwise: what its loss is lower by, and the share of what was lost."""
    proposals: tuple[str, ...]
    words: str

    def to_json(self) -> dict[str, Any]:
        """Plain types."""

        def plain(one: Measured) -> dict[str, Any]:
            return asdict(one) | {"scope": one.scope.to_json(), "loss": one.loss, "told": str(one)}

        return {
            "state": self.state,
            "smaller": plain(self.smaller),
            "larger": plain(self.larger),
            "worse": self.worse and asdict(self.worse),
            "same": [plain(one) | {"apart": apart} for one, apart in self.same],
            "cures": [plain(one) | {"better": better and asdict(better), "share": s} for one, better, s in self.cures],
            "proposals": list(self.proposals),
            "words": self.words,
        }

    def __str__(self) -> str:
        lines = [f"Multi-device trap {self.state}: {self.words}"]
        for one, apart in self.same:
            verdict = (
                "the same gradient, which cures nothing" if apart <= SAME else "which should be the same: look why"
            )
            lines.append(f"  {one}: loss {one.loss:.4g}, at most {apart:.1e} apart; {verdict}")
        for one, better, share in self.cures:
            told = "recovers" if better is not None and better.surely_more else "doesn't surely recover"
            by = "" if better is None else f", {better} lower"
            lines.append(f"  {one}: loss {one.loss:.4g}{by}; {told} {share:.0%} of what was lost")
        return "\n".join([*lines, *(f"  try: {proposal}" for proposal in self.proposals)])


def judge_trap(
    smaller: Measured,
    larger: Measured,
    others: Sequence[Measured] = (),
    *,
    samples: int,
    base_examples: int | None = None,
    rule: Literal["linear", "sqrt"] = "linear",
) -> Trap:
    """Whether the larger global batch trains worse than the smaller at equal samples, and what to try.

    Both have the same examples per micro-batch and the same learning rate, right for `base_examples` (None: the smaller
    batch); `rule` is that of the optimizer. `others` are further trainings at the larger global batch: with the same
    rate and no name they are other ways to make it (accumulation), the rest are cures. Losses are paired by seed.

    The trap holds where the 95 % interval of the mean difference lies above 0, and doesn't where it lies below 2 % of
    the smaller batch's loss.
    """
    _check(smaller, larger, others)
    worse = _difference(larger, smaller)
    state = _state(smaller, larger, worse)
    lost = larger.loss - smaller.loss
    same = [one for one in others if one.rate == larger.rate and not one.name]
    cures = [one for one in others if one not in same]
    return Trap(
        state,
        smaller,
        larger,
        worse,
        tuple((one, _apart(one, larger)) for one in same),
        tuple((one, _difference(larger, one), (larger.loss - one.loss) / lost if lost else 0.0) for one in cures),
        _proposals(smaller, larger, samples, base_examples or smaller.examples, rule) if state == "holds" else (),
        _words(state, smaller, larger, worse),
    )


def _check(smaller: Measured, larger: Measured, others: Sequence[Measured]) -> None:
    if not smaller.examples < larger.examples:
        raise ConfigError(f"the larger global batch has {larger.examples} examples, the smaller {smaller.examples}")
    if smaller.scope.examples_per_microbatch != larger.scope.examples_per_microbatch or smaller.rate != larger.rate:
        raise ConfigError(
            "the trap is of one micro-batch and one learning rate: the two were trained with different ones"
        )
    counts = {len(one.losses) for one in (smaller, larger, *others)}
    if counts == {0} or len(counts) > 1:
        raise ConfigError(f"losses of {sorted(counts)} seeds: of each the same seeds, at least one")
    if wrong := [one for one in others if one.examples != larger.examples]:
        raise ConfigError(f"{wrong[0]} is not of {larger.examples} examples per update, as the others are to be")


def _difference(one: Measured, other: Measured) -> Difference | None:
    found = [a - b for a, b in zip(one.losses, other.losses, strict=True)]
    if len(found) < 2 or not all(map(math.isfinite, found)):
        return None
    wide = quantile(len(found) - 1) * stdev(found) / math.sqrt(len(found))
    return Difference(mean(found), mean(found) - wide, mean(found) + wide)


def _state(smaller: Measured, larger: Measured, worse: Difference | None) -> State:
    if worse is not None:
        if worse.high < TOLERANCE * smaller.loss:
            return "doesn't hold"
        return "holds" if worse.surely_more else "not enough evidence"
    diverged = [not math.isfinite(loss) for loss in larger.losses]
    sound = all(map(math.isfinite, smaller.losses))
    return "holds" if len(diverged) > 1 and all(diverged) and sound else "not enough evidence"


def _apart(one: Measured, other: Measured) -> float:
    """Where both diverged they agree."""
    return max(
        0.0 if a == b else abs(a - b) / abs(b) if math.isfinite(b) else math.inf
        for a, b in zip(one.losses, other.losses, strict=True)
    )


def _proposals(
    smaller: Measured, larger: Measured, samples: int, base: int, rule: Literal["linear", "sqrt"]
) -> tuple[str, ...]:
    factor, scope = rate_factor(rule, larger.examples / base), larger.scope
    told = [
        f"the learning rate x {factor:.3g}, which follows from {base} examples per update by the {rule} rule: "
        f"Setting({larger.examples}, base_examples={base}, rule='{rule}'), with a warm-up",
        f"the global batch small at first: Stages(({smaller.examples}, {larger.examples}), (0, {samples // 2}), "
        "by='samples')",
    ]
    at_once = smaller.examples // scope.data_parallel_ranks
    if smaller.examples % scope.data_parallel_ranks == 0 and at_once:
        told.append(
            f"the smaller global batch on the same devices: {at_once} examples per update of each rank "
            f"({scope.data_parallel_ranks} ranks x {at_once} = {smaller.examples})"
        )
    return tuple(told)


def _words(state: State, smaller: Measured, larger: Measured, worse: Difference | None) -> str:
    both = (
        f"{larger.examples} examples per update ({larger.scope.data_parallel_ranks} ranks) end at a loss of "
        f"{larger.loss:.4g}, {smaller.examples} ({smaller.scope.data_parallel_ranks} ranks) at {smaller.loss:.4g}, "
        f"over {len(larger.losses)} seeds"
    )
    if worse is not None:
        both += f"; the difference is {worse}"
    if state == "not enough evidence":
        both += "; more seeds would tell" if worse is not None or len(larger.losses) < 2 else "; some of them diverged"
    return f"{both}."
