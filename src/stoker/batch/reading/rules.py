"""From the figures of a curve to causes, each rule on its own. Pure, without torch.

The thresholds were chosen on trainings of small image classifiers and are scored on others by `bench.curves`.
"""

import math
from collections.abc import Iterator

from stoker.batch.reading.found import Cause, Finding
from stoker.batch.reading.measured import Measured

__all__ = ["TINY", "findings", "larger_batch", "set_rate"]

BURST = 1.02
"""Losses over the first, beyond what noise explains: a training that works hardly rises above its start."""
NORM_BURST, NORM_BURST_STUCK = 15.0, 3.0
"""Gradient norms over the first or the median; less where the loss ends where it began."""
STUCK = 0.06
"""Share of the first loss: where less is gone, hardly anything was learnt."""
STUCK_Z = 3.0
"""Standard errors: a fall that can't be told from noise is none."""
LITTLE, LITTLE_FLAT = 0.20, 0.50
"""Share of the first loss that is gone, and of the updates after which it was: little learnt, and soon no more."""
RISE, RISE_Z = 0.10, 4.0
"""Of the fall, at the end, above the lowest stretch."""
HELD_ROUGH = 0.06
"""Scatter of held-out losses over their fall."""
LATE, LATE_Z = 0.12, 2.5
"""Of the fall, in the last quarter of the learning rate spent: 0.25 where it is even."""
FEW = 64
"""Updates that are few for a whole training."""
VERY_FEW = 24
"""Updates that no whole training has to spare."""
SMOOTH = 0.6
"""Cosine of neighbouring gradients from which noise hardly matters."""
NO_SIGNAL = 0.12
"""Cosine of neighbouring gradients below which they share nothing."""
TINY = 4
"""Examples per update that are too few where a curve is rough or wild."""
SINGLE, SINGLE_NOISE = 2, 0.2
"""Examples per update of which single losses scatter over more than this share of the whole fall."""
TAIL = 0.25
"""Share of the updates at less than a thirtieth of the highest rate; a cosine has 0.12, a line 0.03."""
GAP, GAP_Z = 0.045, 4.0
"""Training losses above held-out ones, over the fall."""
SPIKY = 4
"""Tenths of a wild training with losses that stand out: a rate that is too high has them at its beginning."""
STEP, STEP_Z = 0.10, 4.5
"""A rise from one stretch to the next, over the fall."""


def findings(seen: Measured, rate: float, finished: bool = True) -> list[Finding]:
    """The likeliest first. `rate`: the highest that was set; NaN where it isn't known."""
    found: dict[Cause, Finding] = {}
    for each in (*_bad_data(seen), *_wild(seen, rate), *_slow(seen, rate), *_flat(seen, rate), *_noisy(seen)):
        if each.cause not in found or each.confidence > found[each.cause].confidence:
            found[each.cause] = each
    if finished and seen.updates <= VERY_FEW and "batch too large" not in found:
        words = f"{seen.updates} updates in all, too few to settle anything"
        found["batch too large"] = Finding(
            "batch too large",
            words,
            _where(seen, 0, 1),
            0.5,
            set_batch(seen, 1 / 8, "more updates from the same samples"),
        )
    return sorted(found.values(), key=lambda each: -each.confidence)


def set_rate(rate: float, factor: float, words: str) -> str:
    """A line of a configuration."""
    number = f"{rate * factor:.2g}" if math.isfinite(rate) else f"{factor:.2g} x the present"
    return f"learning_rate = {number}  ({words})"


def set_batch(seen: Measured, factor: float, words: str) -> str:
    """A line of a configuration."""
    return f"examples_per_update = {max(1, round(seen.examples * factor)):,}  ({words})"


def larger_batch(examples: int) -> str:
    """A line of a configuration, for a batch that is too small."""
    return f"examples_per_update = {16 * examples:,}  (16 times, at the same learning rate; or a tenth of the rate)"


def _examples(count: int) -> str:
    return f"{count} example{'' if count == 1 else 's'}"


