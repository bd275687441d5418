"""From the figures of a curve to causes, each rule on its own. Pure, without torch.

The thresholds were chosen on trainings of small image classifiers and are scored on others by `bench.curves`.
"""

import math
from collections.abc import Iterator

from stoker.batch.reading.found import Cause, Finding
from stoker.batch.reading.measured import Measured

__all__ = ["BURST", "LATE", "TINY", "findings", "larger_batch", "set_rate"]

BURST = 1.02
"""Losses over the first, beyond what noise explains: a training that works hardly rises above its start."""
GREAT_BURST = 1.5
"""The same where the loss came down again afterwards."""
OPPOSED = -0.35
"""Cosine of neighbouring gradients: noise alone leaves it at 0, or a little below."""
NORM_BURST = 3.0
"""Gradient norms over the first or the median, where the loss ends where it began."""
VANISHED, VANISHED_FALL = 0.35, 0.25
"""Gradient norms at the end over the first, and the share of the first loss that is gone: little learnt, and yet hardly
any gradient left."""
GREW = 2.4
"""Gradient norms over the first or the median: weights that hardly move keep theirs."""
NEARLY_ALL = 0.95
"""Share of the first loss: where more is gone, nothing was slow."""
LITTLE_FALL = 0.30
"""Share of the first loss: where less is gone, and norms are as they were, weights haven't gone far."""
NO_SIGNAL_END = 0.07
"""Cosine of neighbouring gradients at the end, below which steps are long enough to lose their direction."""
EARLY = 0.45
"""Share of the fall in the first quarter of the learning rate spent."""
STUCK = 0.06
"""Share of the first loss: where less is gone, hardly anything was learnt."""
STUCK_Z = 3.0
"""Standard errors: a fall that can't be told from noise is none."""
LITTLE, LITTLE_FLAT = 0.20, 0.50
"""Share of the first loss that is gone, and of the updates after which it was: little learnt, and soon no more."""
SOON, SOON_FALL = 0.10, 0.60
"""Share of the updates after which nothing more was learnt, and of the loss that was gone by then."""
RISE, RISE_Z = 0.10, 4.0
"""Of the fall, at the end, above the lowest stretch."""
HELD_ROUGH = 0.10
"""Scatter of held-out losses over their fall."""
LATE, LATE_Z = 0.07, 2.5
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
SINGLE, SINGLE_NOISE = 2, 0.1
"""Examples per update of which single losses scatter over more than this share of the whole fall."""
TAIL = 0.25
"""Share of the updates at less than a thirtieth of the highest rate; a cosine has 0.12, a line 0.03."""
GAP, GAP_Z, GAP_Z_STUCK = 0.045, 3.2, 4.0
"""Training losses above held-out ones, over the fall; clearer where little was learnt."""
STEP, STEP_Z = 0.15, 5.0
"""A stretch above those before and after it, over the fall."""


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
            0.72,
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
    known = seen.fall > STUCK  # over next to no fall any gap is large
    gap = known and seen.gap > GAP and (steps or seen.gap_z > (GAP_Z_STUCK if _stuck(seen) else GAP_Z))
    if not (gap or steps):
        return
    said = []
    if gap:
        said.append(
            f"training losses lie {seen.gap:.0%} of the fall above held-out ones, though both are of the same weights"
        )
    if steps:
        said.append(f"for a stretch the loss stands {seen.step:.0%} of its fall above what it was before and after")
    where = "the rows in the stretches where it is high" if steps else "the rows with the highest losses"
    yield Finding(
        "bad data", "; ".join(said), _where(seen, 0.5, 1), 0.9 if gap else 0.75,
        f"data: look at {where} (labels, units, encoding), and shuffle; with dropout or augmentation, which also lift "
        "training losses, compare without" if gap else f"data: look at {where}, and shuffle",
    )  # fmt: skip


def _wild(seen: Measured, rate: float) -> Iterator[Finding]:
    """The loss or the gradients leave their range, and it does lasting harm; a start that was recovered from is none.

    With few examples per update it may be the noise alone, and rows out of range do the same.
    """
    stuck, tiny = _stuck(seen), seen.examples <= TINY
    said, strength = _signs(seen)
    if not said:
        return
    where = _where(seen, 0, 1)
    if tiny:
        words = f"{', '.join(said)}, at {_examples(seen.examples)} per update"
        yield Finding("batch too small", words, where, min(1.0, strength + 0.1), larger_batch(seen.examples))
    else:
        words = f"{', '.join(said)}; rows out of range or a stretch of wrong ones do that too"
        if seen.spiky:
            words += f", and losses stand out in {seen.spiky:.0f} of 10 stretches"
        yield Finding("bad data", words, where, 0.45, "data: look at the batches whose loss stands out (rows, labels)")
    yield Finding(
        "rate too high", ", ".join(said), where, strength,
        set_rate(rate, 1 / 10 if stuck else 1 / 3, "a tenth" if stuck else "a third")
        + "; clip_norm = 1.0; watch the gradient norm, halve again where the loss rises",
    )  # fmt: skip


