"""The search for a rate: finds the least of a smooth cost, moves out from an edge, and away from what fails."""

import math

import pytest

from stoker.batch.critical.tuning import settle, tune


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


def test_a_lucky_cost_moves_the_parabola_less_than_the_best() -> None:
    lucky = {math.sqrt(2): -0.1}
    found = tune(lambda factor: math.log2(factor) ** 2 + 0.26 + lucky.get(factor, 0.0) * (factor > 1.2), 1.0)
    assert 1.0 < found.factor < math.sqrt(2)


def test_the_second_look_goes_on_until_the_best_is_inside() -> None:
    asked: list[float] = []

    def cost(factor: float) -> float:
        asked.append(factor)
        return math.inf if factor > 3.9 else abs(math.log2(factor) + 0.4)

    looked = settle(cost, 4.0)
    assert len(looked) == len(asked) == 6  # it gives up so far out
    best = min(settle(cost, 1.0), key=lambda each: each[1])
    assert best[0] == pytest.approx(math.sqrt(0.5))
    assert [factor for factor, _ in settle(cost, 1.0)] == pytest.approx([0.5, math.sqrt(0.5), 1.0])
    assert (1.0, math.inf) in settle(lambda factor: math.nan if factor == 1 else factor + 1, 1.0)


def test_where_all_fail_smaller_factors_are_tried() -> None:
    found = tune(lambda factor: math.nan if factor > 0.2 else factor + 1)
    assert found.factor < 0.2
    assert [cost for factor, cost in found.tried if factor > 0.2] == [math.inf] * 4


def test_where_nothing_ever_works_it_ends() -> None:
    found = tune(lambda factor: math.inf)
    assert len(found.tried) == 9
    assert all(math.isinf(cost) for _, cost in found.tried)
