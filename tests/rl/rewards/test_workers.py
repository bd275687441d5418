"""Rewards on several processes: the same words as from one, whoever answers and whenever."""

import datetime
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from stoker.errors import ConfigError, RewardError
from stoker.rl.rewards import RewardSuite
from stoker.rl.rewards.rules import Math
from stoker.rl.rewards.user import User
from stoker.rl.rewards.workers import Workers
from stoker.rl.sampling import draw
from stoker.rl.types import Prompt, Request, Sample, SamplingParams

from .test_child import gone, pid_of

Make = Callable[..., Sample]
Suite = Callable[..., RewardSuite]
Write = Callable[[str], str]


def workers_of(suite: RewardSuite) -> Workers:
    score = suite.parts[0].score
    assert isinstance(score, Workers)
    return score


def pids(suite: RewardSuite) -> list[int]:
    return [pid_of(score._child) for score in workers_of(suite)._scores if isinstance(score, User)]


def groups(sample: Make, *texts: Sequence[str]) -> list[list[Sample]]:
    """One group for each list of texts: prompts data:0, data:1, ..."""
    return [
        [sample(text, "4", index=i, prompt_id=f"data:{number}") for i, text in enumerate(found)]
        for number, found in enumerate(texts)
    ]


def flat(found: Sequence[Sequence[Sample]]) -> list[Sample]:
    return [one for group in found for one in group]


# --- the same as without workers ---------------------------------------------------------------


@pytest.mark.parametrize("early", ["all", "backwards", "some", "none"])
def test_scores_extras_and_metrics_are_those_of_one_process(
    sample: Make, suite: Suite, write: Write, early: str
) -> None:
    path = write("""
        import time
        def batch(completions, trainer_state, log_extra, log_metric, level, **columns):
            assert trainer_state.global_step == 7
            time.sleep(0.02 * (5 - level[0]))  # later groups are ready first
            log_extra("length", [len(c) for c in completions])
            log_metric("mean_length", sum(map(len, completions)) / len(completions))
            return [None if c == "skip" else len(c) / 10 for c in completions]
        def single(solution_str, ground_truth):
            return {"score": len(solution_str) / 20, "seen": ground_truth}
        def openrlhf(queries, prompts, labels):
            return {"rewards": [0.5] * len(queries), "extra_logs": {"labels": [float(x) for x in labels]}}
    """)
    found = groups(sample, ["a", "bcd"], ["skip", "ef"], ["ghij", ""], ["k", "l"], ["mnopqr", "s"])
    found = [
        [replace(one, prompt=replace(one.prompt, columns={"level": number})) for one in group]
        for number, group in enumerate(found)
    ]
    rewards = [{"function": f"{path}:{name}", "weight": 0.3} for name in ("batch", "single", "openrlhf")]
    one, many = suite(*rewards), suite(*({**reward, "workers": 3} for reward in rewards))
    handed = {"all": found, "backwards": found[::-1], "some": [found[3], found[0]], "none": []}[early]
    for group in handed:
        many.begin(group, 7)
    wanted, got = one(flat(found), 7), many(flat(found), 7)
    assert [scored.rewards for scored in got] == [scored.rewards for scored in wanted]
    assert [scored.reward for scored in got] == [scored.reward for scored in wanted]
    assert got[2].rewards == {"batch": None, "single": 0.2, "openrlhf": 0.5}
    assert many.extras() == one.extras()
    assert many.metrics() == pytest.approx(one.metrics(), rel=1e-15)


def test_a_group_is_called_alone_and_only_once(sample: Make, suite: Suite, write: Write) -> None:
    path = write("""
        from pathlib import Path
        def f(completions, **columns):
            with (Path(__file__).parent / "calls").open("a") as file: file.write(" ".join(completions) + "\\n")
            return [len(completions) / 10] * len(completions)
    """)
    found = groups(sample, ["a", "b"], ["c"], ["d", "e", "f"])
    many = suite({"function": f"{path}:f", "workers": 1})
    many.begin(found[1], 0)
    scored = many([found[2][0], *found[0], *found[1], *found[2][1:]], 0)  # in whatever order they come
    assert [one.reward for one in scored] == [0.3, 0.2, 0.2, 0.1, 0.3, 0.3]
    calls = (Path(path).parent / "calls").read_text().splitlines()
    assert calls == ["c", "d e f", "a b"]  # handed over first, then in the samples' order


def test_samples_of_an_abandoned_draw_answer_no_other(sample: Make, suite: Suite, write: Write) -> None:
    path = write("def f(completions, **columns): return [len(c) / 10 for c in completions]")
    many = suite({"function": f"{path}:f", "workers": 2})
    ((abandoned, other),) = groups(sample, ["long", "longer"])
    many.begin([abandoned, other], 0)
    assert [one.reward for one in many([sample("x", prompt_id="data:0"), other], 0)] == [0.1, 0.6]


