"""One rank of trainings on several: the same loop as on one, with gradients exchanged and a share of the data."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stoker.batch import ranks
from stoker.batch.loading import LoaderOptions
from stoker.batch.target import Maker, Target
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Plan, made_anew, train, whole

__all__: list[str] = []

FAR = 1_000
"""Epochs between the legs of a training, so that none repeats another's order."""


def work(job: ranks.Job) -> dict[str, Any]:
    """The history of each leg of each training."""
    maker = Maker(job.numbers["path"], tuple(job.numbers["arguments"]))
    return {"trainings": [_training(maker, legs, job) for legs in job.numbers["trainings"]]}


def _training(maker: Maker, legs: list[dict[str, Any]], job: ranks.Job) -> list[dict[str, Any]]:
    settings = [Setting(**leg["setting"]) for leg in legs]
    target = _shared(made_anew(maker, settings[0].seed), job)
    found = []
    for place, (setting, leg) in enumerate(zip(settings, legs, strict=True)):
        plan = Plan(**leg["plan"] | {"loader": LoaderOptions(**leg["plan"]["loader"])})
        history = train(target, setting, plan, first_epoch=FAR * place)
        found.append({name: value for name, value in history.to_json().items() if name != "setting"})
    return found


def _shared(target: Target, job: ranks.Job) -> Target:
    """The same training, in which this rank computes its part of every update."""
    load, validate = target.load, target.validate
    if load is None:
        return target  # which `train` refuses, in its words

    def turns(size: int, options: LoaderOptions) -> Iterable[Any]:
        return _turns(whole(load(size, options), size, target), job.rank, job.ranks)

    def alone(model: nn.Module) -> Any:
        assert validate is not None
        return validate(model.module if isinstance(model, DistributedDataParallel) else model)

    model = DistributedDataParallel(target.model) if job.ranks > 1 else target.model
    return replace(target, model=model, load=turns, validate=None if validate is None else alone)


def _turns(batches: Iterable[Any], rank: int, count: int) -> Iterator[Any]:
    """Each `count` batches are one for every rank; the last ones are left out where they don't go round."""
    waiting: list[Any] = []
    for batch in batches:
        waiting.append(batch)
        if len(waiting) == count:
            yield waiting[rank]
            waiting = []


if __name__ == "__main__":
    ranks.run_rank(work)
