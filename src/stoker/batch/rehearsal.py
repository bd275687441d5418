"""Complete optimizer steps at one size, and what they took: the inside of every trial."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from stoker.batch.asked import check_size, numbers, shapes_of
from stoker.batch.limits import Meter
from stoker.batch.saved import bytes_of
from stoker.batch.target import Target, Workload
from stoker.errors import DataError, RunError

__all__ = ["Rehearsal", "parts_of", "rehearse"]


@dataclass(frozen=True)
class Rehearsal:
    """What the steps of one trial took. Bytes and seconds."""

    steps: int
    """Updates that the optimizer really made."""
    peak_bytes: int | None
    seconds_per_step: float
    """The median without the first step, whose memory is new and whose optimizer has no state."""
    batch: tuple[str, ...]
    """Every tensor of the batch, as "64 x 128 int64": the lengths that were used."""
    elements: int
    """Numbers in the batch."""
    parts: dict[str, int]
    """Weights, gradients, states and buffers, measured; empty where the workload doesn't show its own."""


def rehearse(
    workload: Workload, size: int, steps: int, meter: Meter, longest: int | None, said: Callable[[str], None]
) -> Rehearsal:
    """`steps` complete optimizer steps at `size`; `said` is told as each begins. Raises whatever a step raises.

    The optimizer's state is made in the first step: from the second on everything is held. DataError where a batch
    is smaller than asked for or has no length of `longest`; RunError where a step made no update.
    """
    if steps < 2:
        raise ValueError(f"{steps} steps: the optimizer's state is first held in the second one")
    if workload.most is not None and size > workload.most:
        raise DataError(f"a batch of {size} {workload.unit} is larger than the data set, which has {workload.most}")
    batches: list[Any] = []
    updates = 0

    def updated(*_: Any) -> None:
        nonlocal updates
        updates += 1

    device, seconds = workload.device, []
    with _Watched(workload, batches.append, updated) as shown:
        for step in range(steps):
            said(f"step {step + 1}")
            start = time.perf_counter()
            workload.step(size)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
            if not shown:
                updates += 1
            elif updates != step + 1:
                raise RunError(f"step {step + 1} of {size} {workload.unit} made no optimizer update: nothing was tried")
            for shapes in batches:
                check_size(shapes, size, longest, workload.unit)
    shapes = batches[-1] if batches else []
    return Rehearsal(
        updates,
        meter.peak_bytes(device),
        statistics.median(seconds[1:]),
        tuple(f"{' x '.join(map(str, shape))} {kind}" for shape, kind in shapes),
        numbers(shapes),
        parts_of(workload) if isinstance(workload, Target) else {},
    )


class _Watched:
    """Within, a target's batches and updates are noted; gives whether the workload is one that shows them."""

    def __init__(self, workload: Workload, seen: Callable[[Any], None], updated: Callable[..., None]) -> None:
        self._target = workload if isinstance(workload, Target) else None
        self._seen, self._updated = seen, updated

    def __enter__(self) -> bool:
        if self._target is None:
            return False
        make = self._make = self._target.make_batch

        def noted(size: int) -> Any:
            batch = make(size)
            self._seen(shapes_of(batch))
            return batch

        self._target.make_batch = noted
        self._hook = self._target.optimizer.register_step_post_hook(self._updated)
        return True

    def __exit__(self, *_: object) -> None:
        if self._target is not None:
            self._target.make_batch = self._make
            self._hook.remove()


def parts_of(target: Target) -> dict[str, int]:
    """Bytes of a target's weights, gradients, optimizer states and buffers, as they are now."""
    weights = target.weights()
    states = [value for state in target.optimizer.state.values() for value in state.values()]
    return {
        "weights": sum(map(bytes_of, weights)),
        "gradients": sum(bytes_of(weight.grad) for weight in weights if weight.grad is not None),
        "states": sum(bytes_of(value) for value in tree_leaves(states) if isinstance(value, Tensor)),
        "buffers": sum(map(bytes_of, target.model.buffers())),
    }
