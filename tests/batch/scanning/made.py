"""Arms by hand: what trainings would have shown."""

import math
from collections.abc import Sequence

from stoker.batch.loading import LoaderOptions
from stoker.batch.scanning.arms import Arm
from stoker.batch.scanning.described import Described, Equal
from stoker.batch.trainings.history import Evaluation, History
from stoker.batch.trainings.setting import Setting

SAMPLES = 1024


def history(setting: Setting, final: float, seconds: float = 0.01, evaluations: int = 4, rate: float = 0.1) -> History:
    """Falls evenly from 2 to the final loss; an infinite one diverges at the second update."""
    made = History(setting, "examples")
    size = setting.examples_per_update
    updates = SAMPLES // size
    for update in range(1, updates + 1):
        if math.isinf(final) and update == 2:
            made.note(update * size, math.nan, 1.0, rate, seconds, 0.0)
            made.ended = "diverged: loss nan at update 2"
            break
        loss = 2 + (final - 2) * update / updates if math.isfinite(final) else 2.0
        made.note(update * size, loss, 1.0, rate * setting.rate_factor, seconds, seconds / 10)
        if update * evaluations % updates == 0 and math.isfinite(final):
            figures = {"accuracy": 1 - loss / 4}
            made.evaluations.append(Evaluation(update * size, update, update * seconds, loss, figures))
    return made


def arm(size: int, finals: Sequence[float], seconds: float = 0.01, factor: float = 1.0) -> Arm:
    """One training for each final loss."""
    settings = [Setting(size, base_examples=16, rate_factor=factor, seed=seed) for seed in range(len(finals))]
    return Arm(tuple(history(each, final, seconds) for each, final in zip(settings, finals, strict=True)))


def equal(seeds: int = 3) -> Equal:
    """What the arms share."""
    target = Described("examples", "cpu", 9, "SGD", "sgd", {"lr": 0.1, "momentum": 0.9})
    return Equal(target, SAMPLES, 4, tuple(range(seeds)), LoaderOptions())
