"""Three signals and where they lead, on ladders with known answers."""

import math

import pytest

from stoker.batch.explaining.verdict import Rung, decide, worse
from stoker.errors import ConfigError

GOOD, BAD = (0.50, 0.52, 0.51), (0.60, 0.63, 0.61)


def ladder(*rows: tuple[int, float, float | None, tuple[float, ...]]) -> list[Rung]:
    return [Rung(*row) for row in rows]


def says(verdict: object) -> dict[str, str | None]:
    return {each.name: each.says for each in verdict.signals}  # type: ignore[attr-defined]


def test_larger_while_doublings_gain_and_validation_keeps() -> None:
    rungs = ladder(
        (16, 100, 0.1, GOOD), (32, 190, 0.2, GOOD), (64, 340, 0.4, GOOD), (128, 520, 0.7, GOOD), (256, 560, 0.9, GOOD)
    )
    found = decide(rungs, 32)
    assert (found.way, found.recommended) == ("larger", 128)
    assert "128 examples per update instead of 32: 174% more throughput" in found.words
    assert "to 256 a doubling gains 8% of throughput, less than 10%" in found.words
    assert says(found) == {"throughput": "larger", "memory": "larger", "validation": "stay"}


def test_right_where_throughput_is_spent_memory_is_used_and_validation_keeps() -> None:
    rungs = ladder((32, 480, 0.5, GOOD), (64, 500, 0.9, GOOD), (128, 510, 1.8, GOOD))
    found = decide(rungs, 64)
    assert (found.way, found.recommended) == ("stay", 64)
    assert says(found) == {"throughput": "stay", "memory": "stay", "validation": "stay"}
    assert found.words.startswith("Stay at 64 examples per update. ")


def test_smaller_where_a_smaller_batch_trains_better_in_every_seed() -> None:
    rungs = ladder((64, 300, 0.2, GOOD), (128, 330, 0.3, GOOD), (256, 340, 0.5, BAD), (512, 345, 0.9, BAD))
    found = decide(rungs, 512)
    assert (found.way, found.recommended) == ("smaller", 128)  # the largest that isn't worse than the best
    assert says(found)["validation"] == "smaller"
    assert "4% less throughput" in found.words


def test_the_smaller_batch_that_is_taken_is_itself_plainly_better() -> None:
    """64 isn't told from 32 nor from 128: there is no reason to go there."""
    here, unclear = (0.60, 0.63, 0.61), (0.59, 0.50, 0.62)
    found = decide(ladder((32, 300, 0.2, GOOD), (64, 330, 0.3, unclear), (128, 340, 0.5, here)), 128)
    assert (found.way, found.recommended) == ("smaller", 32)


def test_the_signal_of_validation_says_what_the_verdict_follows() -> None:
    """32 has the lowest mean and scatters too much to be plainly better, 64 is plainly better."""
    rungs = ladder((32, 300, 0.2, (0.20, 0.59, 0.58)), (64, 330, 0.3, GOOD), (128, 340, 0.5, BAD))
    found = decide(rungs, 128)
    assert (found.way, found.recommended) == ("smaller", 64)
    assert says(found)["validation"] == "smaller"
    assert "64 trains better in every seed" in str(found)


def test_a_larger_batch_that_trains_worse_is_not_taken_however_fast() -> None:
    found = decide(ladder((32, 100, 0.1, GOOD), (64, 190, 0.2, BAD)), 32)
    assert found.way == "stay"
    assert "At 64 validation suffers at equal samples" in found.words


def test_a_larger_batch_that_does_not_fit_is_not_taken() -> None:
    found = decide(ladder((32, 100, 0.6, GOOD), (64, 190, 1.1, GOOD)), 32)
    assert found.way == "stay"
    assert "64 would take 110% of the memory" in found.words


def test_diverged_trainings_are_worse_than_any_and_told() -> None:
    found = decide(ladder((32, 100, 0.1, GOOD), (64, 190, 0.2, (0.5, math.inf, 0.5))), 32)
    assert found.way == "stay"
    assert not worse(GOOD, (math.inf,) * 3)
    assert worse((math.inf,) * 3, GOOD)
    assert "diverged in 1 of 3 seeds" in found.words


def test_full_memory_is_a_matter_of_micro_batches() -> None:
    found = decide(
        ladder(
            (32, 100, 0.97, GOOD),
        ),
        32,
    )
    assert found.way == "stay"
    assert "smaller micro-batches, accumulated, leave the update as it is" in str(found)


@pytest.mark.parametrize(
    ("losses", "reference", "expected"),
    [
        ((0.53, 0.55, 0.54), (0.50, 0.52, 0.51), True),  # by 0.03, three standard deviations
        ((0.505, 0.525, 0.515), (0.50, 0.52, 0.51), False),  # by half of one
        ((0.90, 0.51, 0.90), (0.50, 0.52, 0.51), False),  # not in every seed
        ((0.50, math.inf, 0.51), (0.50, 0.52, 0.51), True),
        ((0.90, math.inf, 0.91), (0.50, math.inf, 0.51), False),  # what is left is too little to tell
    ],
)
def test_worse_is_in_every_seed_and_by_more_than_one_deviation(
    losses: tuple[float, ...], reference: tuple[float, ...], expected: bool
) -> None:
    assert worse(losses, reference) is expected


def test_what_chance_could_make_is_not_worse() -> None:
    rungs = ladder((32, 100, 0.1, GOOD), (64, 190, 0.2, BAD))
    assert worse(BAD, GOOD, 0.09)
    assert not worse(BAD, GOOD, 0.11)
    assert decide(rungs, 64, 0.09).way == "smaller"
    assert decide(rungs, 64, 0.11).way == "stay"
    assert decide(rungs, 32, 0.11).way == "larger"


@pytest.mark.parametrize("present", [16, 48])
def test_a_ladder_without_the_present_batch_is_refused(present: int) -> None:
    with pytest.raises(ConfigError, match=str(present)):
        decide(ladder((32, 100, 0.1, GOOD), (64, 190, 0.2, GOOD)), present)
    with pytest.raises(ConfigError, match="one of each seed"):
        worse(GOOD, GOOD[:2])
    with pytest.raises(ConfigError, match="two seeds or more"):
        worse((0.6,), (0.5,))
