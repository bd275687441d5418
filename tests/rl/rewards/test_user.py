import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stoker.errors import RewardError
from stoker.rl.rewards import RewardSuite
from stoker.rl.types import Sample

Make = Callable[..., Sample]
Suite = Callable[..., RewardSuite]
Write = Callable[[str], str]


def values(suite: RewardSuite, samples: list[Sample], step: int = 5) -> list[float | None]:
    return [scored.reward for scored in suite(samples, step)]


# --- the four signatures -----------------------------------------------------------------------


def test_trl_signature_gets_everything_trl_gives(sample: Make, suite: Suite, write: Write) -> None:
    path = write("""
        def f(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, level, answer, **columns):
            assert prompts == ["What is it?"] * 2 and completions == ["ab", "c"]
            assert completion_ids == [[97, 98], [99]]
            assert trainer_state.global_step == 5
            assert level == [3, None] and answer == ["x", "y"] and columns["solution"] == ["x", "y"]
            assert columns["tags"] == [["p", "q"], None]
            log_extra("length", [len(c) for c in completions])
            log_metric("mean_length", 1.5)
            return [0.5, -1]
    """)
    one = suite({"function": f"{path}:f", "name": "mine"})
    samples = [
        sample("ab", "x", columns={"level": np.int64(3), "tags": np.array(["p", "q"])}),
        sample("c", "y", index=1),
    ]
    assert values(one, samples) == [0.5, -1.0]
    assert one.extras() == [{"id": "data:3/0", "mine/length": 2}, {"id": "data:3/1", "mine/length": 1}]
    assert one.extras() == []
    metrics = one.metrics()
    assert metrics["reward/mine/mean_length"] == 1.5
    assert metrics["reward/mine/mean"] == -0.25
    assert metrics["reward/mine/std"] == 0.75
    assert one.metrics() == {}


def test_conversational_prompts_get_conversational_completions(sample: Make, suite: Suite, write: Write) -> None:
    path = write("""
        def f(prompts, completions, **kwargs):
            assert prompts[0][-1]["content"] == "hello"
            return [len(c[0]["content"]) / 10 for c in completions if c[0]["role"] == "assistant"]
    """)
    assert values(
        suite({"function": f"{path}:f"}), [sample("abc", content=[{"role": "user", "content": "hello"}])]
    ) == [0.3]


def test_async_trl_function(sample: Make, suite: Suite, write: Write) -> None:
    path = write("""
        import asyncio
        async def f(completions, **kwargs):
            await asyncio.sleep(0)
            return [1.0 for _ in completions]
    """)
    assert values(suite({"function": f"{path}:f"}), [sample("a"), sample("b")]) == [1.0, 1.0]


def test_verl_signature_per_sample(sample: Make, suite: Suite, write: Write) -> None:
    path = write("""
        def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kw):
            assert (data_source, extra_info) == ("gsm8k", {"index": 4})
            good = solution_str == ground_truth
            return {"score": float(good), "length": len(solution_str)} if good else 0
    """)
    one = suite({"function": f"{path}:compute_score"})
    columns = {"data_source": "gsm8k", "extra_info": {"index": np.int32(4)}, "reward_model": {"ground_truth": "42"}}
    assert values(one, [sample("42", columns=columns), sample("4", columns=columns)]) == [1.0, 0.0]
    assert one.extras() == [{"id": "data:3/0", "compute_score/length": 2}]


def test_verl_function_without_the_optional_arguments(sample: Make, suite: Suite, write: Write) -> None:
    path = write("def f(solution_str, ground_truth, method='strict'): return float(method == 'flexible')")
    one = suite({"function": f"{path}:f", "kwargs": {"method": "flexible"}})
    assert values(one, [sample("4", "4")]) == [1.0]


def test_openrlhf_signature_with_tensors(sample: Make, suite: Suite, write: Write) -> None:
    path = write("""
        import torch
        def reward_func(queries, prompts, labels, **kw):
            assert queries == ["What is it?ab", "What is it?c"] and labels == ["x", "y"]
            rewards = torch.tensor([0.5, 1.0])
            return {"rewards": rewards, "scores": rewards, "extra_logs": {"dummy": rewards, "one": torch.tensor(3.0)}}
    """)
    one = suite({"function": f"{path}:reward_func"})
    assert values(one, [sample("ab", "x"), sample("c", "y")]) == [0.5, 1.0]
    metrics = one.metrics()
    assert (metrics["reward/reward_func/dummy"], metrics["reward/reward_func/one"]) == (0.75, 3.0)


