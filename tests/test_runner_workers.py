"""Runs whose rewards work beside the sampling: the same run, stopped and resumed as any other."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.config.schema import RunConfig
from stoker.errors import ConfigError
from stoker.record.read import read_samples
from tests.runs import comparable, quiet, short_run

REWARDS = '''
"""Reward functions of the tests."""
import os, random, signal, time

def low_digits(solution_str, ground_truth):
    """Share of characters that are digits below 5, at whatever moment."""
    time.sleep(random.random() / 100)
    return {"score": sum(c in "01234" for c in solution_str) / max(len(solution_str), 1), "truth": ground_truth}

def differing(completions, log_extra, **columns):
    """Compares the samples of one prompt."""
    log_extra("times", [completions.count(text) for text in completions])
    return [-0.1 * (completions.count(text) > 1) for text in completions]

def hang(completions, **columns):
    try:
        open(__file__ + ".signalled", "x").close()  # by one of the workers: a second signal would quit at once
        os.kill(os.getppid(), signal.SIGTERM)
    except FileExistsError:
        pass
    time.sleep(600)
'''


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """make_config(workers, "a.b=c", ...): a run of three small steps; the second reward always has workers."""
    (tmp_path / "rewards.py").write_text(REWARDS)

    def make(workers: int, *overrides: str, function: str = "low_digits") -> RunConfig:
        file = tmp_path / "rewards.py"
        base: dict[str, Any] = {
            "name": f"workers{workers}",
            "validation": {"holdout": 8, "every_samples": 16},
            "sampling": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 4, "concurrent_samples": 5},
            "rewards": [
                {"function": f"{file}:{function}", "workers": workers, "timeout_s": 60},
                {"function": f"{file}:differing", "workers": 2},
            ],
            "kl": {"coefficient": 0.0},
            "stop": {"steps": 3},
        }
        return short_run(tmp_path, *overrides, **base)

    return make


def records(folder: Path) -> list[Any]:
    """All that a run recorded of its steps and samples, but for time and memory."""
    samples = [read_samples(file) for file in sorted((folder / "samples").glob("step_*.jsonl.gz"))]
    return [comparable(folder), samples]


@pytest.mark.parametrize("algorithm", ["grpo", "remax", "dapo"])
def test_a_run_with_workers_is_the_run_without(make_config: Callable[..., RunConfig], algorithm: str) -> None:
    """Also where a greedy answer is part of the group (remax), and over several draws a step (dapo)."""
    alone, beside = (quiet(make_config(n, f"algorithm.name={algorithm}")).folder for n in (0, 3))
    assert records(beside) == records(alone)
    metrics, samples = records(beside)
    assert len(metrics) == 4 and samples[0][0]["low_digits/truth"]


def test_a_resume_with_workers_is_the_run_never_stopped(make_config: Callable[..., RunConfig]) -> None:
    whole = quiet(make_config(2, "name=whole"))
    quiet(make_config(2, "name=cut", "stop.steps=1"))
    resumed = quiet(make_config(3, "name=cut"), resume=True)  # another number of workers is no other run
    assert records(resumed.folder) == records(whole.folder)
    with pytest.raises(ConfigError, match=r"rewards\.0\.workers: 3 -> 0 \(alters the run\)"):
        quiet(make_config(0, "name=cut", "stop.steps=4"), resume=True)


@pytest.mark.parametrize("holdout", [0, 8])
def test_failure_03_a_signal_does_not_wait_for_workers_that_hang(
    make_config: Callable[..., RunConfig], holdout: int
) -> None:
    config = make_config(2, f"validation.holdout={holdout}", function="hang")
    started = time.monotonic()
    assert quiet(config).exit_code == 143
    assert time.monotonic() - started < 30
