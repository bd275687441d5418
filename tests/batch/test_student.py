"""Student's quantiles against scipy's, and the error of a median by draws."""

import math

import numpy as np
import pytest
from scipy import stats

from stoker.batch.student import median_error, quantile


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 20, 98, 5000])
def test_as_scipy_has_them(degrees: int) -> None:
    assert quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=5e-4)


def test_fractions_are_rounded_down_and_nothing_is_the_normal_one() -> None:
    assert quantile(9.9) == quantile(9)
    assert quantile(math.inf) == pytest.approx(1.959964)
    with pytest.raises(ValueError, match=r"0.5 degrees of freedom"):
        quantile(0.5)


def test_the_error_of_a_median() -> None:
    medians = np.median(np.random.default_rng(0).normal(0, 2, (4_000, 201)), axis=1)
    assert median_error(2, 201) == pytest.approx(medians.std(), rel=0.05)