def test_math_asks_its_algebra_of_the_workers(sample: Make, suite: Suite) -> None:
    texts = [r"\boxed{1+x}", r"\boxed{x}", r"\boxed{x+1}", "no answer"]
    found = [[sample(text, "x+1", prompt_id=f"data:{i}")] for i, text in enumerate(texts)]
    one, many = suite({"function": "math"}), suite({"function": "math", "workers": 2})
    for group in found:
        many.begin(group, 0)
    assert [s.reward for s in many(flat(found), 0)] == [1.0, 0.0, 1.0, -0.5]
    assert one(flat(found), 0) and many.metrics() == one.metrics()
    assert many.parts[0].score.rule and many.parts[0].score.range == (-0.5, 1.0)
    assert all(isinstance(score, Math) for score in workers_of(many)._scores)


# --- what goes wrong ----------------------------------------------------------------------------

FAULTS = """
    import os, signal, time
    def f(solution_str, ground_truth):
        if solution_str == "raise": raise ValueError("bad " + ground_truth)
        if solution_str == "die": os.kill(os.getpid(), signal.SIGKILL)
        if solution_str == "hang": time.sleep(600)
        return float("nan") if solution_str == "nan" else len(solution_str) / 10
    def batch(completions, **columns): return [f(c, "4") for c in completions]
"""
TEXTS = (["ab", "raise"], ["c", "d"], ["die", "ef"], ["hang", "g"], ["h", "ijk"])


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", ["f", "batch"])
def test_failure_09_and_10_with_workers_as_without(
    sample: Make, suite: Suite, write: Write, workers: int, name: str
) -> None:
    path = write(FAULTS)
    reward = {"function": f"{path}:{name}", "timeout_s": 1, "max_error_rate": 0.2}
    many = suite({**reward, "workers": workers, "on_timeout": -0.5})
    found = groups(sample, *TEXTS)
    for group in found[::-1]:
        many.begin(group, 0)
    hung = [-0.5, -0.5] if name == "batch" else [-0.5, 0.1]  # a batch is one group: it hangs as a whole
    assert [one.reward for one in many(flat(found), 0)] == [0.2, None, 0.1, 0.1, None, 0.2, *hung, 0.1, 0.3]
    metrics = many.metrics()
    assert metrics[f"reward/{name}/errors"] == pytest.approx(0.2)
    assert metrics[f"reward/{name}/timeouts"] == pytest.approx(0.2 if name == "batch" else 0.1)
    if name == "f":  # per sample, without workers: the very same
        one = suite({**reward, "on_timeout": -0.5})
        assert [s.reward for s in one(flat(found), 0)] == [0.2, None, 0.1, 0.1, None, 0.2, *hung, 0.1, 0.3]
        assert one.metrics() == metrics


def test_failure_09_and_10_with_workers_the_first_in_order_is_named(sample: Make, suite: Suite, write: Write) -> None:
    path = write(FAULTS)
    found = groups(sample, ["a", "raise"], ["b", "die"], ["nan", "c"], ["nan", "d"])
    many = suite({"function": f"{path}:f", "workers": 2})
    with pytest.raises(RewardError) as caught:
        many(flat(found[:2]), 7)
    message = str(caught.value)
    assert "raised on 2 of 4 samples of step 7, more than max_error_rate = 0 allows: data:0/1, data:1/1" in message
    assert "ValueError: bad 4" in message
    for group in found[::-1]:
        many.begin(group, 8)
    with pytest.raises(RewardError, match="sample data:2/0: returned nan; return None to abstain"):
        many(flat(found), 8)
    stuck = suite({"function": f"{path}:batch", "workers": 2, "timeout_s": 0.5})
    with pytest.raises(RewardError, match=r"did not return within 1 s \(2 samples x timeout_s = 0\.5\)"):
        stuck(flat(groups(sample, ["a"], ["hang", "b"])), 0)


def test_failure_09_a_worker_killed_from_outside_is_replaced_and_asked_again(
    sample: Make, suite: Suite, write: Write
) -> None:
    path = write("""
        import pathlib, time
        def f(solution_str, ground_truth):
            mark = pathlib.Path(__file__ + ".seen")
            if solution_str == "wait" and not mark.exists():
                mark.touch()
                time.sleep(60)
            return 1.0
    """)
    found = groups(sample, ["wait"], ["a"], ["b"])
    many = suite({"function": f"{path}:f", "workers": 1, "timeout_s": 50})
    (first,) = pids(many)
    many.begin(found[0], 0)
    threading.Timer(1.0, os.kill, (first, signal.SIGKILL)).start()
    assert [one.reward for one in many(flat(found), 0)] == [1.0, 1.0, 1.0]
    assert many.metrics()["reward/f/errors"] == 0
    assert pids(many) != [first]


