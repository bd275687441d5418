"""A scan of a real training, small: what it compares, what it warns of, what it tells while it works."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from stoker.batch import Plan, Scan, Setting, Target, scan
from stoker.batch.curve import Fit
from stoker.errors import ConfigError
from tests.batch.trainings_targets import regression

PLAN, PRESENT = Plan(1024, evaluations=8), Setting(16)
FLAT = Fit(alpha=0.0001, beta=0.001)
"""Throughput that is spent at any size."""


@pytest.fixture(scope="module")
def found() -> Scan:
    return scan(regression, (64, 16, 32), PLAN, PRESENT, seeds=3, throughput=FLAT)


def test_sizes_are_trained_at_equal_samples_with_the_same_seeds(found: Scan) -> None:
    assert [arm.setting.examples_per_update for arm in found.arms] == [16, 32, 64]
    assert [arm.updates for arm in found.arms] == [64, 32, 16]
    for arm in found.arms:
        assert [history.setting.seed for history in arm.histories] == [0, 1, 2]
        assert {history.samples[-1] for history in arm.histories} == {1024}
    assert [arm.learning_rate for arm in found.arms] == pytest.approx([0.05, 0.1, 0.2])
    assert found.equal_updates == 16
    assert found.warnings == ()


def test_it_decides_and_prints_both_axes_and_every_setting(found: Scan) -> None:
    said = str(found)
    assert found.conclusion.words in said
    for words in (
        "loss at 1,024 examples", "loss at 16 updates", "efficiency candidate: 16", "quality candidates:",
        "seeds 0, 1, 2", "SGD of 9 parameters, right for 16 examples", "lr 0.05", "momentum 0", "rule linear",
        "warm-up 0", "decay constant", "clipping none", "no workers", "waits",
    ):  # fmt: skip
        assert words in said, words
    made = found.to_json()
    assert made["arms"][0]["runs"][2]["evaluations"][7]["samples"] == 1024
    assert made["conclusion"]["kind"] == found.conclusion.kind


def test_updates_larger_than_what_fits_are_accumulated() -> None:
    made = scan(regression, (16, 48), Plan(512, 2), PRESENT, seeds=2, fits=20, throughput=FLAT)
    assert [arm.setting.microbatch for arm in made.arms] == [16, 16]
    assert made.arms[1].setting.microbatches == 3
    assert "3 x 16" in str(made)


def test_a_batch_that_throughput_wants_and_losses_do_not_keep_gets_its_rate_scanned() -> None:
    steep = Fit(alpha=10.0, beta=1e-6)
    told: list[tuple[str, float | None]] = []

    def on_part(what: str, left: float | None) -> None:
        told.append((what, left))

    made = scan(
        lambda: regression(learning_rate=0.004), (16, 128), Plan(2048, 4), replace(PRESENT, rule="keep"),
        throughput=steep, on_part=on_part,
    )  # fmt: skip
    assert made.rates is not None
    assert made.rates.arms[0].setting.examples_per_update == 128
    assert made.conclusion.kind == "rate"
    assert made.conclusion.rate_factor is not None
    assert made.conclusion.rate_factor > 1
    assert len(told) == 6 + sum(len(arm.histories) for arm in made.rates.arms)
    assert told[0][0].startswith("16 per update, seed 0: held-out loss")
    assert told[0][1] is not None
    assert told[5][1] == 0.0


def test_a_target_that_seeds_itself_is_said_to_be() -> None:
    def same_weights() -> Target:
        torch.manual_seed(0)
        return regression()

    made = scan(same_weights, (16, 32), Plan(512, 2), PRESENT, seeds=2, throughput=FLAT)
    assert "same first weights" in made.warnings[0]
    assert len(made.arms[0].histories) == 2

    def one() -> Target:
        target = same_weights()
        inner: Any = target.load

        def load(*told: Any) -> Any:
            torch.manual_seed(0)
            return inner(*told)

        target.load = load
        return target

    made = scan(one, (16, 32), Plan(512, 2), PRESENT, seeds=3, throughput=FLAT)
    assert "so the seeds are one" in made.warnings[0]
    assert made.equal.seeds == (0,)
    assert [len(arm.histories) for arm in made.arms] == [1, 1]
    assert made.conclusion.kind == "undetermined"
    assert "a single seed" in str(made)


def test_rates_that_are_too_high_diverge_and_are_shown_so() -> None:
    made = scan(lambda: regression(learning_rate=40.0), (16, 32), Plan(512, 2), PRESENT, seeds=2, factors=(0.01, 0.1))
    assert made.apart is None
    assert made.quality == ()
    assert "2 of 2 diverged" in str(made)
    assert made.rates is not None
    assert made.rates.arms[0].setting.examples_per_update == 16


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"sizes": (16,)}, "two or more"),
        ({"sizes": (16, 2048)}, "fewer than one update"),
        ({"seeds": 0}, "seeds"),
        ({"seeds": (1, 1)}, "each once"),
        ({"plan": Plan(1024, 0)}, "evaluations"),
        ({"fits": 0}, "fits"),
    ],
)
def test_what_can_not_be_scanned_is_refused(told: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        scan(**{"make": regression, "sizes": (16, 32), "plan": PLAN, "present": PRESENT, **told})
