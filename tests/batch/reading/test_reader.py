"""Each cause in a curve drawn with it, and nothing in curves without."""

import math
from dataclasses import replace

import numpy as np
import pytest

from stoker.batch.reading.curve import Curve
from stoker.batch.reading.found import Reading
from stoker.batch.reading.reader import read_curve
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Plan, train_anew
from stoker.errors import ConfigError
from tests.batch.reading.curves import burst, curve, even, falling
from tests.batch.trainings_targets import regression


@pytest.mark.parametrize("seed", range(5))
def test_a_fall_that_slows_down_is_healthy(seed: int) -> None:
    found = read_curve(curve(falling(), seed=seed))
    assert found.verdict == "healthy" and found.findings == ()
    assert "nothing in these curves" in str(found)


def test_an_even_fall_is_a_rate_that_is_too_low() -> None:
    found = read_curve(curve(even()))
    assert found.causes[0] == "rate too low"
    assert "25 % is an even fall" in found.findings[0].evidence
    assert "learning_rate = 0.03  (3 times)" in found.findings[0].change
    assert found.figures["late"] == pytest.approx(0.25, abs=0.05)


def test_a_decayed_rate_explains_a_fall_that_slows_down() -> None:
    """Even by the rate spent, not by samples."""
    count = 400
    rates = [0.01 * (1 - i / count) for i in range(count)]
    level = 2.3 - 0.5 * np.cumsum(rates) / sum(rates)
    assert read_curve(curve(level, rates=rates, noise=0.02)).causes[0] == "rate too low"


def test_few_smooth_updates_are_a_batch_that_is_too_large() -> None:
    found = read_curve(curve(even(40), noise=0.002, examples=4096, agreement=0.9))
    assert found.causes == ("batch too large", "rate too low")
    assert "examples_per_update = 512" in found.findings[0].change
    few = curve(falling(20, times=20), noise=0.001, agreement=0.0)
    assert read_curve(few).causes == ("batch too large",)
    assert read_curve(few, finished=False).verdict == "healthy"


def test_a_burst_is_a_rate_that_is_too_high() -> None:
    norms = np.ones(400)
    norms[2:12] = 200.0
    found = read_curve(curve(burst(), norms=norms))
    assert found.causes[0] == "rate too high"
    assert "learning_rate = 0.001  (a tenth); clip_norm = 1.0" in found.findings[0].change
    assert "200 times their usual size" in found.findings[0].evidence


def test_a_burst_that_was_recovered_from_is_a_note() -> None:
    level = falling()
    level[2:12] = 2.3 * 1.3
    found = read_curve(curve(level))
    assert found.verdict == "healthy" and any("came back: a warm-up or clip_norm" in note for note in found.notes)
    level[2:12] = 2.3 * 3
    assert read_curve(curve(level)).causes[:2] == ("rate too high", "bad data")


def test_gradients_that_oppose_each_other() -> None:
    found = read_curve(curve(falling(), agreement=-0.5))
    assert found.causes[0] == "rate too high" and "(cosine -0.50): steps overshoot" in found.findings[0].evidence


def test_gradients_that_vanish_while_little_is_learnt() -> None:
    level = falling(first=2.3, last=2.0, times=40)
    norms = np.where(np.arange(400) < 20, 1.0, 0.1)
    found = read_curve(curve(level, noise=0.02, norms=norms))
    assert found.causes[:2] == ("rate too high", "plateau")
    assert "gradients shrank to 0.1 of the first" in found.findings[0].evidence