def _signs(seen: Measured) -> tuple[list[str], float]:
    """Of steps that are too long, and how sure the surest is."""
    stuck, tiny = _stuck(seen), seen.examples <= TINY
    said: list[str] = []
    strength = 0.0
    if (stuck or tiny) and seen.peak > BURST and not _stepped(seen):
        said.append(f"the loss rose to {seen.peak:.3g} times its start")
        strength = 0.75
    elif seen.peak > GREAT_BURST:
        said.append(f"the loss rose to {seen.peak:.3g} times its start, which a model seldom recovers from wholly")
        strength = 0.65
    if seen.agreement_end < OPPOSED:
        said.append(f"neighbouring gradients oppose each other (cosine {seen.agreement_end:.2f}): steps overshoot")
        strength = max(strength, 0.7)
    if stuck and seen.norm_peak > NORM_BURST:
        said.append(f"gradient norms rose to {seen.norm_peak:.3g} times their usual size")
        strength = 0.8
    if _vanished(seen):
        said.append(f"gradients shrank to {seen.norm_end:.2g} of the first, as where units were driven out of range")
        strength = max(strength, 0.7)
    if said:
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
    return said, strength


def _slow(seen: Measured, rate: float) -> Iterator[Finding]:
    """As fast as ever when the rate was spent, with gradients as at the start: too few or too short steps.

    A fall that goes on is not enough: every training that is stopped early has one, and one whose rate decays loses its
    noise last.
    """
    few, smooth, stuck = seen.updates <= FEW, seen.agreement_end > SMOOTH, _stuck(seen)
    even = seen.late > max(LATE, LATE_Z * seen.late_error) and not _moved(seen)
    if not (even or stuck) or _burst(seen) or _vanished(seen):
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
    factor = 10 if stuck else 3
    yield Finding("rate too low", said, where, strength, set_rate(rate, factor, f"{factor} times"))


def _moved(seen: Measured) -> bool:
    """The weights went far: gradients grew on the way, as curvature does, or no longer agree.

    Where neither norms nor agreements are known, a fall that was much faster at first.
    """
    if math.isnan(seen.norm_peak) and math.isnan(seen.agreement_end):
        return seen.early > EARLY
    if seen.norm_peak > GREW or seen.fall > NEARLY_ALL:
        return True
    return seen.fall >= LITTLE_FALL and seen.agreement_end < NO_SIGNAL_END


def _vanished(seen: Measured) -> bool:
    return seen.fall < VANISHED_FALL and seen.norm_end < VANISHED


def _stepped(seen: Measured) -> bool:
    return seen.step > STEP and seen.step_z > STEP_Z


def _stuck(seen: Measured) -> bool:
    little = seen.fall < LITTLE and seen.flat < LITTLE_FLAT
    return seen.fall < STUCK or seen.fall_z < STUCK_Z or little


def _burst(seen: Measured) -> bool:
    return _stuck(seen) and (seen.peak > BURST or seen.norm_peak > NORM_BURST)


def _flat(seen: Measured, rate: float) -> Iterator[Finding]:
    if seen.rate_tail > TAIL:
        yield Finding(
            "plateau",
            f"the last {seen.rate_tail:.0%} of the updates ran at under a thirtieth of the highest rate",
            _where(seen, 1 - seen.rate_tail, 1), 0.85,
            "decay: over all samples of the training (stoker.batch.Horizon(samples)), down to a tenth of the rate",
        )  # fmt: skip
    elif (_stuck(seen) or _soon_flat(seen) or _vanished(seen)) and not _burst(seen):
        said = f"{max(seen.fall, 0):.1%} of the loss is gone after {seen.updates:,} updates"
        if _soon_flat(seen):
            said += f", and all of it was after {seen.flat:.0%} of them"
        if nothing := seen.agreement_end < NO_SIGNAL:
            said += f", and neighbouring gradients share nothing at the end (cosine {seen.agreement_end:.2f})"
        yield Finding(
            "plateau", said, _where(seen, 0, 1), 0.75 if nothing and not _vanished(seen) else 0.5,
            "model: look for units that give the same for every input (first weights, saturation, a detached or frozen "
            "part), then " + set_rate(rate, 10, "10 times"),
        )  # fmt: skip


def _soon_flat(seen: Measured) -> bool:
    return seen.flat < SOON and seen.fall < SOON_FALL and not (seen.peak > BURST or seen.late > LATE)


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
