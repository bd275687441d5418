"""From two candidates to one batch, by every way they can lie."""

import math
from collections.abc import Sequence

import pytest

from stoker.batch.scanning.arms import Arm, tell_apart
from stoker.batch.scanning.deciding import Conclusion, conclude, wants_rates
from stoker.batch.scanning.efficiency import Efficiency
from stoker.batch.scanning.rate_scan import RateScan
from tests.batch.scanning.made import arm, equal

GOOD, GOOD_TOO, BAD = [0.50, 0.51, 0.52], [0.512, 0.513, 0.514], [0.8, 0.81, 0.82]


def arms(*finals: Sequence[float]) -> list[Arm]:
    return [arm(16 * 2**number, each) for number, each in enumerate(finals)]


def scanned(best: Sequence[float] | None, factor: float = 0.5) -> RateScan:
    tuned = None if best is None else arm(64, best, factor=factor)
    return RateScan(equal(), (arm(64, BAD),), tuned, 0.01, (factor,), "best", "words")


def concluded(made: list[Arm], size: int | None, rates: RateScan | None = None) -> Conclusion:
    found = Efficiency(size, tuple(100.0 * (1 + number) for number in range(len(made))), "it is so")
    return conclude(made, tell_apart([each.losses for each in made]), found, rates, "examples")


def test_one_batch_that_serves_both_is_taken() -> None:
    said = concluded(arms(GOOD, GOOD_TOO, BAD), 32)
    assert (said.kind, said.examples_per_update, said.rate_factor) == ("agree", 32, 1.0)
    assert "16 and 32 keep the held-out loss" in said.words


def test_a_device_that_needs_less_than_quality_accumulates() -> None:
    said = concluded(arms(BAD, GOOD, GOOD_TOO), 16)
    assert (said.kind, said.examples_per_update, said.examples_per_microbatch) == ("accumulate", 32, 16)


def test_a_device_that_wants_more_is_reconciled_by_the_rate() -> None:
    made = arms(GOOD, GOOD_TOO, BAD)
    said = concluded(made, 64, scanned([0.505, 0.512, 0.515]))
    assert (said.kind, said.examples_per_update, said.rate_factor) == ("rate", 64, 0.5)
    assert "with the rule's it ends 0.3 worse than 16" in said.words


@pytest.mark.parametrize("best", [[0.7, 0.71, 0.72], None])
def test_what_no_rate_closes_is_irreconcilable(best: Sequence[float] | None) -> None:
    said = concluded(arms(GOOD, GOOD_TOO, BAD), 64, scanned(best))
    assert (said.kind, said.examples_per_update) == ("irreconcilable", 32)
    assert "architecture" in said.words
    assert "augmentation" in said.words
    assert "33% slower" in said.words
    assert ("every rate that was tried diverges" in said.words) == (best is None)


def test_a_diverged_batch_that_a_lower_rate_saves() -> None:
    said = concluded(arms(GOOD, GOOD_TOO, [math.inf, 0.5, math.inf]), 64, scanned([0.505, 0.512, 0.515]))
    assert said.kind == "rate"
    assert "with the rule's it diverged" in said.words


def test_one_seed_is_not_decided_by() -> None:
    said = concluded(arms([0.5], [0.6]), 16)
    assert (said.kind, said.examples_per_update) == ("undetermined", None)


def test_without_an_efficiency_candidate_quality_decides() -> None:
    said = concluded(arms(GOOD, GOOD_TOO, BAD), None)
    assert (said.kind, said.examples_per_update) == ("quality", 32)


def test_all_diverged() -> None:
    lost = [math.inf] * 3
    said = concluded(arms(lost, lost), 32, scanned(GOOD, 0.125))
    assert (said.kind, said.examples_per_update) == ("diverged", None)
    assert "x 0.125" in said.words
    assert "lower the learning rate" in concluded(arms(lost, lost), 32).words


def test_when_rates_are_scanned() -> None:
    found = Efficiency(64, (1.0, 2.0, 3.0), "")
    good, lost = arms(GOOD, GOOD_TOO, BAD), arms([math.inf], [math.inf])
    assert wants_rates(good, tell_apart([each.losses for each in good]), found) is good[2]
    assert wants_rates(good, tell_apart([each.losses for each in good]), Efficiency(32, (1.0, 2.0, 3.0), "")) is None
    assert wants_rates(lost, None, found) is lost[0]