def test_a_late_fall_where_weights_went_far_is_a_note() -> None:
    level = even(last=1.2)
    assert read_curve(curve(level)).causes[0] == "rate too low"
    norms = np.where(np.arange(400) // 40 == 3, 4.0, 1.0)
    grown = read_curve(curve(level, norms=norms))
    assert grown.verdict == "healthy" and any("more samples would help" in note for note in grown.notes)
    assert read_curve(curve(level, agreement=0.0)).verdict == "healthy"
    bare = replace(curve(level), gradient_norms=(), agreements=())
    assert read_curve(bare).causes[0] == "rate too low"


def test_nothing_more_after_the_first_tenth() -> None:
    found = read_curve(curve(falling(first=2.3, last=1.5, times=60), agreement=0.2))
    assert found.causes == ("plateau",) and "of it was after" in found.findings[0].evidence


def test_a_loss_that_rises_at_the_end() -> None:
    level = falling()
    level[300:] += np.linspace(0, 0.8, 100)
    assert read_curve(curve(level)).causes[0] == "rate too high"


def test_one_example_per_update() -> None:
    found = read_curve(curve(np.full(400, 2.3), noise=1.0, examples=1, agreement=0.01))
    assert found.causes[0] == "batch too small"
    assert "examples_per_update = 16" in found.findings[0].change
    wild = read_curve(curve(burst(height=60), noise=0.3, examples=2))
    assert wild.causes[:2] == ("batch too small", "rate too high")


def test_training_losses_above_held_out_ones_are_bad_data() -> None:
    made = curve(falling())
    clean = [(updates, loss - 0.3) for updates, loss in made.held_out]
    found = read_curve(replace(made, held_out=clean))
    assert found.causes[0] == "bad data"
    assert "above held-out ones" in found.findings[0].evidence


def test_steps_are_stretches_of_bad_data() -> None:
    level = falling(600)
    level[320:380] += 1.0
    level[450:500] += 1.0
    found = read_curve(curve(level, held=False))
    assert found.causes[0] == "bad data" and "for a stretch the loss stands" in found.findings[0].evidence


def test_plateaus() -> None:
    rates = [0.01] * 100 + [1e-5] * 300
    level = falling(400, times=4)
    level[100:] = level[100]
    faded = read_curve(curve(level, rates=rates))
    assert faded.causes[0] == "plateau" and "75%" in faded.findings[0].evidence
    dead = read_curve(curve(np.full(400, 2.3), agreement=0.0))
    assert dead.causes[0] == "plateau" and "share nothing" in dead.findings[0].evidence


@pytest.mark.parametrize(
    ("examples", "causes"), [(32, ("rate too high", "bad data")), (2, ("batch too small", "rate too high"))]
)
def test_a_training_that_broke(examples: int, causes: tuple[str, ...]) -> None:
    losses = [2.3, 2.5, 40.0, math.nan]
    found = read_curve(Curve(losses, examples, gradient_norms=[1.0, 5.0, 900.0, 1.0]))
    assert found.causes[:2] == causes
    assert "at update 4" in found.findings[0].evidence and "900 times the first" in found.findings[0].evidence


def test_a_first_loss_that_is_not_finite_is_no_fault_of_the_rate() -> None:
    assert read_curve(Curve([math.inf, 1.0], 32)).causes == ("bad data",)


def test_too_little_and_what_was_missing() -> None:
    found = read_curve(Curve([2.0] * 11, 32))
    assert found.verdict == "too little data" and "from 12 on" in str(found)
    bare = read_curve(Curve([float(x) for x in falling()], 32))
    assert bare.verdict == "healthy"
    assert "read without gradient norms, learning rates, agreement" in bare.notes[-1]
    assert bare.to_json()["figures"].keys() & {"gap", "agreement"} == set()


def test_notes_that_are_no_findings() -> None:
    flat = read_curve(curve(falling(times=60)))
    assert flat.verdict == "healthy" and any("flat from sample" in note for note in flat.notes)
    made = curve(falling())
    rising = [(updates, loss + (0.5 if updates > 300 else 0.0)) for updates, loss in made.held_out]
    assert any("overfitting" in note for note in read_curve(replace(made, held_out=rising)).notes)


def test_a_reading_for_people_and_programs() -> None:
    found = read_curve(curve(even()))
    text = str(found)
    assert text.startswith(("1 finding", "2 findings, the likeliest first"))
    assert "   seen: " in text and "   set:  " in text
    made = found.to_json()
    assert made["verdict"] == "look" and made["findings"][0]["cause"] == "rate too low"
    assert isinstance(made["figures"]["late"], float)


def test_series_of_unequal_lengths() -> None:
    with pytest.raises(ConfigError, match="3 rates for 4 losses"):
        Curve([1.0] * 4, 32, rates=[0.1] * 3)
    with pytest.raises(ConfigError, match="examples_per_update = 0"):
        Curve([1.0] * 4, 0)
    with pytest.raises(ConfigError, match="aren't after one of the 4 updates"):
        Curve([1.0] * 4, 32, held_out=[(5, 1.0)])


def test_a_history_is_read_as_it_is() -> None:
    def reading(factor: float) -> Reading:
        plan = Plan(4096, agreement=True)
        return read_curve(train_anew(regression, Setting(32, rate_factor=factor), plan))

    assert reading(1.0).verdict == "healthy"
    assert reading(1 / 50).causes[0] == "rate too low"
    assert reading(50.0).causes[0] == "rate too high"
