import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stoker.errors import RewardError
from stoker.rl.rewards.rules import Exact, Math, Scores, decide, reference_answer
from stoker.rl.types import Sample

Make = Callable[..., Sample]

# (reference, answer): decided without algebra
EQUAL = [
    ("42", "42"),
    ("42", "42.0"),
    ("1234", "1,234"),
    ("0.5", r"\frac{1}{2}"),
    (r"\frac{1}{2}", "1/2"),
    ("18", "$18"),
    ("5", "x = 5"),
    ("5", "2 + 3 = 5"),
    ("B", "(B)"),
    ("B", "b."),
    ("Paris", "paris"),
    ("no solution", "No  Solution"),
    (r"\frac{\sqrt{3}}{2}", r"\frac{\sqrt{3}}{2}"),
    ("(1, 2)", "(1,2)"),
]
UNEQUAL = [
    ("42", "43"),
    ("2", "1, 2, 3"),
    ("2", "1 or 2"),
    ("2", "2 or 2"),
    ("2", r"\pm 2"),
    ("42", "12+30"),
    ("42", r"6 \times 7"),
    ("1/2", "2/4 + 0"),
    ("no", "on"),
    ("Paris", "Rome"),
    ("5", "five"),
    ("1,2", "1,2,3"),
]
ALGEBRA_EQUAL = [
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    ("x^2+2x+1", "(x+1)^2"),
    ("1,2", "2,1"),
    ("2 or -2", r"\pm 2"),
    (r"2\sqrt{3}", "sqrt(12)"),
    (r"2\pi", "2*pi"),
    ("x**2", "x^2"),
    ("4", r"\sqrt{16}"),
    (r"\{1, 2\}", r"\{2, 1\}"),
]
ALGEBRA_UNEQUAL = [
    ("x+1", "x-1"),
    ("(1,2)", "(2,1)"),
    ("5", "5x"),
    ("5", "x"),
    (r"2\pi", "6.28"),
    ("[0,1)", "[0,1]"),
    ("2", r"\mathbb{R}"),
]


@pytest.fixture(scope="module")
def maths() -> Iterator[Math]:
    reward = Math()
    yield reward
    reward.close()


@pytest.mark.parametrize(("reference", "answer"), EQUAL)
def test_equal_by_text_or_number(reference: str, answer: str) -> None:
    assert decide(reference, answer, 1e-6) is True


@pytest.mark.parametrize(("reference", "answer"), UNEQUAL)
def test_unequal_without_algebra(reference: str, answer: str) -> None:
    assert decide(reference, answer, 1e-6) is False


@pytest.mark.parametrize(
    ("reference", "answer", "kind"),
    [(*pair, "correct") for pair in ALGEBRA_EQUAL] + [(*pair, "wrong") for pair in ALGEBRA_UNEQUAL],
)
def test_algebra_decides_the_rest(sample: Make, maths: Math, reference: str, answer: str, kind: str) -> None:
    assert decide(reference, answer, 1e-6) is None
    (outcome,) = maths([sample(rf"\boxed{{{answer}}}", reference)], 0).outcomes
    assert outcome.kind == kind


def test_scores_are_one_zero_and_minus_a_half(sample: Make) -> None:
    found = Math()([sample(t, "42") for t in (r"\boxed{42}", r"\boxed{41}", "no idea")], 0).outcomes
    assert [(o.value, o.kind) for o in found] == [(1.0, "correct"), (0.0, "wrong"), (-0.5, "unparsed")]


def test_scores_can_be_chosen(sample: Make) -> None:
    reward = Math(scores=Scores(correct=0.9, wrong=-0.1, unparsed=-1.0))
    found = reward([sample(t, "42") for t in (r"\boxed{42}", r"\boxed{41}", "no idea")], 0).outcomes
    assert [o.value for o in found] == [0.9, -0.1, -1.0]
    assert reward.range == (-1.0, 0.9)