def test_failure_10_closing_waits_for_no_worker(sample: Make, suite: Suite, write: Write) -> None:
    path = write("import time\ndef f(solution_str, ground_truth): time.sleep(600)")
    many = suite({"function": f"{path}:f", "workers": 2, "timeout_s": 500})
    running = pids(many)
    for group in groups(sample, ["a", "b"], ["c"], ["d"]):
        many.begin(group, 0)
    started = time.monotonic()
    many.close()
    assert time.monotonic() - started < 20
    assert len(running) == 2 and all(map(gone, running))
    assert not any(thread.name.startswith("stoker-reward") for thread in threading.enumerate())


def test_wrong_settings_fail_at_build_and_leave_nothing_running(suite: Suite, write: Write) -> None:
    with pytest.raises(RewardError, match="has no 'absent'"):
        suite({"function": f"{write('def f(completions): ...')}:absent", "workers": 3})
    assert not any(thread.name.startswith("stoker-reward") for thread in threading.enumerate())
    with pytest.raises(ConfigError, match="'exact' only compares texts, which no process speeds up: leave workers out"):
        suite({"function": "exact", "workers": 1})
    kwargs = {"since": datetime.date(2020, 1, 1)}
    path = write("def f(completions, since, **kw): return [1.0]")
    with pytest.raises(RewardError, match="reward 'f': kwargs holds a date, which a reward function can't be given"):
        suite({"function": f"{path}:f", "kwargs": kwargs, "workers": 2})


def test_a_column_that_cannot_be_sent_is_named(sample: Make, suite: Suite, write: Write) -> None:
    path = write("def f(completions, **kw): return [1.0 for _ in completions]")
    with pytest.raises(RewardError, match="prompt data:3: column 'raw' holds a bytes"):
        suite({"function": f"{path}:f", "workers": 2})([sample("a", columns={"raw": b"x"})], 0)


# --- beside the sampling ------------------------------------------------------------------------


class Slow:
    """A sampler that draws group after group, waiting before each sample as for a device: not this process's time."""

    def __init__(self, sample: Make, wait: Callable[[int], None]) -> None:
        self.sample, self.wait = sample, wait

    def submit(self, requests: Sequence[Request]) -> None:
        self.requests = list(requests)

    def collect(self) -> Iterator[Sample]:
        for number, one in enumerate(self.requests):
            self.wait(number)
            yield self.sample("text", "4", index=one.index, prompt_id=one.prompt.id)


def drawn(sampler: Slow, prompts: int, suite: RewardSuite) -> list[Sample]:
    """Two samples of each prompt, handed over as the loop does."""
    asked = [Prompt(f"data:{i}", (1,), "p", "4") for i in range(prompts)]
    return draw(sampler, asked, 2, SamplingParams(), 1, group_done=partial(suite.begin, step=0))  # type: ignore[arg-type]


def await_file(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} was never written"
        time.sleep(0.01)


def test_sampling_can_wait_for_the_reward_of_a_group_it_has_ended(
    sample: Make, suite: Suite, write: Write, tmp_path: Path
) -> None:
    path = write(f"""
        from pathlib import Path
        def f(completions, **columns):
            Path({str(tmp_path)!r}, "scored").touch()
            return [1.0] * len(completions)
    """)
    many = suite({"function": f"{path}:f", "workers": 1})
    sampler = Slow(sample, lambda number: await_file(tmp_path / "scored") if number == 2 else None)
    assert [one.reward for one in many(drawn(sampler, 2, many), 0)] == [1.0] * 4


def test_rewards_and_sampling_take_less_than_one_after_the_other(sample: Make, suite: Suite, write: Write) -> None:
    path = write("""
        import time
        def f(completions, log_metric, **columns):
            started = time.monotonic()
            time.sleep(0.05)
            log_metric("seconds", time.monotonic() - started)
            return [1.0] * len(completions)
    """)
    many = suite({"function": f"{path}:f", "workers": 1})

    def share() -> float:
        """Seconds of both over the seconds that each took, added; sampling 20 groups takes 1 s, as their rewards do."""
        began = time.monotonic()
        samples = drawn(Slow(sample, lambda number: time.sleep(0.025)), 20, many)
        sampling = time.monotonic() - began
        many(samples, 0)
        return (time.monotonic() - began) / (sampling + 20 * many.metrics()["reward/f/seconds"])

    assert min(share() for _ in range(3)) < 0.75  # 0.53 on an idle machine; the best of three, for a busy one


def test_workers_work_side_by_side(sample: Make, suite: Suite, write: Write) -> None:
    path = write("""
        import time
        from pathlib import Path
        def f(completions, **columns):
            here, other = (Path(__file__).parent / name for name in (completions[0], completions[1]))
            here.touch()
            while not other.exists(): time.sleep(0.01)  # only another process can write it
            return [1.0] * len(completions)
    """)
    many = suite({"function": f"{path}:f", "workers": 2, "timeout_s": 30})
    found = groups(sample, ["one", "two"], ["two", "one"])
    assert [one.reward for one in many(flat(found), 0)] == [1.0] * 4
