from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.batch.bridges.shares import Applied, Certified, Shares, divide
from stoker.errors import ConfigError


@pytest.mark.parametrize(
    ("update", "ranks", "largest", "micro", "microbatches"),
    [
        (32, 1, 64, 32, 1),
        (32, 1, 32, 32, 1),
        (32, 1, 24, 16, 2),  # 24 doesn't divide 32, 16 does
        (96, 2, 20, 16, 3),  # 48 a rank
        (7, 1, 4, 1, 7),  # a prime, but 4 isn't far from 1 example
    ],
)
def test_by_hand(update: int, ranks: int, largest: int, micro: int, microbatches: int) -> None:
    assert divide(update, ranks, largest) == Shares(micro, microbatches, ranks)


@given(st.integers(1, 400), st.integers(1, 8), st.integers(1, 500))
def test_no_example_is_lost_and_no_micro_batch_is_larger_than_fits(share: int, ranks: int, largest: int) -> None:
    try:
        found = divide(share * ranks, ranks, largest)
    except ConfigError:
        assert max(n for n in range(1, min(largest, share) + 1) if share % n == 0) * 4 < min(largest, share)
        return
    assert found.examples_per_update == share * ranks
    assert found.examples_per_microbatch <= largest
    larger = [n for n in range(found.examples_per_microbatch + 1, min(largest, share) + 1) if share % n == 0]
    assert larger == []


def test_a_prime_number_of_examples_is_refused_with_one_that_divides() -> None:
    with pytest.raises(ConfigError, match="divide only into micro-batches of 1, and 50 would fit: take 102 examples"):
        divide(101, 1, 50)
    assert divide(102, 1, 50).examples_per_microbatch == 34
    with pytest.raises(ConfigError, match="10 examples an update can't be shared by 3 ranks"):
        divide(10, 3, 50)


def test_a_certified_size_is_a_number_or_a_fit_of_examples() -> None:
    assert Certified(12).examples == 12
    assert Certified(SimpleNamespace(size=12, unit="examples")).examples == 12
    for wrong in (0, None, True, "12", SimpleNamespace(size=None, unit="examples")):
        with pytest.raises(ConfigError, match="no size to apply"):
            Certified(wrong)
    with pytest.raises(ConfigError, match="counted tokens"):
        Certified(SimpleNamespace(size=4096, unit="tokens"))


def test_what_was_applied_in_words_and_json() -> None:
    applied = Applied(Shares(32, 1, 1), Shares(16, 2, 1), 24, ("a note",))
    assert str(applied).splitlines() == [
        "stoker: 32 per micro-batch x 1 accumulated -> 16 per micro-batch x 2 accumulated; "
        "32 examples an update, as before; 24 per micro-batch fit",
        "a note",
    ]
    assert str(Shares(8, 2, 4)) == "8 per micro-batch x 2 accumulated x 4 ranks"
    assert applied.to_json() == {
        "before": {"examples_per_microbatch": 32, "microbatches": 1, "ranks": 1},
        "after": {"examples_per_microbatch": 16, "microbatches": 2, "ranks": 1},
        "certified": 24,
        "examples_per_update": 32,
        "notes": ["a note"],
    }