def test_verifiers_arguments_by_name(sample: Make, suite: Suite, write: Write) -> None:
    path = write("""
        async def f(completion, answer, parser, state, info, task, prompt):
            assert state["answer"] == answer and info == {} and task == "data" and prompt == "What is it?"
            return 1.0 if parser.parse_answer(completion) == answer else 0.0
        def g(completion, answer):
            return float(completion[0]["content"] == answer)
    """)
    assert values(suite({"function": f"{path}:f"}), [sample(r"\boxed{4}", "4"), sample("5", "4")]) == [1.0, 0.0]
    chat = [{"role": "user", "content": "hello"}]
    assert values(suite({"function": f"{path}:g"}), [sample("4", "4", content=chat)]) == [1.0]


def test_async_per_sample_functions_wait_together(sample: Make, suite: Suite, write: Write) -> None:
    path = write("""
        import asyncio
        async def f(completion, answer):
            await asyncio.sleep(0.5)
            return len(completion) / 10
    """)
    one = suite({"function": f"{path}:f"})
    start = time.monotonic()
    assert values(one, [sample("x" * n) for n in range(8)]) == [n / 10 for n in range(8)]
    assert time.monotonic() - start < 3  # one after the other: 4 s


def test_signature_can_be_forced(sample: Make, suite: Suite, write: Write) -> None:
    path = write("""
        def f(*args, **kwargs): return [len(kwargs["completions"][0]) / 10]
        def g(a, b, c): return [len(a[0]) / 100]
    """)
    with pytest.raises(RewardError, match=r"don't tell which framework.*set signature to one of"):
        suite({"function": f"{path}:f"})
    assert values(suite({"function": f"{path}:f", "signature": "trl"}), [sample("abc")]) == [0.3]
    assert values(suite({"function": f"{path}:g", "signature": "openrlhf"}), [sample("abc")]) == [0.14]


def test_a_factory_is_called_once_with_its_kwargs(sample: Make, suite: Suite, write: Write) -> None:
    path = write("""
        def get_reward(scale):
            def reward(completions, **kwargs): return [scale * len(c) for c in completions]
            return reward
        def get_nothing(scale): return scale
    """)
    assert values(suite({"function": f"{path}:get_reward", "kwargs": {"scale": 0.25}}), [sample("abc")]) == [0.75]
    with pytest.raises(RewardError, match="must be a factory, but kwargs lacks 'scale'"):
        suite({"function": f"{path}:get_reward"})
    with pytest.raises(RewardError, match="takes no argument 'scael'; did you mean 'scale'"):
        suite({"function": f"{path}:get_reward", "kwargs": {"scale": 1, "scael": 2}})
    with pytest.raises(RewardError, match="returned int, not a reward function"):
        suite({"function": f"{path}:get_nothing", "kwargs": {"scale": 1}})


def test_rewards_that_ship_with_trl(sample: Make, suite: Suite) -> None:
    chat = [{"role": "user", "content": "half of a half?"}]
    texts = [r"<think>so</think>\boxed{\frac{1}{4}}", r"\boxed{\frac{1}{3}}", "x" * 90]
    samples = [sample(text, r"\frac{1}{4}", content=chat, index=i) for i, text in enumerate(texts)]
    one = suite(
        {"function": "trl.rewards:accuracy_reward"},
        {"function": "trl.rewards:think_format_reward"},
        {
            "function": "trl.rewards:get_soft_overlong_punishment",
            "kwargs": {"max_completion_len": 100, "soft_punish_cache": 20},
        },
        {"function": "trl.rewards:get_repetition_penalty_reward", "kwargs": {"ngram_size": 3}},
        {"function": "trl.rewards:get_cosine_scaled_reward", "kwargs": {"max_len": 180}},
        {"function": "trl.rewards:reasoning_accuracy_reward"},
    )
    scored = one(samples, 0)
    found = {name: [s.rewards[name] for s in scored] for name in scored[0].rewards}
    assert found["accuracy_reward"] == [1.0, 0.0, 0.0]
    assert found["think_format_reward"] == [1.0, 0.0, 0.0]
    assert found["get_soft_overlong_punishment"] == [0.0, 0.0, -0.5]
    assert found["get_repetition_penalty_reward"][2] == pytest.approx(-87 / 88)  # 1 of 88 trigrams is new
    assert found["get_cosine_scaled_reward"][2] == pytest.approx(-0.75)  # half way from -1 to -0.5
    assert found["reasoning_accuracy_reward"] == [1.0, 0.0, 0.0]
    extras = one.extras()
    assert [extra["accuracy_reward/solution"] for extra in extras] == [r"\frac{1}{4}"] * 3


