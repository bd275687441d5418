"""The search for a rate: finds the least of a smooth cost, moves out from an edge, and away from what fails."""

import math

import pytest

from stoker.batch.critical.tuning import tune


@pytest.mark.parametrize("best", [0.03, 0.7, 1.0, 11.0])
@pytest.mark.parametrize("refine", [0, 1, 2])
def test_comes_within_half_a_step_of_the_best_of_a_smooth_cost(best: float, refine: int) -> None:
    found = tune(lambda factor: math.log(factor / best) ** 2, refine=refine)
    assert abs(math.log2(found.factor / best)) <= 0.5 ** (refine + 1) + 1e-9
    assert found.inside or refine == 0
    assert len(found.tried) <= 9 + 2 * refine


def test_a_wall_of_divergence_above_the_best_is_stayed_below() -> None:
    found = tune(lambda factor: math.inf if factor > 1.5 else 1 / factor)
    assert found.factor == pytest.approx(math.sqrt(2))


def test_where_all_fail_smaller_factors_are_tried() -> None:
    found = tune(lambda factor: math.nan if factor > 0.2 else factor + 1)
    assert found.factor < 0.2
    assert [cost for factor, cost in found.tried if factor > 0.2] == [math.inf] * 4


def test_where_nothing_ever_works_it_ends() -> None:
    found = tune(lambda factor: math.inf)
    assert len(found.tried) == 9
    assert all(math.isinf(cost) for _, cost in found.tried)
