"""What can be fitted, swept and proven: a training that runs a complete optimizer step at any size.

A plain PyTorch loop is a `Target`: its model, optimizer, batch maker and loss. Whatever else runs steps at a chosen
size (a reinforcement-learning run, say) is a `Workload`. Trials in a process of their own make theirs by a `Maker`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stoker import dotted
from stoker.batch.loading import LoaderOptions
from stoker.errors import ConfigError

__all__ = ["Maker", "Target", "Workload"]


class Workload(Protocol):
    """Runs complete optimizer steps at a size that is chosen for each."""

    unit: str
    """What a size counts: "examples", "tokens"."""
    most: int | None
    """The largest size there is data for; None: any."""

    @property
    def device(self) -> torch.device:
        """Where the step computes."""

    def step(self, size: int) -> None:
        """One complete optimizer step (forward, backward, update) on the longest examples, at that size."""


@dataclass
class Target:
    """A PyTorch training in four things. Making one must not need what later trials vary: no size is fixed here.

    `make_batch(size)` gives a batch of `size` examples as `loss` takes it, on the model's device, and of the longest
    examples that training will see: a size that fits short ones only would fail one day.
    `loss(model, batch)` gives the scalar that training differentiates.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    make_batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    unit: str = "examples"
    most: int | None = None
    """Examples in the data set, where it is known: no larger batch is an answer."""
    load: Callable[[int, LoaderOptions], Iterable[Any]] | None = None
    """`load(size, options)` gives one epoch of real batches, `size` examples each (drop a smaller last one), loaded
    as training does, with those options: usually `DataLoader(data, size, drop_last=True, **options.keywords())`. Its
    batches are moved to the model's device. Without it nothing can be said about waiting for data."""
    take: Callable[[Any, Sequence[int]], Any] | None = None
    """`take(batch, rows)`: the batch of the examples at those places. None: tensors, and dicts, tuples, lists and
    dataclasses of them, are indexed along dim 0."""
    count: Callable[[Any], float | Tensor] | None = None
    """How many units (tokens, say) a batch's loss is the mean of. None: its examples."""
    accumulate: Callable[[nn.Module, Sequence[Any]], object] | None = None
    """`accumulate(model, microbatches)`: your loop's own way from micro-batches to `.grad`, for a proof of it.
    None: `stoker.batch.accumulate`."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def step(self, size: int) -> None:
        self.step_on(self.make_batch(size))

    def step_on(self, batch: Any) -> None:
        """The same on a batch that is there already."""
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(self.loss(self.model, batch))
        self.optimizer.step()


@dataclass(frozen=True)
class Maker:
    """Where to find a function that makes a target, so that a process of its own can call it.

    `path` is `file.py:function` or `package.module:function`; `arguments` are the words it is called with.
    """

    path: str
    arguments: tuple[str, ...] = ()

    def __call__(self) -> Workload:
        """The target. ConfigError where the path leads nowhere or the function gives something else."""
        made = dotted.load(self.path, "target", ConfigError)(*self.arguments)
        missing = [name for name in ("unit", "most", "device", "step") if not hasattr(made, name)]
        if missing:
            raise ConfigError(
                f"target '{self.path}' made a {type(made).__name__} without {', '.join(missing)}: return a "
                "stoker.batch.Target(model, optimizer, make_batch, loss)"
            )
        workload: Workload = made
        return workload
