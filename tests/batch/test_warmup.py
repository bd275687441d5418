"""A watch over the gradient's norm in a warm-up."""

import json

import pytest
import torch

from stoker.batch.warmup import WarmupWatch, running_median
from stoker.errors import CheckpointError, ConfigError, RunError


def watched(count: int = 10, **keywords: float) -> WarmupWatch:
    watch = WarmupWatch(1000, **keywords)
    for update in range(count):
        watch(2.0, update)
    return watch


def test_a_median_needs_eight_norms() -> None:
    assert running_median([1.0] * 7) is None
    assert running_median([1.0, 3.0] * 4) == 2.0


def test_a_spike_ends_the_run_and_says_what_to_change() -> None:
    watched()(10.0, 600)  # 5 times: let pass
    with pytest.raises(
        RunError,
        match=r"at 60% of the peak learning rate: the gradient norm 11 is 5.5 times its running median 2, more than 5. "
        r"Lower the peak learning rate \(halve it\), make the warm-up longer than 1,000 samples",
    ):
        watched()(11.0, 600)
    watched(ratio=6)(11.0, 600)
    watched(7)(1000.0, 600)  # too few for a median
    watched()(1000.0, 1001)  # the warm-up is over
    watched()(torch.tensor(9.0), 600)  # type: ignore[arg-type]


def test_what_is_not_finite_ends_it_at_once() -> None:
    with pytest.raises(RunError, match="gradient norm is nan. Lower the peak"):
        WarmupWatch(10)(float("nan"), 5)


def test_norms_that_fall_slowly_pass_the_running_median() -> None:
    watch = WarmupWatch(10_000)
    for update in range(1, 1000):
        watch(100 / update**0.5, update)
    assert len(watch.first) == 20
    assert str(watch).startswith("gradient norms of the first 20 updates: 100 70.7 57.7 50")


def test_norms_that_grow_slowly_pass_too() -> None:
    """A median of all of them would be left behind; of the last 64 it is a factor of 1.9."""
    watch = WarmupWatch(1000)
    for update in range(300):
        watch(1.02**update, update)


def test_without_a_gradient_nothing_is_learnt_about_norms() -> None:
    watch = WarmupWatch(1000)
    for update in range(20):
        watch(0.0, update)
    watch(3.0, 21)


def test_it_resumes() -> None:
    again = WarmupWatch(1000)
    again.load_state_dict(json.loads(json.dumps(watched().state_dict())))
    assert str(again) == str(watched())
    with pytest.raises(RunError, match="running median"):
        again(11.0, 600)
    with pytest.raises(CheckpointError, match="'past' and 'first'"):
        again.load_state_dict({})


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="ratio = 1"):
        WarmupWatch(10, ratio=1)
    with pytest.raises(ConfigError, match="warmup_samples"):
        WarmupWatch(-1)
