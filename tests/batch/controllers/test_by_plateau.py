"""The batch changes where the loss no longer falls; expected values by hand."""

import json
import math
from collections.abc import Iterable

import pytest

from stoker.batch.controllers.by_plateau import ByPlateau
from stoker.batch.stages import Progress
from stoker.errors import CheckpointError, ConfigError, RunError


def after(sizes: ByPlateau, losses: Iterable[float], step: int = 0) -> list[int]:
    """The size of the update after each loss."""
    found = []
    for loss in losses:
        step += 1
        sizes.observe(loss, Progress(0, step, 10 * step))
        found.append(sizes(Progress(0, step, 10 * step)))
    return found


def test_it_grows_on_plateaus_and_ends_at_the_last_size() -> None:
    sizes = ByPlateau(16, 50, patience=2, threshold=0.1)
    # 2.0 is the first look; 1.7 is lower by more than 10 %; 1.6 and 1.54 aren't: a plateau. It begins anew.
    assert after(sizes, [2.0, 1.7, 1.6, 1.54]) == [16, 16, 16, 32]
    assert str(sizes.switches[0]) == "step 4 (40 samples): 16 -> 32 per update; no loss 10.00% below 1.7 in 2 looks"
    assert after(sizes, [1.5, 1.4, 1.36, 1.3], step=4) == [32, 32, 50, 50]
    assert after(sizes, [1.3] * 9, step=8) == [50] * 9
    assert len(sizes.switches) == 2 and sizes.rate_factor == 1


def test_it_shrinks_where_the_last_size_is_smaller() -> None:
    sizes = ByPlateau(64, 8, times=3, patience=1, multiple=8)
    assert after(sizes, [1.0] * 9) == [64, 24, 24, 8, 8, 8, 8, 8, 8]


def test_small_factors_move_by_a_multiple_at_least() -> None:
    assert after(ByPlateau(8, 24, times=1.2, patience=1, multiple=8), [1.0] * 6) == [8, 16, 16, 24, 24, 24]
    assert after(ByPlateau(24, 8, times=1.2, patience=1, multiple=8), [1.0] * 6) == [24, 16, 16, 8, 8, 8]


def test_the_rate_falls_once_the_batch_is_at_its_bound() -> None:
    sizes = ByPlateau(8, 16, patience=1, then_rate=0.5)
    rates = []
    for step in range(1, 7):
        sizes.observe(1.0, Progress(0, step, step))
        sizes(Progress(0, step, step))
        rates.append(sizes.rate_factor)
    assert rates == [1, 1, 1, 0.5, 0.5, 0.25]
    alone = ByPlateau(8, 8, patience=1, then_rate=0.1)
    after(alone, [1.0, 1.0])
    assert alone.rate_factor == 0.1


def test_training_losses_are_averaged_into_looks() -> None:
    sizes = ByPlateau(8, 16, patience=1, averaged=3)
    assert after(sizes, [1.0, 2.0, 3.0, 1.0, 1.0, 1.0, 0.9, 1.0]) == [8] * 8
    assert after(sizes, [1.1], step=8) == [16], "means of 2, 1 and 1"


def test_the_state_goes_on_anywhere() -> None:
    losses = [1.0, 0.9, 0.91, 0.92, 0.9, 0.93, 0.89, 0.9, 0.9, 0.9, 0.9, 0.9]

    def made() -> ByPlateau:
        return ByPlateau(8, 16, patience=2, averaged=2, then_rate=0.5)

    whole = made()
    wanted = after(whole, losses)
    for stop in range(len(losses)):
        first = made()
        found = after(first, losses[:stop])
        second = made()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert found + after(second, losses[stop:], step=stop) == wanted
        assert second.state_dict() == whole.state_dict()
    with pytest.raises(CheckpointError, match="a state of ByPlateau has asked, best"):
        made().load_state_dict({"first": 8})
    with pytest.raises(CheckpointError, match="a damaged state"):
        made().load_state_dict(whole.state_dict() | {"count": None})


def test_a_loss_that_is_no_number_stops() -> None:
    for loss in (math.nan, math.inf):
        with pytest.raises(RunError, match="no batch mends that"):
            ByPlateau(8, 16).observe(loss, Progress(0, 3, 24))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: ByPlateau(8, 16, times=1), "times = 1"),
        (lambda: ByPlateau(8, 16, patience=0), "patience = 0"),
        (lambda: ByPlateau(8, 16, averaged=0), "averaged = 0"),
        (lambda: ByPlateau(8, 16, threshold=1), "threshold = 1"),
        (lambda: ByPlateau(8, 16, then_rate=1), "then_rate = 1"),
        (lambda: ByPlateau(8, 8), "nothing can change"),
        (lambda: ByPlateau(8, 12, multiple=8), "highest = 12 is not a multiple of 8"),
    ],
)
def test_what_cannot_be_is_refused(made, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        made()
