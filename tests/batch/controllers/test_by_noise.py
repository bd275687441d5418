"""The batch follows the noise scale; expected values by hand."""

import json

import pytest

from stoker.batch.controllers.by_noise import ByNoise
from stoker.batch.noise import Mean, NoiseEstimate
from stoker.batch.stages import Progress
from stoker.errors import CheckpointError, ConfigError


def estimate(scale: float | None, low: float = 0.0, high: float = 0.0, unit: str = "examples") -> NoiseEstimate:
    found = None if scale is None else Mean(scale, (low or 0.9 * scale, high or 1.1 * scale))
    return NoiseEstimate(unit, 50, 40.0, 0, Mean(1.0, (0.9, 1.1)), Mean(1.0, (0.9, 1.1)), found, "")


def at(step: int, samples: int = 0) -> Progress:
    return Progress(0, step, samples)


def test_sizes_go_towards_the_scale_by_at_most_two() -> None:
    sizes = ByNoise(16, lowest=8, highest=200, wait=10)
    assert sizes(at(0)) == 16
    assert str(sizes.observe(estimate(1000), at(5, 80))) == (
        "step 5 (80 samples): 16 -> 32 per update; noise scale 1,000 (900 to 1,100) examples"
    )
    assert (sizes(at(4)), sizes(at(5)), sizes(at(6))) == (16, 32, 32)
    assert sizes.observe(estimate(1000), at(14)) is None, "it lasts ten updates"
    for step, size in ((15, 64), (25, 128), (35, 200)):
        sizes.observe(estimate(1000), at(step))
        assert sizes(at(step)) == sizes.size == size
    assert sizes.observe(estimate(1000), at(99)) is None, "the bound"
    for step, size in ((45, 100), (55, 50), (65, 25), (75, 13), (85, 8)):
        sizes.observe(estimate(2), at(step))
        assert sizes(at(step)) == size
    assert len(sizes.switches) == 9
    assert [sizes(at(step)) for step in (0, 20, 40, 60)] == [16, 64, 200, 50], "what was asked before stays"


def test_what_is_undetermined_or_near_changes_nothing() -> None:
    sizes = ByNoise(16, lowest=1, highest=64, hysteresis=1.5)
    assert sizes.observe(estimate(None), at(1)) is None
    assert sizes.observe(estimate(23.9), at(1)) is None, "within the factor of 1.5"
    assert sizes.observe(estimate(11), at(1)) is None
    assert sizes.observe(estimate(40, 15, 90), at(1)) is None, "the interval holds 16"
    assert sizes.observe(estimate(5, 2, 17), at(1)) is None
    assert sizes.observe(estimate(24.1, 17, 90), at(1)) is not None
    assert sizes.size == 24


def test_multiples_and_units() -> None:
    sizes = ByNoise(8, highest=40, multiple=8, times=0.01, unit="tokens")
    with pytest.raises(ConfigError, match="the noise scale is in examples, and this schedule takes tokens"):
        sizes.observe(estimate(100), at(1))
    made = sizes.observe(estimate(1500, unit="tokens"), at(1))
    assert made is None, "15 examples, and a multiple of 8 within them is 8"
    made = sizes.observe(estimate(1700, unit="tokens"), at(1))
    assert made is not None and made.now == 16 and made.why.endswith("tokens x 0.01")


def test_a_decision_that_holds_for_no_update_yet_is_followed_by_no_other() -> None:
    sizes = ByNoise(16, highest=64, wait=1)
    sizes(at(0))
    sizes.observe(estimate(1000), at(10))
    assert sizes.pending and sizes.observe(estimate(1000), at(20)) is None
    assert sizes(at(20)) == 32
    assert not sizes.pending and sizes.observe(estimate(1000), at(30)) is not None


def test_the_state_is_the_log() -> None:
    sizes = ByNoise(16, highest=64, wait=1)
    sizes.observe(estimate(1000), at(10, 160))
    state = json.loads(json.dumps(sizes.state_dict()))
    again = ByNoise(16, highest=64, wait=1)
    again.load_state_dict(state)
    assert again.switches == sizes.switches and again.pending and again.state_dict() == sizes.state_dict()
    assert [again(at(step)) for step in (9, 10)] == [16, 32]
    with pytest.raises(CheckpointError, match="has asked, first, switches, not first"):
        again.load_state_dict({"first": 16})
    with pytest.raises(CheckpointError, match="saved with first = 16, this schedule has 8"):
        ByNoise(8, highest=64).load_state_dict(state)
    for damage in ({"switches": [{"step": 1}]}, {"asked": "x"}, {"asked": None}):
        with pytest.raises(CheckpointError, match="a damaged state of ByNoise"):
            again.load_state_dict(state | damage)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: ByNoise(0, highest=4), "first = 0"),
        (lambda: ByNoise(8, highest=4), "first = 8: from 8 to 4"),
        (lambda: ByNoise(8, lowest=16, highest=32), "first = 8: from 16 to 32"),
        (lambda: ByNoise(8, highest=20, multiple=8), "highest = 20 is not a multiple of 8"),
        (lambda: ByNoise(8, highest=16, times=0), "times = 0"),
        (lambda: ByNoise(8, highest=16, hysteresis=0.5), "hysteresis = 0.5"),
        (lambda: ByNoise(8, highest=16, wait=0), "wait = 0"),
    ],
)
def test_what_cannot_be_is_refused(made, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        made()
