"""Targets that trials make in processes of their own: `fit_targets.py:function`."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stoker.batch.target import Target

MIB = 2**20


class Holds(nn.Module):
    """One weight, and memory that is known: 4 MiB for each example, held until the backward pass is done."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).square().sum()


def make_batch(size: int) -> Tensor:
    return torch.zeros(size, MIB // 4)  # 1 MiB an example; the forward and backward passes hold three more


def holds(step: Callable[[Any], None] = lambda batch: None, **more: Any) -> Target:
    model = Holds()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        step(batch)
        total: Tensor = model(batch)
        return total

    more = {"make_batch": make_batch} | more
    return Target(model, torch.optim.SGD(model.parameters(), lr=0.0), loss=loss, **more)


def plain() -> Target:
    return holds()


def broken(at: str) -> Target:
    def step(batch: Tensor) -> None:
        if len(batch) >= int(at):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)")

    return holds(step)


def broken_making() -> Target:
    raise KeyError("no such table")


def exits() -> Target:
    sys.exit(0)


def tells(path: str) -> Target:
    """Its process's number, and then nothing for a long time."""
    Path(path).write_text(str(os.getpid()), encoding="utf-8")
    time.sleep(120)
    return holds()


def killed(at: str) -> Target:
    def step(batch: Tensor) -> None:
        if len(batch) >= int(at):
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does where the host's memory is out

    return holds(step)


def crashes(at: str, signal_name: str) -> Target:
    """Ends its process as some libraries do, where memory is limited."""

    def step(batch: Tensor) -> None:
        import resource

        limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        if len(batch) >= int(at) and limited:
            os.kill(os.getpid(), signal.Signals[signal_name])

    return holds(step)


def slow(at: str) -> Target:
    def step(batch: Tensor) -> None:
        if len(batch) >= int(at):
            time.sleep(60)

    return holds(step)


def by_rank(first: str, second: str) -> Target:
    """Capacity `first` on rank 0 and `second` on rank 1."""
    capacity = int((first, second)[int(os.environ["RANK"])])

    def step(batch: Tensor) -> None:
        if len(batch) > capacity:
            raise MemoryError(f"more than {capacity}")

    return holds(step)


def capacity(most: str) -> Target:
    def step(batch: Tensor) -> None:
        if len(batch) > int(most):
            raise MemoryError(f"more than {most}")

    return holds(step)