def _where(seen: Measured, start: float, end: float) -> tuple[int, int]:
    whole = seen.updates * seen.examples
    return round(start * whole), round(end * whole)


def _bad_data(seen: Measured) -> Iterator[Finding]:
    steps = _stepped(seen)
    gap = seen.gap > GAP and (steps or (seen.gap_z > GAP_Z and not _stuck(seen)))
    if not (gap or steps):
        return
    said = []
    if gap:
        said.append(
            f"training losses lie {seen.gap:.0%} of the fall above held-out ones, though both are of the same weights"
        )
    if steps:
        said.append(f"the loss goes up a step of {seen.step:.0%} of its fall within a twentieth of the training")
    where = "the rows in the stretches where it is high" if steps else "the rows with the highest losses"
    yield Finding(
        "bad data", "; ".join(said), _where(seen, 0.5, 1), 0.9 if gap else 0.75,
        f"data: look at {where} (labels, units, encoding), and shuffle; with dropout or augmentation, which also lift "
        "training losses, compare without" if gap else f"data: look at {where}, and shuffle",
    )  # fmt: skip


def _wild(seen: Measured, rate: float) -> Iterator[Finding]:
    """The loss or the gradients leave their range; with few examples per update it may be the noise alone."""
    stuck = _stuck(seen)
    said, strength = [], 0.0
    if seen.peak > BURST and not _stepped(seen):
        said.append(f"the loss rose to {seen.peak:.3g} times its start")
        strength = 0.75 if stuck else 0.6
    if seen.norm_peak > (NORM_BURST_STUCK if stuck else NORM_BURST):
        said.append(f"gradient norms rose to {seen.norm_peak:.3g} times their usual size")
        strength = max(strength, 0.8 if stuck else 0.55)
    if stuck and said:
        said.append(f"and {max(seen.fall, 0):.1%} of the loss is gone at the end")
    if seen.fall < -RISE:
        said.append(f"the loss ends {-seen.fall:.0%} above its start")
        strength = max(strength, 0.75)
    if seen.rise > RISE and seen.rise_z > RISE_Z and not _stepped(seen):
        said.append(f"at the end the loss stands {seen.rise:.0%} of its fall above its lowest stretch")
        strength = max(strength, 0.6)
    if seen.held_rough > HELD_ROUGH and not stuck and seen.updates > FEW:
        said.append(f"held-out losses scatter by {seen.held_rough:.0%} of their fall from one evaluation to the next")
        strength = max(strength, 0.5)
    if not said:
        return
    where = _where(seen, 0, 1)
    tiny = seen.examples <= TINY
    if tiny:
        words = f"{', '.join(said)}, at {_examples(seen.examples)} per update"
        yield Finding("batch too small", words, where, min(1.0, strength + 0.1), larger_batch(seen.examples))
    if seen.spiky >= SPIKY and not tiny:
        words = (
            f"{', '.join(said)}, and losses stand out in {seen.spiky:.0f} of 10 stretches, not at the beginning only"
        )
        yield Finding(
            "bad data", words, where, 0.4, "data: look at the batches whose loss stands out (rows out of range, labels)"
        )
    yield Finding(
        "rate too high", ", ".join(said), where, strength,
        set_rate(rate, 1 / 10 if stuck else 1 / 3, "a tenth" if stuck else "a third")
        + "; clip_norm = 1.0; watch the gradient norm, halve again where the loss rises",
    )  # fmt: skip


