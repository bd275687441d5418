"""A resume shows what changed and which changes break the run."""

import pytest

from stoker.config.changes import Change, diff
from stoker.config.load import from_dict

BASE = {"name": "a", "task": {"sources": [{"path": "x"}]}, "rewards": [{"function": "math"}]}


def test_equal_configs_have_no_changes() -> None:
    assert diff(from_dict(BASE), from_dict(BASE)) == []


@pytest.mark.parametrize(
    "override",
    [
        "model.path=other",
        "seed=1",
        "task.system_prompt=x",
        "sampling.prompts_per_step=32",
        "sampling.samples_per_prompt=16",
        "algorithm.clip_high=0.3",
        "optimizer.name=sgd",
        "optimizer.learning_rate=1e-5",
        "lora.rank=8",
        "validation.holdout=5",
        "rewards.0.weight=2",
    ],
)
def test_failure_30_changes_that_break_the_run(override: str) -> None:
    (change,) = diff(from_dict(BASE), from_dict(BASE, [override]))
    assert change.breaks
    assert change.path == override.split("=")[0]
    assert "(alters the run)" in str(change)


@pytest.mark.parametrize(
    "override",
    [
        "stop.steps=500",
        "record.samples_every_steps=5",
        "checkpoint.keep=4",
        "validation.every_samples=100",
        "validation.sets.0.path=v",
        "update.tokens_per_microbatch=2048",
        "update.activation_gib=2",
        "sampling.concurrent_samples=8",
        "model.threads=1",
        "lora.checkpoint=merged",
        "rewards.0.timeout_s=1",
    ],
)
def test_failure_30_harmless_changes(override: str) -> None:
    (change,) = diff(from_dict(BASE), from_dict(BASE, [override]))
    assert not change.breaks


@pytest.mark.parametrize(("before", "after", "breaks"), [(0, 2, True), (2, 0, True), (2, 3, False)])
def test_failure_30_how_many_workers_is_harmless_whether_there_are_any_is_not(
    before: int, after: int, breaks: bool
) -> None:
    old, new = (from_dict(BASE, [f"rewards.0.workers={count}"]) for count in (before, after))
    assert [change.breaks for change in diff(old, new)] == [breaks]


def test_failure_30_another_algorithm_shows_every_key_that_it_brings() -> None:
    changes = diff(from_dict(BASE), from_dict(BASE, ["algorithm.name=ppo"]))
    assert [change.path for change in changes] == [
        "algorithm.name", "algorithm.advantage", "algorithm.advantage_scale",
    ]  # fmt: skip
    assert all(change.breaks for change in changes)


def test_values_and_whole_list_entries() -> None:
    old = from_dict(BASE)
    assert diff(old, from_dict(BASE, ["seed=7"])) == [Change("seed", 0, 7, True)]
    (added,) = diff(old, from_dict(BASE, ["rewards.1.function=exact"]))
    assert (added.path, added.old, added.new["function"]) == ("rewards.1", None, "exact")
    (kwarg,) = diff(old, from_dict(BASE, ["task.sources.0.kwargs.digits=3"]))
    assert (kwarg.path, kwarg.old, kwarg.new) == ("task.sources.0.kwargs.digits", None, 3)
