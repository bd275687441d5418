"""The loader's queue: by hand, and against torch's DataLoader."""

import pytest

from stoker.batch.loading import Fetches, LoaderOptions, fewest_workers, seconds_per_step


def fetches(*seconds: float, busy: float = 0.0, step_busy: float = 0.0, cores: int = 16) -> Fetches:
    return Fetches(seconds, busy, step_busy, cores)


def test_options_are_the_data_loaders_keywords() -> None:
    assert LoaderOptions(2, 4, True, True).keywords() == {
        "num_workers": 2,
        "prefetch_factor": 4,
        "pin_memory": True,
        "persistent_workers": True,
    }
    assert (LoaderOptions().ahead, LoaderOptions(1).ahead, LoaderOptions(1, 5).ahead) == (0, 2, 5)


@pytest.mark.parametrize("wrong", [{"prefetch_factor": 2}, {"persistent_workers": True}])
def test_options_of_workers_need_workers(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="set workers to 1 or more"):
        LoaderOptions(**wrong)  # type: ignore[arg-type]


def test_without_workers_both_take_turns() -> None:
    assert seconds_per_step(fetches(0.3), 0.1, LoaderOptions()) == pytest.approx(0.4)


@pytest.mark.parametrize(("workers", "seconds"), [(1, 0.3), (2, 0.15), (3, 0.1), (4, 0.1)])
def test_equal_batches_are_as_slow_as_the_slower_side(workers: int, seconds: float) -> None:
    assert seconds_per_step(fetches(0.3), 0.1, LoaderOptions(workers)) == pytest.approx(seconds)


def test_prefetching_evens_out_batches_that_differ() -> None:
    """One worker, batches of 0.5 and seven of 0.1: mean 0.15 < 0.2, but a slow one needs more than two ahead."""
    uneven = fetches(0.5, *[0.1] * 7)
    few, many = (seconds_per_step(uneven, 0.2, LoaderOptions(1, ahead)) for ahead in (2, 8))
    assert many == pytest.approx(0.2)
    assert few > 0.201


def test_workers_that_compute_share_the_processor() -> None:
    """A batch of 0.3 processor seconds and a step of 0.1 on 2 cores: 0.2 a step however many workers."""
    busy = fetches(0.3, busy=0.3, step_busy=0.1, cores=2)
    assert seconds_per_step(busy, 0.1, LoaderOptions(4)) == pytest.approx(0.2)


def test_no_more_workers_than_help() -> None:
    assert fewest_workers(fetches(0.3), 0.1, 16) == 3
    assert fewest_workers(fetches(0.05), 0.1, 16) == 1
    assert fewest_workers(fetches(0.3, busy=0.3, step_busy=0.1, cores=2), 0.1, 16) == 2