# --- contract -----------------------------------------------------------------------------------


def test_a_missing_column_is_named(sample: Make, suite: Suite, write: Write) -> None:
    path = write("def f(completions, difficulty): return [0.0 for _ in completions]")
    with pytest.raises(
        RewardError, match=r"needs 'difficulty', which is no column of the task's rows \(columns: level\)"
    ):
        suite({"function": f"{path}:f"})([sample("a", columns={"level": 1})], 0)


def test_failure_09_a_reward_that_raises_stops_with_traceback_and_sample(
    sample: Make, suite: Suite, write: Write
) -> None:
    path = write("""
        def batch(completions, **kw): return [1 / len(c) for c in completions]
        def single(solution_str, ground_truth): return 1 / len(solution_str)
    """)
    samples = [sample(text, index=i) for i, text in enumerate(["ab", "", "abcd"])]
    for name in ("batch", "single"):
        with pytest.raises(RewardError) as caught:
            suite({"function": f"{path}:{name}"})(samples, 7)
        message = str(caught.value)
        assert "raised on 1 of 3 samples of step 7, more than max_error_rate = 0 allows: data:3/1" in message
        assert "ZeroDivisionError" in message and "1 / len(" in message


def test_failure_09_tolerated_errors_abstain_and_are_never_zero(sample: Make, suite: Suite, write: Write) -> None:
    path = write("""
        def batch(completions, **kw):
            return [len(completions) / (10 * len(c)) for c in completions]  # sees how many there are
        def single(solution_str, ground_truth): return 1 / len(solution_str)
    """)
    samples = [sample(text, index=i) for i, text in enumerate(["ab", "", "abcd"])]
    one = suite({"function": f"{path}:batch", "max_error_rate": 0.4})
    assert values(one, samples) == [0.1, None, 0.05]  # the two that remain are still scored together
    assert one.metrics()["reward/batch/errors"] == pytest.approx(1 / 3)
    assert values(suite({"function": f"{path}:single", "max_error_rate": 0.4}), samples) == [0.5, None, 0.25]
    with pytest.raises(RewardError, match=r"more than max_error_rate = 0\.3"):
        values(suite({"function": f"{path}:single", "max_error_rate": 0.3}), samples)


def test_failure_09_raising_only_on_the_batch_says_so(sample: Make, suite: Suite, write: Write) -> None:
    path = write("""
        def f(completions, **kw):
            assert len(completions) == 1, "one at a time"
            return [0.0]
    """)
    with pytest.raises(
        RewardError, match=r"raised on the 2 samples of step 0 together, on none of them alone(.|\n)*one at a"
    ):
        suite({"function": f"{path}:f"})([sample("a"), sample("b", index=1)], 0)


@pytest.mark.parametrize("arguments", ["solution_str, ground_truth", "completions, **columns"])
def test_a_process_killed_once_from_outside_is_no_fault_of_the_function(
    sample: Make, suite: Suite, write: Write, arguments: str
) -> None:
    path = write(f"""
        import os, pathlib, signal
        def f({arguments}):
            mark = pathlib.Path(__file__ + ".killed")
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return {"1.0" if "solution" in arguments else "[1.0] * len(completions)"}
    """)
    samples = [sample(text, index=i) for i, text in enumerate(["a", "b", "c"])]
    assert values(suite({"function": f"{path}:f"}), samples) == [1.0, 1.0, 1.0]


