"""From points, line and knees to a verdict: which size, what limits it, what to do. Pure, without torch."""

from collections.abc import Mapping, Sequence
from typing import Literal

from stoker.batch.curve import AGREE, RESOLUTION, SPENT, STEEP, Fit, Knee, Zone, zone
from stoker.batch.swept import DATA_BOUND, Account, Point, Verdict

__all__ = [
    "HEADROOM", "TILE", "Ended", "accounts", "dominated", "judge", "memory_allows", "operating", "own_peaks",
    "quantised", "recommend", "zone_at",
]  # fmt: skip

HEADROOM = 0.10
"""Of the device's memory, left for fragmentation and the longest batch."""
TILE = 0.03
"""Above the line of other sizes by more, and by more than noise: the device's tiles are filled badly."""
LOW_SHARE = 0.25
"""Of peak or bandwidth: a flat curve that far under both limits isn't the batch's doing."""

Ended = Literal["memory", "largest", "spent", "time"]
"""Why the sweep ended: no more memory, the largest allowed, several doublings that gained nothing, steps too long."""


def zone_at(size: float, fitted: Fit, knee: Knee) -> Zone:
    """Flat from the knee on; below it by what the line says of a doubling."""
    if knee.size is not None and size >= knee.size:
        return "flat"
    return "steep" if fitted.gain(size) > STEEP else "gradual"


def recommend(fitted: Fit, knee: Knee, seconds: Mapping[int, float], most: int | None) -> int | None:
    """Of the measured sizes within `AGREE` doublings of the knee, and of memory, the one best against the line."""
    if knee.size is None:
        return None
    near = [s for s in seconds if 2**-AGREE <= s / knee.size <= 2**AGREE and (most is None or s <= most)]
    if not near:
        allowed = [size for size in seconds if most is None or size <= most]
        return min(allowed, key=lambda size: abs(size - knee.size)) if allowed else None  # type: ignore[operator]
    return min(near, key=lambda size: (round(seconds[size] / fitted.seconds(size) / TILE), size))


def quantised(fitted: Fit, seconds: Mapping[int, float], noise: Mapping[int, float], sizes: Sequence[int]) -> list[int]:
    """Those of the sizes that take plainly longer than the line."""
    return [size for size in sizes if seconds[size] / fitted.seconds(size) - 1 > TILE + 3 * noise[size]]


def dominated(seconds: Mapping[int, float], ladder: Sequence[int]) -> list[int]:
    """Sizes between those of the ladder that take as long as a larger one of it: tiles round them up."""

    def beaten(size: int) -> bool:
        return any(seconds[each] <= seconds[size] * (1 + RESOLUTION) for each in ladder if each > size)

    return [size for size in seconds if size not in ladder and beaten(size)]


def own_peaks(peaks: Mapping[int, int | None]) -> dict[int, int | None]:
    """By size: None where it is above a larger size's. A process's resident memory stays what a larger size, measured
    before, has made it.
    """
    own: dict[int, int | None] = {}
    least: float = float("inf")
    for size in sorted(peaks, reverse=True):
        peak = peaks[size]
        own[size] = peak if peak is not None and peak <= least else None
        least = min(least, least if peak is None else peak)
    return own


def memory_allows(sizes: Sequence[int], peaks: Sequence[int | None], capacity: int | None) -> int | None:
    """The size at which a line through the last two measured peaks reaches the capacity less headroom."""
    known = [(size, peak) for size, peak in zip(sizes, peaks, strict=True) if peak is not None]
    if capacity is None or len(known) < 2:
        return None
    (s1, p1), (s2, p2) = known[-2:]
    if p2 <= p1:
        return None
    return int(s2 + (capacity * (1 - HEADROOM) - p2) * (s2 - s1) / (p2 - p1))


def operating(recommended: int | None, points: Sequence[Point], capacity: int | None) -> tuple[int, int] | None:
    """Sizes that spend throughput and fit with headroom; a peak that isn't known is taken to fit, as it ran."""
    fits = [
        p.size for p in points if p.peak_bytes is None or capacity is None or p.peak_bytes <= capacity * (1 - HEADROOM)
    ]
    if recommended is None or not fits or max(fits) < recommended:
        return None
    return recommended, max(fits)


