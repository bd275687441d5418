"""From an efficiency candidate and a quality candidate to one batch. Pure, without torch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stoker.batch.scanning.arms import Apart, Arm, tell_apart
from stoker.batch.scanning.efficiency import Efficiency
from stoker.batch.scanning.rate_scan import RateScan
from stoker.batch.scope import largest_divisor

__all__ = ["Conclusion", "conclude", "wants_rates"]

Kind = Literal["agree", "accumulate", "rate", "irreconcilable", "quality", "undetermined", "diverged"]
"""One batch serves both; the update of quality in micro-batches of efficiency; efficiency's with another learning rate;
neither does it; throughput told nothing, so quality decides; losses told nothing; all diverged.
"""


@dataclass(frozen=True)
class Conclusion:
    """What to set; None: nothing can be said."""

    kind: Kind
    examples_per_update: int | None
    examples_per_microbatch: int | None
    rate_factor: float | None
    """Of the learning rate that the rule gives."""
    words: str

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        return asdict(self)


def wants_rates(arms: Sequence[Arm], apart: Apart | None, found: Efficiency) -> Arm | None:
    """The arm whose learning rate is to be scanned: the efficiency candidate, where it is larger than the losses keep;
    the smallest, where all diverged. None: nothing to reconcile by a rate.
    """
    if apart is None:
        return arms[0]
    if apart.half_width is None or found.size is None:
        return None
    kept = [_size(arms[number]) for number in apart.kept]
    return next(arm for arm in arms if _size(arm) == found.size) if found.size > max(kept) else None


def conclude(
    arms: Sequence[Arm], apart: Apart | None, found: Efficiency, rates: RateScan | None, unit: str
) -> Conclusion:
    """The batch that serves both, or why none does. `rates`: of the efficiency candidate, where it was scanned."""
    if apart is None:
        return _diverged(arms, rates)
    best = arms[apart.best]
    if apart.half_width is None:
        return Conclusion(
            "undetermined", None, None, None,
            f"Undetermined: the lowest held-out loss is at {_size(best):,}, by one seed, which can't tell batches "
            "apart. Give three seeds or more.",
        )  # fmt: skip
    kept = [arms[number] for number in apart.kept]
    sizes = [_size(arm) for arm in kept]
    quality = f"{_list(sizes)} {'keep' if len(sizes) > 1 else 'keeps'} the held-out loss"
    if found.size is None:
        largest = kept[-1]
        return _take(
            "quality", largest, largest.setting.microbatch,
            f"Throughput told nothing ({found.why}); {quality}, so {_size(largest):,} {unit} per update is the "
            "largest to take.",
        )  # fmt: skip
    chosen = next(arm for arm in arms if _size(arm) == found.size)
    if found.size in sizes:
        return _take(
            "agree", chosen, chosen.setting.microbatch,
            f"Take {found.size:,} {unit} per update: throughput is spent there ({found.why}), and {quality}.",
        )  # fmt: skip
    if found.size < max(sizes):
        target = next(arm for arm in kept if _size(arm) > found.size)
        fits = largest_divisor(_size(target), min(found.size, target.setting.microbatch))
        return _take(
            "accumulate", target, fits,
            f"Take {_size(target):,} {unit} per update, accumulated from micro-batches of {fits:,}: {quality}, while "
            f"the device needs no more than {found.size:,} at once ({found.why}). It is the same update in less "
            "memory.",
        )  # fmt: skip
    return _larger_than_kept(arms, apart, chosen, kept, found, rates, unit)


def _larger_than_kept(
    arms: Sequence[Arm],
    apart: Apart,
    chosen: Arm,
    kept: Sequence[Arm],
    found: Efficiency,
    rates: RateScan | None,
    unit: str,
) -> Conclusion:
    largest, worse = kept[-1], apart.differences[arms.index(chosen)]
    tuned = None if rates is None else rates.best
    lost = "diverged" if not chosen.whole else f"ends {worse:.3g} worse than {_size(arms[apart.best]):,}"
    if tuned is not None:
        compared = tell_apart([*(arm.losses for arm in arms), tuned.losses])
        if compared is not None and len(arms) in compared.kept:
            ends = "lower than any other" if compared.best == len(arms) else "which isn't told from the best"
            return _take(
                "rate", tuned, tuned.setting.microbatch,
                f"Take {_size(tuned):,} {unit} per update at a learning rate of {tuned.learning_rate:.4g} (the rule's "
                f"x {tuned.setting.rate_factor:.3g}): with the rule's it {lost}, with this one it ends at "
                f"{tuned.mean:.4g}, {ends}. Throughput wants it ({found.why}). Only its rate was tuned: the others' "
                "follow the rule.",
            )  # fmt: skip
    place, last = [arms.index(arm) for arm in (largest, chosen)]
    slower = 1 - found.rates[place] / found.rates[last]
    tried = "no rate that was tried closes the gap" if tuned is not None else "every rate that was tried diverges"
    return _take(
        "irreconcilable", largest, largest.setting.microbatch,
        f"Irreconcilable here: throughput wants {_size(chosen):,} {unit} per update ({found.why}), which {lost}, and "
        f"{tried}. Take {_size(largest):,}, {slower:.0%} slower, and close the gap elsewhere: an architecture that "
        "fills the device with fewer examples (larger or fused operators, compiled), or augmentation and "
        "regularisation that let the larger batch generalise. Accumulation doesn't help: it makes the same update.",
    )  # fmt: skip


def _diverged(arms: Sequence[Arm], rates: RateScan | None) -> Conclusion:
    words = "At every batch a training diverged"
    if rates is None or rates.best is None:
        return Conclusion("diverged", None, None, None, f"{words}: lower the learning rate, or warm up.")
    best = rates.best
    return Conclusion(
        "diverged", None, None, None,
        f"{words}. At {_size(best):,} a learning rate of {best.learning_rate:.4g} (the rule's x "
        f"{best.setting.rate_factor:.3g}) doesn't: lower the base rate as much, and scan again.",
    )  # fmt: skip


def _take(kind: Kind, arm: Arm, microbatch: int, words: str) -> Conclusion:
    return Conclusion(kind, _size(arm), microbatch, arm.setting.rate_factor, words)


def _size(arm: Arm) -> int:
    return arm.setting.examples_per_update


def _list(sizes: Sequence[int]) -> str:
    words = [f"{size:,}" for size in sizes]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