def _slow(seen: Measured, rate: float) -> Iterator[Finding]:
    """As fast as ever when the rate was spent, or without noise at the end: too few or too short steps."""
    few, smooth, stuck = seen.updates <= FEW, seen.agreement_end > SMOOTH, _stuck(seen)
    even = seen.late > LATE and seen.late > LATE_Z * seen.late_error
    if even and not (few or stuck) and seen.agreement < NO_SIGNAL:
        yield Finding(
            "rate too high",
            f"{seen.late:.0%} of the fall came in the last quarter of the learning rate spent, though neighbouring "
            f"gradients share nothing (cosine {seen.agreement:.2f}): it falls as the rate decays, not by going on",
            _where(seen, 0, 0.75), 0.5, set_rate(rate, 1 / 3, "a third"),
        )  # fmt: skip
        return
    if not (even or smooth or stuck) or (_burst(seen) and (stuck or not few)):
        return
    said = (
        f"{seen.late:.0%} of the fall came in the last quarter of the learning rate spent (25 % is an even fall)"
        if even
        else f"{max(seen.fall, 0):.1%} of the loss is gone"
    )
    if not math.isnan(seen.norm_end):
        said += f"; gradients at the end are {seen.norm_end:.2g} times the first"
    if not math.isnan(seen.agreement):
        said += f", and neighbouring ones agree by {seen.agreement_end:.2f}"
    where = _where(seen, 0 if stuck else 0.6, 1)
    strength = 0.7 if even and stuck else 0.55 if stuck and seen.agreement_end < NO_SIGNAL else 0.6
    if seen.rate_tail > TAIL:
        strength = 0.45  # the rate was there, and was taken away
    if few or smooth or (even and not stuck and seen.examples >= 4 * TINY):
        words = f"{said}; {seen.updates:,} updates in all" + (", and hardly any noise between them" if smooth else "")
        yield Finding(
            "batch too large", words, where, strength + (0.15 if few else -0.05) if few or smooth else 0.35,
            set_batch(seen, 1 / 8 if few else 1 / 2, "more updates from the same samples; the rate by rescale()"),
        )  # fmt: skip
    if _burst(seen):  # wild and slow at once: no rate is too low that did that
        return
    factor = 10 if stuck else 3
    yield Finding("rate too low", said, where, strength, set_rate(rate, factor, f"{factor} times"))


def _stepped(seen: Measured) -> bool:
    return seen.step > STEP and seen.step_z > STEP_Z


def _stuck(seen: Measured) -> bool:
    little = seen.fall < LITTLE and seen.flat < LITTLE_FLAT
    return seen.fall < STUCK or seen.fall_z < STUCK_Z or little


def _burst(seen: Measured) -> bool:
    return seen.peak > BURST or seen.norm_peak > (NORM_BURST_STUCK if _stuck(seen) else NORM_BURST)


def _flat(seen: Measured, rate: float) -> Iterator[Finding]:
    if seen.rate_tail > TAIL:
        yield Finding(
            "plateau",
            f"the last {seen.rate_tail:.0%} of the updates ran at under a thirtieth of the highest rate",
            _where(seen, 1 - seen.rate_tail, 1), 0.85,
            "decay: over all samples of the training (stoker.batch.Horizon(samples)), down to a tenth of the rate",
        )  # fmt: skip
    elif _stuck(seen) and not _burst(seen):
        said = f"{max(seen.fall, 0):.1%} of the loss is gone after {seen.updates:,} updates"
        if nothing := seen.agreement_end < NO_SIGNAL:
            said += f", and neighbouring gradients share nothing at the end (cosine {seen.agreement_end:.2f})"
        yield Finding(
            "plateau", said, _where(seen, 0, 1), 0.75 if nothing else 0.5,
            "model: look for units that give the same for every input (first weights, saturation, a detached or frozen "
            "part), then " + set_rate(rate, 10, "10 times"),
        )  # fmt: skip


def _noisy(seen: Measured) -> Iterator[Finding]:
    share = seen.noise / (seen.first - seen.last) if seen.first > seen.last else math.inf
    if seen.examples <= SINGLE and share > SINGLE_NOISE:
        yield Finding(
            "batch too small",
            f"losses of single updates scatter by {share:.0%} of the whole fall, at {_examples(seen.examples)} each"
            if math.isfinite(share)
            else f"no fall shows through the scatter of single updates, at {_examples(seen.examples)} each",
            _where(seen, 0.67, 1), 0.8 if _stuck(seen) else 0.5, larger_batch(seen.examples),
        )  # fmt: skip
