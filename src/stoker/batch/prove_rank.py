"""One rank of a proof: runs its micro-batches of each split with DistributedDataParallel, and says how far it came."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stoker.batch import nest, ranks
from stoker.batch.accumulation import accumulate
from stoker.batch.gradients import Gradient, Rig, expected_draws, gaps, on_copies, worst
from stoker.batch.target import Maker, Target
from stoker.errors import ConfigError

__all__: list[str] = []


def work(job: ranks.Job) -> dict[str, Any]:
    """For each split: the gaps of the ranks' gradient, and the largest one with ranks weighed by their units."""
    target = Maker(job.numbers["path"], tuple(job.numbers["arguments"]))()
    assert isinstance(target, Target)
    _load(target.model, job)
    batch = _batch(target, job)
    if job.numbers["double"]:
        batch = nest.cast(batch, torch.float64)
    whole = {name: tensor.to(target.device) for name, tensor in _under("gradient:", job).items()}
    with on_copies(target.model, torch.float64 if job.numbers["double"] else None), expected_draws(target.model):
        rig = Rig(target.model, target.loss)
        return {"splits": [_split(target, batch, split, rig, whole, job) for split in job.numbers["splits"]]}


def _split(
    target: Target, batch: Any, split: dict[str, Any], rig: Rig, whole: Gradient, job: ranks.Job
) -> dict[str, Any]:
    parts = [(target.take or nest.take)(batch, rows) for rows in split["rows"][job.rank]]
    unused = len(whole) < sum(parameter.requires_grad for parameter in target.model.parameters())

    def given(model: nn.Module, parts: Sequence[Any]) -> object:
        if target.accumulate is not None:
            return target.accumulate(model, parts)
        return accumulate(model, target.loss, parts, count=target.count)

    def corrected(model: nn.Module, parts: Sequence[Any]) -> object:
        counts = split["counts"][job.rank] if split["counts"] else None
        return accumulate(model, target.loss, parts, count=counts, reduction="mean" if counts else "sum")

    def over_ranks(loop: Any) -> Gradient:
        rig.reset()
        wrapped = DistributedDataParallel(target.model, find_unused_parameters=unused)
        loop(wrapped, parts)
        return rig.taken()

    answer: dict[str, Any] = {"gaps": [asdict(gap) for gap in gaps(over_ranks(given), whole)]}
    if split["correct"]:
        answer["corrected"] = asdict(gaps(over_ranks(corrected), whole)[0])
    if target.accumulate is not None and split["counts"]:
        answer["reweighted"] = worst(_reweighted(rig.after(target.accumulate, parts), split["counts"], job.rank), whole)
    return answer


def _reweighted(mine: Gradient, counts: Sequence[Sequence[float]], rank: int) -> Gradient:
    """The sum of the ranks' own gradients, each by its share of the units."""
    share = sum(counts[rank]) / sum(map(sum, counts))
    made = {name: tensor * share for name, tensor in mine.items()}
    for name in sorted(made):
        dist.all_reduce(made[name])
    return made


def _under(prefix: str, job: ranks.Job) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): value for key, value in job.tensors.items() if key.startswith(prefix)}


@torch.no_grad()
def _load(model: nn.Module, job: ranks.Job) -> None:
    """The weights and buffers of the first process, as a maker may draw new ones at each call."""
    for prefix, mine in (("parameter:", dict(model.named_parameters())), ("buffer:", dict(model.named_buffers()))):
        for name, tensor in _under(prefix, job).items():
            if name not in mine or mine[name].shape != tensor.shape:
                raise ConfigError(
                    f"the target made in a rank has no {prefix} {name} of shape {list(tensor.shape)}: "
                    "its maker must build the same model at each call"
                )
            mine[name].copy_(tensor)


def _batch(target: Target, job: ranks.Job) -> Any:
    """The first process's batch in the containers of one made here."""
    template = target.make_batch(job.numbers["size"])
    new = {path: tensor.to(target.device) for path, tensor in _under("batch:", job).items()} | job.numbers["plain"]
    if new.keys() != nest.leaves(template).keys():
        raise ConfigError(
            "make_batch gave a batch of other keys in a rank than before: its containers must be the same"
        )
    return nest.rebuild(template, new)


if __name__ == "__main__":
    ranks.run_rank(work)
