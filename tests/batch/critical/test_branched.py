"""What branches say: the largest batch within the tolerance, by hand; bounds, intervals, and what diverged."""

import json
import math

import pytest

from stoker.batch.critical.branched import Branched, Rung, crossing


def rung(size: int, *losses: float) -> Rung:
    return Rung(size, 0.1, 1.0, ((1.0, losses[0]),), ((1.0, losses[0]),), losses, ((64, losses[0]),), 0.01)


def branched(*rungs: Rung) -> Branched:
    return Branched("examples", 100, 640, 0.01, "held-out loss", rungs, 5_000)


def test_the_crossing_by_hand() -> None:
    assert crossing([8, 16, 32, 64], [0, 0.0, 0.005, 0.015], 0.01) == pytest.approx(48)
    assert crossing([8, 16, 32], [0, 0.03, 0.04], 0.01) == pytest.approx(8 + 8 / 3)
    assert crossing([8, 16, 32], [0, 0.03, 0.01], 0.01) == 32  # the largest within, whatever failed below it
    assert crossing([8, 16, 32], [0, 0.0, math.inf], 0.01) == 16


def test_each_is_compared_with_the_lowest_of_all_smaller_ones() -> None:
    found = branched(rung(8, 2.0, 2.2), rung(16, 1.9, 2.1), rung(32, 1.904, 2.104), rung(64, 1.92, 2.12))
    assert [each.mean for each in found.excess] == pytest.approx([0, -0.1, 0.004, 0.02])
    assert found.critical == pytest.approx(32 * (1 + 0.006 / 0.016))
    assert found.bound == ""


def test_the_interval_is_of_paired_differences() -> None:
    # both orders differ by 1 in level, which says nothing: differences are 0.018 and 0.022, t(1) = 12.706
    found = branched(rung(8, 1.0, 2.0), rung(16, 1.018, 2.022))
    assert found.excess[1].mean == pytest.approx(0.02)
    assert found.excess[1].half_width == pytest.approx(12.706 * 0.002, rel=1e-3)
    assert found.interval == (0.0, math.inf)
    assert found.bound == "at most"


def test_none_failed_is_a_lower_bound_and_one_order_has_no_interval() -> None:
    found = branched(rung(8, 1.0), rung(16, 1.0))
    assert (found.critical, found.bound, found.interval) == (16, "at least", None)
    assert str(found).startswith("critical batch by branches: at least 16 examples\n")


def test_a_batch_that_diverged_fails_and_is_shown() -> None:
    found = branched(rung(8, 1.0, 1.1), rung(16, 1.0, 1.1), rung(32, 1.0, math.inf))
    assert found.critical == 16
    told = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert told["rungs"][2]["excess"] is None
    assert told["bound"] == ""
    assert "inf" in str(found)
