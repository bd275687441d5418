"""What can be fitted, swept and proven: a training that runs a complete optimizer step at any size.

A plain PyTorch loop is a `Target`: its model, optimizer, batch maker and loss. Whatever else runs steps at a chosen
size (a reinforcement-learning run, say) is a `Workload`. Trials in a process of their own make theirs by a `Maker`.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stoker import dotted
from stoker.batch import nest
from stoker.batch.loading import LoaderOptions
from stoker.batch.scalar import scalar
from stoker.errors import ConfigError

__all__ = ["Maker", "Target", "Workload", "asks_itself"]


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

    ConfigError where one of them can't be that.
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
    validate: Callable[[nn.Module], float | Mapping[str, float]] | None = None
    """`validate(model)`: the loss of held-out data, or a dict with a "loss" and other figures to show (accuracy, say).
    Called in eval mode under no_grad. Without it trainings can't be compared."""

    def __post_init__(self) -> None:
        for name, kind in (("model", nn.Module), ("optimizer", torch.optim.Optimizer)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(
                    f"Target: {name} is a {type(getattr(self, name)).__name__}, not a torch {kind.__name__}; the order "
                    "is Target(model, optimizer, make_batch, loss)"
                )
        if wrong := [name for name in ("make_batch", "loss") if not callable(getattr(self, name))]:
            raise ConfigError(
                f"Target: {wrong[0]} is a {type(getattr(self, wrong[0])).__name__}, not a function: make_batch(size) "
                "gives a batch, loss(model, batch) a scalar"
            )
        if self.most is not None and (isinstance(self.most, bool) or not isinstance(self.most, int) or self.most < 1):
            raise ConfigError(f"Target: most = {self.most!r}: a whole number of {self.unit}, at least 1, or None")
        if lazy := [name for name, each in self.model.named_parameters() if nn.parameter.is_lazy(each)]:
            raise ConfigError(
                f"Target: the parameter {lazy[0]} has no shape yet (a lazy module): run one batch through the model "
                "before you make its optimizer and the Target"
            )

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return next(self._held()).device

    def weights(self) -> list[nn.Parameter]:
        """The model's parameters, and those that the optimizer trains beside them (of a loss that learns, say)."""
        return list(dict.fromkeys(self._held()))

    def _held(self) -> Iterator[nn.Parameter]:
        """The same, those of both twice; lazily, as the device is asked for with every batch of a loader."""
        trained = (weight for group in self.optimizer.param_groups for weight in group["params"])
        return chain(self.model.parameters(), trained)

    def step(self, size: int) -> None:
        self.step_on(self.make_batch(size))

    def step_on(self, batch: Any) -> None:
        """The same on a batch that is there already, which keeps what a loss takes out of it."""

        def backward() -> Any:
            self.optimizer.zero_grad(set_to_none=True)
            found = scalar(self.loss(self.model, nest.shell(batch)))
            torch.autograd.backward(found)
            return found.detach()

        if asks_itself(self.optimizer):
            self.optimizer.step(backward)
        else:
            backward()
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
        function = dotted.load(self.path, "target", ConfigError)
        try:
            inspect.signature(function).bind(*self.arguments)
        except TypeError as error:
            raise ConfigError(
                f"target '{self.path}' is called with {list(self.arguments)}: {error}; words after TARGET "
                "(Maker's `arguments`) are handed to it"
            ) from None
        except ValueError:  # what is written in C has no signature
            pass
        made = function(*self.arguments)
        missing = [
            name for name in ("unit", "most", "device", "step") if isinstance(made, type) or not hasattr(made, name)
        ]
        if missing:
            raise ConfigError(
                f"target '{self.path}' made a {type(made).__name__} without {', '.join(missing)}: return a "
                "stoker.batch.Target(model, optimizer, make_batch, loss)"
            )
        workload: Workload = made
        return workload


def asks_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step of such an optimizer computes the loss itself, as often as it likes (LBFGS)."""
    kind: Any = type(optimizer)
    return _needs_closure(kind)


@cache
def _needs_closure(optimizer: Any) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
