"""Schedules of the batch; expected values by hand."""

import pytest

from stoker.batch.stages import Progress, Ramp, Stages
from stoker.errors import ConfigError


def test_stages_begin_at_their_starts() -> None:
    large_then_small = Stages((512, 128), (0, 10))
    assert [large_then_small(Progress(epoch, 0, 0)) for epoch in (0, 9, 10, 99)] == [512, 512, 128, 128]
    by_step = Stages((8, 16, 4), (0, 5, 7), "step")
    assert [by_step(Progress(0, step, 0)) for step in range(9)] == [8] * 5 + [16] * 2 + [4] * 2
    assert Stages((8, 16), (0, 100), "samples")(Progress(0, 0, 100)) == 16
    assert Stages((8,))(Progress(3, 3, 3)) == 8


def test_a_ramp_grows_evenly_and_in_multiples() -> None:
    ramp = Ramp(8, 32, over=100, multiple=8)
    assert [ramp(Progress(0, 0, n)) for n in (0, 33, 34, 66, 67, 99, 100, 500)] == [8, 8, 16, 16, 24, 24, 32, 32]
    assert [Ramp(1, 5, over=4, by="step")(Progress(0, n, 0)) for n in range(6)] == [1, 2, 3, 4, 5, 5]
    assert [Ramp(8, 4, over=4, by="epoch")(Progress(n, 0, 0)) for n in range(5)] == [8, 7, 6, 5, 4]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Stages((1, 2)), "2 sizes and 1 starts"),
        (lambda: Stages(()), "0 sizes"),
        (lambda: Stages((1, 2), (1, 2)), "from 0"),
        (lambda: Stages((1, 2, 3), (0, 5, 5)), "each later"),
        (lambda: Stages((0,)), "at least 1"),
        (lambda: Stages((1,), by="batch"), "one of epoch, step, samples"),  # type: ignore[arg-type]
        (lambda: Ramp(8, 16, over=0), "over = 0"),
        (lambda: Ramp(8, 12, over=5, multiple=8), "last = 12 is not a multiple of 8"),
    ],
)
def test_what_cannot_be_is_refused(made, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        made()
