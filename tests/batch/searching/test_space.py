"""Spaces of settings."""

import pytest

from stoker.batch.searching.space import Space, powers_of_two
from stoker.batch.trainings.setting import Setting
from stoker.errors import ConfigError


def test_a_choice_becomes_a_setting_that_follows_from_the_present_one() -> None:
    present = Setting(64, rate_factor=2.0, examples_per_microbatch=32, clip_norm=1.0, seed=5)
    made = Space((16, 64), warmup_samples=(0, 100)).setting(
        {"batch": 0, "rate_factor": 3.0, "warmup_samples": 7}, present
    )
    assert (made.examples_per_update, made.base_examples, made.rate_factor) == (16, 64, 6.0)
    assert (made.examples_per_microbatch, made.warmup_samples, made.clip_norm, made.seed) == (16, 7, 1.0, 5)


def test_the_present_setting_is_a_choice_where_the_space_holds_it() -> None:
    assert Space((32, 64)).own(Setting(64)) == {"batch": 1, "rate_factor": 1.0}
    assert Space((32, 64), warmup_samples=(0, 9)).own(Setting(64)) == {
        "batch": 1, "rate_factor": 1.0, "warmup_samples": 0,
    }  # fmt: skip
    assert Space((32,)).own(Setting(64)) is None
    assert Space((64,), (2.0, 3.0)).own(Setting(64)) is None
    assert Space((64,), warmup_samples=(1, 9)).own(Setting(64)) is None


def test_powers_of_two() -> None:
    assert powers_of_two(16, 128) == (16, 32, 64, 128)
    assert powers_of_two(1, 3) == (1, 2)
    with pytest.raises(ConfigError, match="no power of two"):
        powers_of_two(5, 7)


@pytest.mark.parametrize(
    ("sizes", "changed", "named"),
    [
        ((), {}, "examples_per_update"),
        ((64, 32), {}, "ascending"),
        ((0, 1), {}, "at least 1"),
        ((1,), {"rate_factor": (0.0, 1.0)}, "rate_factor"),
        ((1,), {"rate_factor": (2.0, 1.0)}, "rate_factor"),
        ((1,), {"warmup_samples": (5, 5)}, "warmup_samples"),
    ],
)
def test_what_is_no_space_is_refused(sizes: tuple[int, ...], changed: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Space(sizes, **changed)  # type: ignore[arg-type]


def test_a_batch_that_no_micro_batch_divides_is_refused_before_anything_is_trained() -> None:
    with pytest.raises(ConfigError, match="micro-batch"):
        Space((48,)).check(Setting(64, examples_per_microbatch=32))


def test_settings_at_the_ends_of_the_space_are_told() -> None:
    space, present = Space((16, 32, 64), (0.1, 10.0), (0, 100)), Setting(32)
    inner = space.setting({"batch": 1, "rate_factor": 1.0, "warmup_samples": 0}, present)
    assert space.edges(inner, present) == []  # no warm-up at all is no edge
    outer = space.setting({"batch": 2, "rate_factor": 9.0, "warmup_samples": 99}, present)
    told = " ".join(space.edges(outer, present))
    assert "64 examples per update, the largest" in told and "9 x the rate" in told and "99 samples" in told
    assert (
        "smallest"
        in space.edges(space.setting({"batch": 0, "rate_factor": 1.0, "warmup_samples": 9}, present), present)[0]
    )
