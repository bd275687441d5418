"""A batch that was raised: wild, slow, or as it should be."""

import math
from dataclasses import replace

import numpy as np

from stoker.batch.reading.raising import read_raise
from tests.batch.reading.curves import curve, even

BEFORE = curve(even(400, first=2.0, last=1.6), noise=0.02)
"""0.001 an update, of 32 examples."""


def after(last: float, *, rate: float, count: int = 200, first: float = 1.6):  # type: ignore[no-untyped-def]
    return curve(even(count, first=first, last=last), noise=0.01, examples=128, rates=[rate] * count, seed=1)


def test_a_batch_whose_rate_followed() -> None:
    """4 times the examples at 4 times the pace per update."""
    found = read_raise(BEFORE, after(0.8, rate=0.02))
    assert found.verdict == "healthy"
    assert "the first 36 losses after the change aren't judged" in found.notes[0]


def test_merely_slow_is_a_rate_that_was_not_scaled() -> None:
    found = read_raise(BEFORE, after(1.4, rate=0.01))
    assert found.causes == ("rate too low",)
    assert "25% of the pace" in found.findings[0].evidence or "24% of the pace" in found.findings[0].evidence
    assert "learning_rate = 0.02  (x sqrt(4)" in found.findings[0].change
    assert "learning_rate = 0.04  (x 4 for SGD)" in found.findings[0].change


def test_slow_at_a_scaled_rate_is_not_said_to_be_unscaled() -> None:
    assert read_raise(BEFORE, after(1.4, rate=0.04)).verdict == "healthy"


def test_divergence_goes_back_to_the_safe_rate() -> None:
    found = read_raise(BEFORE, after(3.0, rate=0.1))
    assert found.causes == ("rate too high",)
    assert "learning_rate = 0.01  (as before the change); clip_norm = 1.0" in found.findings[0].change
    assert "halve" in found.findings[0].change
    broken = after(1.6, rate=0.1)
    broken = replace(broken, losses=[*broken.losses[:5], math.nan, *broken.losses[6:]])
    assert read_raise(BEFORE, broken).causes == ("rate too high",)


def test_another_order_alone_is_no_alarm() -> None:
    """The first dozens of losses differ by far, the later ones go on."""
    made = after(0.8, rate=0.02)
    moved = np.asarray(made.losses)
    moved[:30] += np.random.default_rng(2).normal(0, 1.0, 30)
    assert read_raise(BEFORE, replace(made, losses=list(moved))).verdict == "healthy"


def test_too_little_after_the_change() -> None:
    found = read_raise(BEFORE, after(1.5, rate=0.02, count=12))
    assert found.verdict == "too little data"
