"""Held-out statistics against enumeration and hand values."""

from itertools import combinations

import numpy as np
import pytest

from stoker.rl.evaluate import pass_at_k, past_its_best, standard_error, summarise
from stoker.rl.types import Group, Prompt, Sample, SamplingParams, Scored


@pytest.mark.parametrize(("n", "solved", "k"), [(4, 1, 1), (4, 1, 2), (4, 2, 3), (5, 0, 2), (5, 5, 1), (6, 3, 4)])
def test_pass_at_k_is_the_share_of_draws_with_a_solved_sample(n: int, solved: int, k: int) -> None:
    draws = list(combinations(range(n), k))
    expected = sum(any(i < solved for i in draw) for draw in draws) / len(draws)
    assert pass_at_k(n, solved, k) == pytest.approx(expected)


def test_early_stop_needs_the_whole_patience_below_best_less_its_error() -> None:
    errors = [0.05] * 6
    assert past_its_best([0.2, 0.8, 0.7, 0.7, 0.74], errors[:5], patience=3)
    assert not past_its_best([0.2, 0.8, 0.7, 0.76, 0.7], errors[:5], patience=3)  # 0.76 is within one error
    assert not past_its_best([0.2, 0.8, 0.7, 0.7], errors[:4], patience=3)
    assert not past_its_best([0.8, 0.1, 0.1, 0.1, 0.1], errors[:5], patience=0)


def sample(prompt: str, index: int, text: str, finish: str = "stop") -> Sample:
    one = Prompt(prompt, (1,), prompt, "yes")
    ids = np.zeros(3, dtype=np.int32)
    return Sample(one, index, SamplingParams(), 0, ids, np.zeros(3, np.float32), text, finish)  # type: ignore[arg-type]


def test_summary_tells_right_wrong_unparsed_and_truncated_apart() -> None:
    def scored(prompt: str, index: int, reward: float | None, parsed: bool | None, finish: str = "stop") -> Scored:
        return Scored(sample(prompt, index, "", finish), {"math": reward}, reward, parsed)

    groups = [
        Group(sample("a", 0, "").prompt, (scored("a", 0, 1.0, True), scored("a", 1, 0.0, True))),
        Group(sample("b", 0, "").prompt, (scored("b", 0, -0.5, False, "length"), scored("b", 1, None, None))),
    ]
    found = summarise(groups, lambda one: one.reward == 1.0)
    assert found["accuracy"] == 0.25
    assert found["unparsed"] == 0.25
    assert found["wrong"] == 0.5
    assert found["truncated"] == 0.25
    assert found["reward"] == pytest.approx(0.5 / 3)
    assert found["pass@2"] == 0.5  # a has a right one, b has none
    assert found["accuracy_error"] == pytest.approx(standard_error(np.array([0.5, 0.0])))


def test_standard_error_by_hand() -> None:
    assert standard_error(np.array([1.0, 0.0, 1.0, 0.0])) == pytest.approx(np.sqrt(1 / 3) / 2)
    assert standard_error(np.array([1.0])) == 0.0


def test_an_answer_that_one_reward_calls_right_and_another_unparsed_is_not_wrong() -> None:
    one = Scored(sample("a", 0, "4"), {"mine": 1.0, "math": -0.5}, 0.5, parsed=False)
    summary = summarise([Group(one.sample.prompt, (one,))], lambda scored: True)
    assert (summary["accuracy"], summary["unparsed"], summary["wrong"]) == (1.0, 1.0, 0.0)
