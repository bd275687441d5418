import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from stoker.errors import ConfigError
from stoker.rl.rewards import AuditLine, RewardSuite
from stoker.rl.types import Sample

Make = Callable[..., Sample]
Suite = Callable[..., RewardSuite]
Write = Callable[[str], str]

HALF = "def half(completions, **kw): return [None if c.startswith('skip') else 0.5 for c in completions]"


def test_weighted_sum_over_those_that_answered(sample: Make, suite: Suite, write: Write) -> None:
    one = suite({"function": "exact", "weight": 2.0}, {"function": f"{write(HALF)}:half", "weight": -3.0})
    scored = one([sample("4", "4"), sample("skip", "4", index=1), sample("", "4", index=2)], 0)
    assert [s.reward for s in scored] == [2.0 - 1.5, 0.0, -1.0 - 1.5]
    assert [dict(s.rewards) for s in scored] == [
        {"exact": 1.0, "half": 0.5},
        {"exact": 0.0, "half": None},
        {"exact": -0.5, "half": 0.5},
    ]
    assert [s.parsed for s in scored] == [True, True, False]
    assert [s.sample.id for s in scored] == ["data:3/0", "data:3/1", "data:3/2"]


def test_peer_fault_20_one_none_reward_leaves_the_rest_alone(sample: Make, suite: Suite, write: Write) -> None:
    one = suite({"function": f"{write(HALF)}:half", "weight": 0.0})
    scored = one([sample("a"), sample("skip", index=1), sample("b", index=2)], 0)
    assert [s.reward for s in scored] == [0.0, None, 0.0]
    assert [s.parsed for s in scored] == [None] * 3
    metrics = one.metrics()
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["reward/half/mean"] == 0.5


def test_all_abstaining_has_no_mean_rather_than_a_nan(sample: Make, suite: Suite, write: Write) -> None:
    one = suite({"function": f"{write(HALF)}:half"})
    one([sample("skip")], 0)
    assert one.metrics() == {"reward/half/abstained": 1.0, "reward/half/errors": 0.0, "reward/half/timeouts": 0.0}


def test_rule_metrics_are_shares_that_sum_to_one(sample: Make, suite: Suite) -> None:
    one = suite({"function": "math"})
    one([sample(r"\boxed{4}", "4"), sample(r"\boxed{5}", "4"), sample("hm", "4")], 0)
    one([sample("hm", "4", finish="length")], 0)
    metrics = one.metrics()
    shares = [metrics[f"reward/math/{k}"] for k in ("correct", "wrong", "unparsed", "truncated")]
    assert shares == [0.25] * 4
    assert metrics["reward/math/mean"] == 0.0
    assert metrics["reward/math/std"] == pytest.approx(math.sqrt((1 + 0 + 0.25 + 0.25) / 4))
    assert one.metrics() == {}
    assert one.extras() == [{"id": "data:3/0", "math/answer": "4"}, {"id": "data:3/0", "math/answer": "5"}]


