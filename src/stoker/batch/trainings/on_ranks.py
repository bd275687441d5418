"""Trainings on real data-parallel ranks (gloo processes on this machine), as series that can be compared."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from stoker.batch.ranks import launch
from stoker.batch.target import Maker
from stoker.batch.trainings.history import Evaluation, History
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Plan
from stoker.errors import ConfigError

__all__ = ["Legs", "train_on_ranks"]

MODULE = "stoker.batch.trainings.rank"

Legs = Sequence[tuple[Setting, Plan]]
"""One training: usually one leg; with more, each goes on with what the one before it has trained."""


def train_on_ranks(
    maker: Maker, trainings: Sequence[Legs], ranks: int, *, deadline_s: float = 300.0
) -> list[list[History]]:
    """`train_anew` of each training, by as many ranks at once: the history of each of its legs, of the first rank.

    Settings and plans count over all ranks: `examples_per_update` is the global batch, of which a rank holds its share,
    in micro-batches of `examples_per_microbatch`. Every rank reads the target's loader and takes each of its batches in
    turn, so that an update sees the same examples, in whatever number of ranks it is computed. A history's samples are
    those of all ranks; its training loss is of the first rank's examples where that holds one micro-batch, else of all.
    Random draws (dropout) are alike on all ranks.

    ConfigError where a global number isn't a multiple of the ranks; RunError where a rank fails, or isn't done in time.
    """
    if ranks < 1:
        raise ConfigError(f"ranks = {ranks}: at least 1")
    numbers: dict[str, Any] = {
        "path": maker.path,
        "arguments": list(maker.arguments),
        "trainings": [
            [{"setting": _share(setting, ranks).to_json(), "plan": _plan(plan, ranks)} for setting, plan in legs]
            for legs in trainings
        ],
    }
    answer = launch(MODULE, ranks, numbers, {}, deadline_s)[0]
    return [
        [_read(told, setting, ranks) for told, (setting, _) in zip(found, legs, strict=True)]
        for found, legs in zip(answer["trainings"], trainings, strict=True)
    ]


def _share(setting: Setting, ranks: int) -> Setting:
    """One rank's. The rate follows the ratio of its batch to its base, which is the global one."""
    base = setting.base_examples or setting.examples_per_update
    for name, number in (("examples_per_update", setting.examples_per_update), ("base_examples", base)):
        if number % ranks:
            raise ConfigError(f"{name} = {number} is not a multiple of {ranks} ranks, each of which holds its share")
    return replace(
        setting,
        examples_per_update=setting.examples_per_update // ranks,
        base_examples=base // ranks,
        warmup_samples=setting.warmup_samples // ranks,
    )


def _plan(plan: Plan, ranks: int) -> dict[str, Any]:
    return asdict(replace(plan, samples=-(-plan.samples // ranks)))


def _read(told: dict[str, Any], setting: Setting, ranks: int) -> History:
    evaluations = [Evaluation(**each | {"samples": each["samples"] * ranks}) for each in told.pop("evaluations")]
    samples = [each * ranks for each in told.pop("samples")]
    return History(**told | {"setting": setting, "samples": samples, "evaluations": evaluations})