def test_numbers_and_text_need_no_child(sample: Make) -> None:
    reward = Math()
    reward([sample(r"\boxed{42}", "42"), sample(r"\boxed{41}", "42"), sample("", "42")], 0)
    assert reward._child.starts == 0


def test_a_truncated_answer_is_counted_apart(sample: Make) -> None:
    found = Math()([sample("The answer is 4", "42", finish="length")], 0).outcomes
    assert [(o.value, o.kind) for o in found] == [(-0.5, "truncated")]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("6 * 7 = <<6*7=42>>42\n#### 42", "42"),
        (r"Hence $\boxed{\frac12}$.", r"\frac12"),
        ("42", "42"),
        ("$x+1$", "x+1"),
    ],
)
def test_a_worked_solution_is_reduced_to_its_answer(text: str, answer: str) -> None:
    assert reference_answer(text) == answer


def test_a_row_without_an_answer_is_an_error_that_says_what_to_set(sample: Make) -> None:
    with pytest.raises(RewardError, match=r"prompt data:3 has no reference answer.*answer_column"):
        Math()([sample("42")], 0)
    with pytest.raises(RewardError, match="prompt data:3 has no reference answer"):
        Exact()([sample("42", " ")], 0)


@given(st.text(max_size=60), st.text(max_size=60))
@example("0", "1e9999")
@example(r"\frac{0}{0}", r"\frac{1}{.}")
def test_any_two_texts_are_decided_or_left_to_algebra(reference: str, answer: str) -> None:
    assert decide(reference, answer, 1e-6) in (True, False, None)
    assert decide(answer, answer, 1e-6) is True


HANG = r"10^{10^{10^{10}}} + x"


def test_failure_10_a_hanging_check_is_killed_counted_and_scored(sample: Make) -> None:
    reward = Math(timeout_s=1.0, on_timeout=-0.25)
    hang = sample(rf"\boxed{{{HANG}}}", "x^{9}")
    samples = [sample(r"\boxed{x+1}", "1+x"), hang, hang, sample(r"\boxed{x+2}", "2+x")]
    start = time.monotonic()
    found = reward(samples, 0).outcomes
    hung = (-0.25, "timeout")
    assert [(o.value, o.kind) for o in found] == [(1.0, "correct"), hung, hung, (1.0, "correct")]
    assert "most recent call first" in found[1].detail  # the stack at the deadline
    assert reward._child.starts == 2  # the same answer is checked once
    assert time.monotonic() - start < 60
    reward.close()


def test_failure_38_sympy_hang_abstains_by_default(sample: Make) -> None:
    reward = Math(timeout_s=1.0)
    (outcome,) = reward([sample(rf"\boxed{{{HANG}}}", "x^{9}")], 0).outcomes
    assert (outcome.value, outcome.kind) == (None, "timeout")
    reward.close()


def test_failure_38_long_answers_never_reach_algebra(sample: Make) -> None:
    reward = Math()
    (outcome,) = reward([sample(r"\boxed{" + "x+" * 5000 + "x}", "x")], 0).outcomes
    assert (outcome.kind, reward._child.starts) == ("wrong", 0)


def test_the_child_sees_no_secrets(sample: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    reward = Math()
    reward([sample(r"\boxed{x+1}", "1+x")], 0)
    process = reward._child._process
    assert process is not None
    assert b"secret-token" not in Path(f"/proc/{process.pid}/environ").read_bytes()
    reward.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_exact_compares_the_whole_completion(sample: Make) -> None:
    texts = ["42", " 42\n", "\u0034\u0032", "４２", "42.", "the answer is 42", "", "42 42"]
    kinds = [o.kind for o in Exact()([sample(t, "42") for t in texts], 0).outcomes]
    assert kinds == ["correct"] * 4 + ["wrong", "wrong", "unparsed", "wrong"]
    assert [o.kind for o in Exact()([sample("\u22127", "-7"), sample("", "7", finish="length")], 0).outcomes] == [
        "correct",
        "truncated",
    ]
