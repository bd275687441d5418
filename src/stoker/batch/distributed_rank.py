"""One rank of a distributed measurement: times whole updates with and without the exchange of gradients, and
all-reduces.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stoker.batch import ranks
from stoker.batch.accumulation import accumulate
from stoker.batch.target import Maker, Target
from stoker.record.memory import peak_resident_bytes

__all__: list[str] = []

WARM_UP = 2
FIRST_BUCKET = 2**20
BUCKET = 25 * 2**20
"""Bytes that DistributedDataParallel exchanges at once, by default; the first bucket is smaller."""


def work(job: ranks.Job) -> dict[str, Any]:
    """Seconds of each update by accumulation, the peak memory, seconds of all-reduces by their bytes."""
    asked = job.numbers
    torch.set_num_threads(asked["threads"])
    target = Maker(asked["path"], tuple(asked["arguments"]))()
    assert isinstance(target, Target)
    start = _peak(target.device)
    batch = target.make_batch(asked["size"])
    model: nn.Module = target.model
    if job.ranks > 1:
        model = DistributedDataParallel(model, find_unused_parameters=asked["unused"])
    points = []
    for microbatches in asked["microbatches"]:
        with_exchange, without = [], []
        for turn in range(WARM_UP + asked["updates"]):  # alternating, so that a slow moment hits both
            taken = _update(target, model, [batch] * microbatches, exchange=True)
            alone = _update(target, model, [batch] * microbatches, exchange=False) if job.ranks > 1 else taken
            if turn >= WARM_UP:
                with_exchange.append(taken)
                without.append(alone)
        points.append({"microbatches": microbatches, "with": with_exchange, "without": without})
    moved = _gradient_bytes(target.model)
    return {
        "points": points,
        "peak_bytes": _peak(target.device),
        "start_bytes": start,
        "gradient_bytes": moved,
        "all_reduces": _all_reduces(asked["probes"], moved, asked["updates"], target.device) if job.ranks > 1 else [],
        "calls": len(_buckets(moved)),
        "adam": "adam" in type(target.optimizer).__name__.lower(),
        "learning_rate": float(target.optimizer.param_groups[0]["lr"]),
    }


def _update(target: Target, model: nn.Module, microbatches: Sequence[Any], exchange: bool) -> float:
    keep: AbstractContextManager[Any] = nullcontext()
    if isinstance(model, DistributedDataParallel) and not exchange:
        keep = model.no_sync()

    def run() -> None:
        with keep:
            if target.accumulate is not None:
                target.accumulate(model, microbatches)
            else:
                accumulate(model, target.loss, microbatches, count=target.count)
        target.optimizer.step()
        target.optimizer.zero_grad(set_to_none=True)

    return _timed(run, target.device)


def _all_reduces(probes: Sequence[int], moved: int, repeats: int, device: torch.device) -> list[dict[str, Any]]:
    """Of fp32 zeros: each probe in one call, the gradient in the buckets that DistributedDataParallel makes."""
    made = []
    for parts in [*([size] for size in probes), _buckets(moved)]:
        buffers = [torch.zeros(max(1, part // 4), device=device) for part in parts]

        def run(buffers: Sequence[torch.Tensor] = buffers) -> None:
            for buffer in buffers:
                dist.all_reduce(buffer)

        times = [_timed(run, device) for _ in range(WARM_UP + repeats)][WARM_UP:]
        made.append({"bytes": sum(parts), "seconds": times})
    return made


def _buckets(size: int) -> list[int]:
    rest = max(0, size - FIRST_BUCKET)
    return [min(size, FIRST_BUCKET), *(min(BUCKET, rest - start) for start in range(0, rest, BUCKET))]


def _timed(run: Callable[[], None], device: torch.device) -> float:
    """Seconds from when all ranks are ready until this one's device is done."""
    _wait_for(device)
    dist.barrier()
    start = time.perf_counter()
    run()
    _wait_for(device)
    return time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gradient_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()


if __name__ == "__main__":
    ranks.run_rank(work)
