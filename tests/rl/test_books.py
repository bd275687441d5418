"""The books of a step, on a run of which only what they need is there."""

from types import SimpleNamespace
from typing import Any

import pytest

from stoker.config.load import from_dict
from stoker.errors import RunError
from stoker.rl.books import Books
from stoker.rl.kl import KlState
from stoker.rl.run import Run
from stoker.rl.state import RunState
from stoker.rl.types import TrainBatch

NAN = float("nan")


@pytest.fixture
def run() -> Any:
    said: list[str] = []
    nothing = SimpleNamespace(event=lambda *a, **k: None, bad_batch=lambda *a: None)
    return SimpleNamespace(
        config=from_dict({"name": "run", "task": {"sources": [{"path": "x.jsonl"}]}}),
        state=RunState(kl=KlState(0.0)),
        clock=SimpleNamespace(elapsed=lambda: 0.0, totals=dict),
        recorder=nothing,
        display=SimpleNamespace(warn=said.append, say=said.append),
        said=said,
        _said=set(),
    )


def test_failure_07_a_critic_that_is_not_finite_counts_though_the_policy_is(run: Any) -> None:
    books = Books(run)
    gradient = {"optim/loss": 0.1, "critic/loss": 0.2}
    step = {"optim/skipped": 1.0, "optim/grad_norm": 1.0, "critic/grad_norm": NAN}
    books.update(TrainBatch(()), gradient, step)
    books.update(TrainBatch(()), gradient, step)
    assert "NaN or infinity in loss or gradient (optim/loss 0.1, critic/loss 0.2, " in run.said[0]
    with pytest.raises(RunError, match="3 updates in a row"):
        books.update(TrainBatch(()), gradient, step)


def test_failure_08_a_spike_while_the_critic_warms_up_is_no_nan(run: Any) -> None:
    """There the policy has no gradient, so no norm either."""
    books = Books(run)
    for _ in range(4):
        books.update(TrainBatch(()), {"critic/loss": 0.2}, {"optim/skipped": 1.0, "critic/grad_norm": 1e6})
    assert "step 1: gradient spike (critic/loss 0.2, critic/grad_norm 1e+06): no update" in run.said[0]


def test_failure_19_notes_are_told_once_also_those_that_come_later(run: Any) -> None:
    Run.tell(run, ["padded"])
    Run.tell(run, ["padded", "memory ran out: tokens_per_microbatch 4096 -> 2048"])
    assert run.said == ["padded", "memory ran out: tokens_per_microbatch 4096 -> 2048"]