def test_failure_09_a_crash_of_the_process_is_an_error_with_the_sample(
    sample: Make, suite: Suite, write: Write
) -> None:
    path = write("""
        import os, signal
        def f(solution_str, ground_truth):
            if solution_str == "die": os.kill(os.getpid(), signal.SIGSEGV)
            return 1.0
    """)
    samples = [sample(text, index=i) for i, text in enumerate(["ok", "die", "ok"])]
    assert values(suite({"function": f"{path}:f", "max_error_rate": 0.5}), samples) == [1.0, None, 1.0]
    with pytest.raises(RewardError, match=r"data:3/1(.|\n)*process that runs it died: killed by SIGSEGV"):
        suite({"function": f"{path}:f"})(samples, 0)


def test_failure_10_a_hanging_sample_is_killed_counted_and_scored(sample: Make, suite: Suite, write: Write) -> None:
    path = write("""
        import re
        def f(solution_str, ground_truth):
            if solution_str == "hang": re.match(r"(a+)+$", "a" * 60 + "b")  # holds the interpreter's lock
            return 1.0
    """)
    samples = [sample(text, index=i) for i, text in enumerate(["ok", "hang", "ok"])]
    one = suite({"function": f"{path}:f", "timeout_s": 0.5, "on_timeout": -0.5})
    start = time.monotonic()
    assert values(one, samples) == [1.0, -0.5, 1.0]
    assert time.monotonic() - start < 30
    assert one.metrics()["reward/f/timeouts"] == pytest.approx(1 / 3)
    assert values(suite({"function": f"{path}:f", "timeout_s": 0.5}), samples) == [1.0, None, 1.0]


def test_failure_10_a_hanging_batch_names_function_and_place(sample: Make, suite: Suite, write: Write) -> None:
    path = write("""
        import time
        def stuck(): time.sleep(1000)
        def f(completions, **kw): stuck()
    """)
    samples = [sample("a"), sample("b", index=1)]
    with pytest.raises(RewardError) as caught:
        suite({"function": f"{path}:f", "timeout_s": 0.25})(samples, 0)
    message = str(caught.value)
    assert "did not return within 0.5 s (2 samples x timeout_s = 0.25) and was killed" in message
    assert "in stuck" in message and "on_timeout" in message
    assert values(suite({"function": f"{path}:f", "timeout_s": 0.25, "on_timeout": -1}), samples) == [-1.0, -1.0]


def test_failure_11_none_abstains(sample: Make, suite: Suite, write: Write) -> None:
    path = write("def f(completions, **kw): return [None if c == 'skip' else 0.5 for c in completions]")
    one = suite({"function": f"{path}:f"})
    assert values(one, [sample("a"), sample("skip", index=1)]) == [0.5, None]
    metrics = one.metrics()
    assert (metrics["reward/f/mean"], metrics["reward/f/abstained"]) == (0.5, 0.5)


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_failure_12_not_finite_names_function_and_sample(sample: Make, suite: Suite, write: Write, bad: str) -> None:
    path = write(f"def f(completions, **kw): return [0.0, float('{bad}')]")
    with pytest.raises(RewardError, match=rf"'f' \(.*:f\): sample data:3/1: returned {bad}; return None to abstain"):
        suite({"function": f"{path}:f"})([sample("a"), sample("b", index=1)], 0)


@pytest.mark.parametrize(("expression", "got"), [("[1.0]", 1), ("[]", 0), ("[0.0] * 65", 65)])
def test_failure_13_wrong_length(sample: Make, suite: Suite, write: Write, expression: str, got: int) -> None:
    path = write(f"def f(completions, **kw): return {expression}")
    with pytest.raises(RewardError, match=f"expected 64 values, one a sample, got {got}"):
        suite({"function": f"{path}:f"})([sample("a", index=i) for i in range(64)], 0)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1.0", "expected a list of 2 numbers, got float: 1.0"),
        ("None", "expected a list of 2 numbers, got NoneType"),
        ("'ab'", "expected a list of 2 numbers, got str"),
        ("{'reward': [1, 2]}", "got dict without 'rewards'"),
        ("(x for x in [1.0, 1.0])", "expected a list of 2 numbers, got generator"),
        ("[0.0, '1.0']", "sample data:3/1: expected a number or None, got str: '1.0'"),
        ("[0.0, [1.0]]", r"sample data:3/1: expected a number or None, got list: \[1.0\]"),
        ("[0.0, 1j]", "got complex"),
        ("[0.0, Fraction(1, 3)]", "got Fraction"),
        ("np.zeros((2, 1))", "got ndarray"),
    ],
)
def test_failure_14_wrong_type(sample: Make, suite: Suite, write: Write, expression: str, message: str) -> None:
    source = "import numpy as np\nfrom fractions import Fraction\n"
    path = write(source + f"def f(completions, **kw): return {expression}")
    with pytest.raises(RewardError, match=message):
        suite({"function": f"{path}:f"})([sample("a"), sample("b", index=1)], 0)