def test_no_samples_no_rewards(suite: Suite, write: Write) -> None:
    one = suite({"function": "math"}, {"function": f"{write(HALF)}:half"})
    assert one([], 0) == []
    assert one.metrics() == {}


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([{"function": "math"}, {"function": "math"}], "two are called 'math'"),
        ([{"function": "math", "kwargs": {"corect": 1}}], "takes no kwargs.corect; did you mean 'correct'"),
        ([{"function": "exact", "kwargs": {"forms": ["boxed"]}}], "takes no kwargs.forms"),
        ([{"function": "math", "kwargs": {"forms": ["box"]}}], "no form 'box'; did you mean 'boxed'"),
        ([{"function": "math", "kwargs": {"forms": "boxed"}}], "is not a list of answer forms"),
        ([{"function": "math", "kwargs": {"forms": []}}], "is not a list of answer forms"),
        ([{"function": "math", "kwargs": {"wrong": "0"}}], "kwargs.wrong = '0' is not a finite number"),
        ([{"function": "math", "kwargs": {"tolerance": -1}}], "kwargs.tolerance = -1 is not a"),
        ([{"function": "math", "range": (0, 1)}], r"a score of -0.5 is outside its range \[0, 1\]"),
        ([{"function": "math", "on_timeout": -2}], "on_timeout of -2 is outside"),
        ([{"function": "math", "range": (1, 0)}], "the first must be below the second"),
    ],
)
def test_wrong_settings_are_named(suite: Suite, rewards: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        suite(*rewards)


def test_settings_reach_the_rule(sample: Make, suite: Suite) -> None:
    kwargs = {"correct": 2, "wrong": -1, "forms": ["hash", "last_number"], "tolerance": 0.1}
    one = suite({"function": "math", "kwargs": kwargs})
    assert [s.reward for s in one([sample("about 3.9", "4"), sample(r"\boxed{x}", "4")], 0)] == [2.0, -0.5]


def test_a_declared_range_wider_than_the_rules_hides_no_right_answer(sample: Make, suite: Suite) -> None:
    one = suite({"function": "math", "range": (-1, 2)})
    assert [one.solved(scored) for scored in one([sample("#### 4", "4"), sample("#### 5", "4")], 0)] == [True, False]


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, stoker.rl.rewards.suite, stoker.rl.rewards.symbolic; "
        "print([m for m in ('torch', 'sympy', 'math_verify', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- audit --------------------------------------------------------------------------------------


def prompts(sample: Make, *answers: str | None) -> list[Any]:
    return [
        sample("", answer, content=f"What is {i} and {i}?", prompt_id=f"data:{i}").prompt
        for i, answer in enumerate(answers, 40)
    ]


def bad(lines: list[AuditLine]) -> set[str]:
    return {line.trick or line.kind for line in lines if not line.ok}


@pytest.mark.parametrize("function", ["math", "exact"])
@pytest.mark.parametrize("answers", [("42", "-7", "1/2"), (r"\frac{\sqrt{3}}{2}", "x+1"), ("B", "C"), ("yes", "yes")])
def test_the_rules_that_ship_pass_their_audit(
    sample: Make, suite: Suite, function: str, answers: tuple[str, ...]
) -> None:
    one = suite({"function": function})
    lines = one.audit(prompts(sample, *answers))
    assert bad(lines) == set()
    assert {line.kind for line in lines} == {"right", "wrong", "unparsable", "gamed"}
    assert {line.prompt_id for line in lines} == {f"data:{40 + i}" for i in range(len(answers))}
    assert all(line.score == 1.0 for line in lines if line.kind == "right")
    assert one.metrics() == {} and one.extras() == []  # an audit is no step


def test_a_hole_in_a_users_reward_is_found(sample: Make, suite: Suite, write: Write) -> None:
    path = write("""
        def anywhere(completions, answer, **kw): return [float(a in c) for c, a in zip(completions, answer)]
        def same(completions, **kw): return [0.5 for _ in completions]
        def tagged(completions, answer, **kw):
            return [float(c == f"<answer>{a}</answer>") for c, a in zip(completions, answer)]
        def often(completions, answer, **kw): return [c.count(a) / 100 for c, a in zip(completions, answer)]
    """)

    def audit(name: str) -> set[str]:
        return bad(suite({"function": f"{path}:{name}"}).audit(prompts(sample, "42", "57")))

    assert audit("tagged") == set()
    assert {"lists candidates in one answer", "several answers, the last wrong"} <= audit("anywhere")
    assert "right" not in audit("anywhere")
    assert {"right", "wrong", "unparsable"} <= audit("same")
    assert "repeats the right answer" in audit("often")


def test_an_abstaining_reward_fails_the_right_line(sample: Make, suite: Suite, write: Write) -> None:
    path = write("def f(completions, **kw): return [None for _ in completions]")
    assert {"right", "wrong"} <= bad(suite({"function": f"{path}:f"}).audit(prompts(sample, "42")))


def test_what_a_warm_start_teaches_must_count_as_right(sample: Make, suite: Suite) -> None:
    def audit(function: str, *answers: str) -> set[str]:
        return bad(suite({"function": function}).audit(prompts(sample, *answers), taught=True))

    assert audit("exact", "42", "57") == set()
    assert audit("math", "#### 42", "#### 57") == set()
    assert audit("math", "42", "57") == {"as the warm start teaches it"}  # a bare number is no answer form


def test_rows_without_answers_are_not_audited(sample: Make, suite: Suite) -> None:
    one = suite({"function": "math"})
    assert one.audit(prompts(sample, None, "")) == []
    assert {line.prompt_id for line in one.audit(prompts(sample, None, "42", "7"), rows=1)} == {"data:41"}
