"""Rates by samples seen; expected values by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.batch.horizons import Horizon
from stoker.errors import ConfigError


def test_by_hand() -> None:
    linear = Horizon(1000, 100, "linear", 0.2)
    assert [linear.rate(1.0, n) for n in (0, 10, 100, 550, 1000, 2000)] == pytest.approx([0, 0.1, 1, 0.6, 0.2, 0.2])
    cosine = Horizon(200, 100, final_fraction=0.1)
    assert [cosine.rate(2.0, n) for n in (50, 100, 150, 200)] == pytest.approx([1.0, 2.0, 1.1, 0.2])
    assert {Horizon(100, decay="constant").rate(3.0, n) for n in (0, 50, 500)} == {3.0}
    assert Horizon(100, 100).rate(1.0, 100) == 1.0


@given(st.lists(st.integers(1, 50), min_size=1), st.sampled_from(["constant", "linear", "cosine"]))
def test_the_rate_at_a_sample_is_the_same_whatever_batches_led_there(batches: list[int], decay: str) -> None:
    horizon = Horizon(sum(batches), 0.1 * sum(batches), decay, 0.1)  # type: ignore[arg-type]
    seen = 0
    for batch in batches:
        seen += batch
    assert horizon.rate(1.0, seen) == (1.0 if decay == "constant" else pytest.approx(0.1))
    assert all(0 <= horizon.rate(1.0, n) <= 1 for n in range(seen + 1))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"samples": 0}, "more than 0"),
        ({"warmup_samples": 101}, "from 0 to samples = 100"),
        ({"final_fraction": 1.5}, "final_fraction"),
        ({"decay": "step"}, "one of constant, linear, cosine"),
    ],
)
def test_what_cannot_be_is_refused(keywords: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Horizon(**({"samples": 100} | keywords))  # type: ignore[arg-type]