@pytest.mark.parametrize(
    "expression",
    [
        "[True, False]",
        "(1, 0)",
        "np.array([1.0, 0.0])",
        "[np.float32(1), np.bool_(False)]",
        "[np.array(1), np.int64(0)]",
    ],
)
def test_failure_14_exact_coercions(sample: Make, suite: Suite, write: Write, expression: str) -> None:
    path = write(f"import numpy as np\ndef f(completions, **kw): return {expression}")
    assert values(suite({"function": f"{path}:f"}), [sample("a"), sample("b", index=1)]) == [1.0, 0.0]


def test_a_value_outside_its_range_is_never_scaled(sample: Make, suite: Suite, write: Write) -> None:
    path = write("def f(completions, **kw): return [5 for _ in completions]")
    with pytest.raises(RewardError, match=r"data:3/0: returned 5, outside its range \[-1, 1\]; set range to"):
        suite({"function": f"{path}:f"})([sample("a")], 0)
    assert values(suite({"function": f"{path}:f", "range": (0, 10)}), [sample("a")]) == [5.0]


def test_a_users_print_and_input_leave_the_protocol_alone(sample: Make, suite: Suite, write: Write) -> None:
    path = write("""
        import sys
        def f(completions, **kw):
            print("hello"); sys.stdout.flush()
            assert sys.stdin.read() == ""
            return [1.0 for _ in completions]
    """)
    assert values(suite({"function": f"{path}:f"}), [sample("a")]) == [1.0]


def test_a_column_that_cannot_be_sent_is_named(sample: Make, suite: Suite, write: Write) -> None:
    path = write("def f(completions, **kw): return [1.0 for _ in completions]")
    with pytest.raises(RewardError, match="prompt data:3: column 'raw' holds a bytes"):
        suite({"function": f"{path}:f"})([sample("a", columns={"raw": b"x"})], 0)


def test_wrong_paths_fail_at_build(suite: Suite, write: Write) -> None:
    path = write("import absent_dependency\ndef f(completions): ...")
    with pytest.raises(RewardError, match=r"failed to load\n(.|\n)*No module named 'absent_dependency'"):
        suite({"function": f"{path}:f"})
    path = write("def reward_length(completions): ...")
    with pytest.raises(RewardError, match="has no 'reward_lenght'; did you mean 'reward_length'"):
        suite({"function": f"{path}:reward_lenght"})


def test_log_extra_of_wrong_length(sample: Make, suite: Suite, write: Write) -> None:
    path = write("""
        def f(completions, log_extra, **kw):
            log_extra("x", [1])
            return [0.0, 0.0]
    """)
    with pytest.raises(RewardError, match=r"log_extra\('x', ...\): expected 2 values, got 1"):
        suite({"function": f"{path}:f"})([sample("a"), sample("b", index=1)], 0)


def test_state_of_the_module_lives_from_step_to_step(sample: Make, suite: Suite, write: Write) -> None:
    path = write("""
        calls = 0
        def f(completions, **kw):
            global calls
            calls += 1
            return [calls / 10]
    """)
    one: Any = suite({"function": f"{path}:f"})
    assert [values(one, [sample("a")]), values(one, [sample("a")])] == [[0.1], [0.2]]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("return [10**400] * len(completions)", "OverflowError"),
    ],
)
def test_failure_09_an_exit_in_a_reward_is_its_error_with_a_traceback(
    sample: Make, suite: Suite, write: Write, body: str, expected: str
) -> None:
    path = write(f"def batch(completions, **kw): {body}")
    with pytest.raises(RewardError, match=expected):
        suite({"function": f"{path}:batch"})([sample("a")], 0)