def judge(
    points: Sequence[Point],
    fitted: Fit,
    knee: Knee,
    nearly_free_to: float | None,
    ended: Ended,
    studied: Point,
    unit: str,
) -> Verdict:
    """What rules: first a loader that is waited for, then methods that disagree, then where on the curve this is."""
    last = points[-1].size
    if studied.data is not None and studied.data.waited > DATA_BOUND:
        share = studied.data.waited
        return Verdict(
            "data-bound",
            f"Data-bound: at {studied.size:,} {unit} {share:.0%} of the step waits for the loader; mend that first, a "
            f"larger batch only waits longer. The device itself {_knee_words(knee, last, unit)}.",
        )
    if not knee.agree:
        return Verdict(
            "undetermined",
            f"Undetermined: the two ways to find the knee disagree ({knee.why}). Measure on a quieter device or at "
            "more sizes before trusting either.",
        )
    if knee.size is not None:
        low = _far_from_limits(studied)
        return Verdict(
            "saturated",
            f"Saturated from about {knee.size:,.3g} {unit}: beyond it a doubling gains less than {SPENT:.0%}, so "
            f"convergence alone should decide{low}.",
        )
    if ended == "memory":
        gain = fitted.gain(last)
        return Verdict(
            "memory-limited",
            f"Memory-limited: at {last:,} {unit}, the largest that runs, a doubling would still gain {gain:.0%}. Free "
            "memory (lower precision, activation checkpointing, a smaller optimizer state) to go on.",
        )
    if nearly_free_to is not None and nearly_free_to >= last:
        return Verdict(
            "launch-bound",
            f"Launch-bound: up to {last:,} {unit} a doubling hardly takes longer, so the step is the cost of issuing "
            "it. Raise the batch, or compile the model (CUDA graphs) so that fewer launches do the same.",
        )
    return Verdict(
        "rising",
        f"Still rising at {last:,} {unit}, the largest tried: a doubling gains {fitted.gain(last):.0%} there "
        f"({zone(fitted.gain(last))}).",
    )


def accounts(points: Sequence[Point], fitted: Fit, present: Point, unit: str) -> tuple[Account, ...]:
    """Whether to raise the batch from the present size: what throughput says, and what this sweep can't say."""
    best = max((point for point in points if point.size >= present.size), key=lambda point: point.rate)
    left, limit = best.rate / present.rate - 1, fitted.asymptote / present.rate - 1
    largest = present.size == max(point.size for point in points)
    measured = "no larger size was measured" if largest else "no larger size was measured faster"
    if left > 0:
        measured = f"{left:.0%} more throughput was measured at {best.size:,}"
    # Where a measured size lies above the line's own limit, the line bounds nothing.
    bound = f"; no size would give more than {limit:.0%}" if max(left, 0) < limit < 100 else ""
    unseen = "A sweep of step times doesn't see it."
    return (
        Account(
            "throughput left to gain",
            "yes" if left > SPENT else "not measured" if largest and limit > SPENT else "no",
            f"From {present.size:,} {unit}, {measured}{bound}.",
        ),
        Account("gradient already smooth", "not measured", unseen),
        Account("learning rate to change", "not measured", unseen),
    )


def _knee_words(knee: Knee, last: int, unit: str) -> str:
    if not knee.agree:
        return "has no knee that two methods agree on"
    if knee.size is None:
        return f"isn't saturated at {last:,}"
    return f"saturates from about {knee.size:,.3g} {unit}"


def _far_from_limits(point: Point) -> str:
    shares = [share for share in (point.share_of_peak, point.share_of_bandwidth) if share is not None]
    if not shares or max(shares) >= LOW_SHARE:
        return ""
    return (
        f"; yet it uses {max(shares):.0%} of what the device can do, so the room left is in the operators (fusion, "
        "larger products, fewer small ones), not in the batch"
    )
