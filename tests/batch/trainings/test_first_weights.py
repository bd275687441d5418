"""Trainings that are compared begin alike: a model that is trained on, and one of its own random numbers, are told."""

from collections.abc import Callable

import pytest
import torch

from stoker.batch import Plan, Setting, Target, scan
from stoker.batch.scanning.rates import scan_rates
from stoker.batch.trainings.first_weights import FirstWeights
from stoker.errors import ConfigError
from tests.batch.trainings_targets import regression


def trained_on() -> Callable[[], Target]:
    """One target, whatever it went through."""
    target = regression()
    return lambda: target


def drawn() -> Target:
    target = regression()
    with torch.no_grad():
        target.weights()[0].normal_(generator=torch.Generator().manual_seed(torch.Generator().seed()))
    return target


@pytest.mark.parametrize("make", [trained_on(), drawn])
def test_scans_refuse_trainings_that_begin_with_different_weights(make: Callable[[], Target]) -> None:
    with pytest.raises(ConfigError, match="two trainings with seed 0 begin with different weights"):
        scan(make, (16, 32), Plan(128), Setting(16), seeds=2)
    with pytest.raises(ConfigError, match="two trainings with seed 0 begin with different weights"):
        scan_rates(make, Plan(128), Setting(16), seeds=2)


def test_one_model_whose_weights_are_set_anew_will_do() -> None:
    target = regression()

    def make() -> Target:
        target.model[0].reset_parameters()  # type: ignore[index,operator]
        return target

    assert len(scan(make, (16, 32), Plan(128), Setting(16), seeds=2).arms) == 2


def test_weights_that_are_no_numbers_are_the_same_ones() -> None:
    first, target = FirstWeights(), regression()
    with torch.no_grad():
        target.weights()[0].fill_(torch.nan)
    assert first.noted(0, target) is first.noted(0, target)
    assert not first.same
    first.noted(1, target)
    assert first.same
