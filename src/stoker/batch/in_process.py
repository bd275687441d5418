"""Trials in the user's own process, which afterwards is as it was: for a target that no function can make again.

Trials in processes of their own are the rule: a library that ends its process for want of memory ends this one too.
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from stoker.batch import randomness
from stoker.batch.limits import Meter
from stoker.batch.rehearsal import Rehearsal, rehearse
from stoker.batch.target import Target
from stoker.batch.trial import described, ended_by
from stoker.batch.trials import Ending, failure

__all__ = ["InProcess", "unchanged"]

_PLAIN = (bool, int, float, str, type(None))


class InProcess:
    """Runs trials of a target here. The same verbs as `stoker.batch.trials.Trials`."""

    environment: Mapping[str, str] = MappingProxyType({})
    """None but this process's."""

    def __init__(self, target: Target, steps: int, longest: int | None) -> None:
        self._target, self._steps, self._longest = target, steps, longest

    def inspect(self) -> dict[str, Any]:
        """Unit, most, device, capacity and trace of the target."""
        with unchanged(self._target):  # a forward pass counts, too, where a module counts
            return described(self._target)

    def try_size(self, size: int, limit_bytes: int | None, steps: int | None = None) -> Ending:
        """The ending of one trial. RunError on anything but a lack of memory."""
        with unchanged(self._target):
            told = self._tried(size, limit_bytes, steps or self._steps)
        if told["end"] in ("ran", "out of memory"):
            return Ending(told["end"], told, told.get("reason", ""), "")
        doubt = ", and not surely for memory" if told["end"] == "doubtful" else ", and not for memory"
        raise failure(
            f"the trial of size {size} failed{doubt}", Ending(told["end"], told, told["reason"], told["traceback"])
        )

    def _tried(self, size: int, limit_bytes: int | None, steps: int) -> dict[str, Any]:
        """Its last line. The exception, whose frames hold the step's tensors, is gone when this returns."""
        target = self._target
        if target.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(target.device)
        done: Rehearsal | None = None
        failed: dict[str, Any] = {}
        try:
            meter = Meter(fresh=False)
            with meter.limited(target.device, limit_bytes):
                done = rehearse(target, size, steps, meter, self._longest, lambda _: None)
        except Exception as error:
            failed = ended_by(error)
        return {"end": "ran"} | vars(done) if done else failed


@contextmanager
def unchanged(target: Target, *, swept: bool = True) -> Iterator[None]:
    """Afterwards, also where an error comes, all that steps change is what it was before.

    Weights, buffers, gradients (those that were None are None), optimizer state and learning rates, train and eval
    modes and plain attributes of every submodule, and the random numbers of Python, numpy and torch. What the steps
    left in the allocator's cache goes back to the device, unless `swept` is False: for one of many in a row, as it
    takes longer than a few short steps. Copies are held on the CPU meanwhile: they take nothing of a device that is
    measured.
    """
    put_back = [randomness.snapshot(), _modules(target.model), _weights(target), _optimizer(target.optimizer)]
    try:
        yield
    finally:
        for restore in put_back:
            restore()
        if swept:
            gc.collect()  # a graph with a cycle in it would stay
            if target.device.type == "cuda":
                torch.cuda.empty_cache()


def _modules(model: nn.Module) -> Any:
    """Which tensors each module has, its mode and what else is plain."""
    before = [
        (
            module,
            dict(module._buffers),
            dict(module._parameters),
            {key: value for key, value in vars(module).items() if isinstance(value, _PLAIN)},
        )
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)  # whose tensors and attributes can't be exchanged
    ]

    def restore() -> None:
        for module, buffers, parameters, plain in before:
            module._buffers.clear()
            module._buffers.update(buffers)
            module._parameters.clear()
            module._parameters.update(parameters)
            for key, value in plain.items():
                object.__setattr__(module, key, value)

    return restore


def _weights(target: Target) -> Any:
    tensors = [*target.weights(), *target.model.buffers()]
    values = [_copied(tensor) for tensor in tensors]
    gradients = [(weight, weight.grad) for weight in target.weights()]
    contents = [None if gradient is None else _copied(gradient) for _, gradient in gradients]

    def restore() -> None:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
            for (weight, gradient), content in zip(gradients, contents, strict=True):
                weight.grad = gradient
                if gradient is not None and content is not None:
                    gradient.copy_(content)

    return restore


def _optimizer(optimizer: torch.optim.Optimizer) -> Any:
    """State tensors keep their places in memory: a captured graph or a wrapper may point to them."""
    states = {weight: dict(state) for weight, state in optimizer.state.items()}
    contents = {weight: tree_map(_copied, state) for weight, state in states.items()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    values = [tree_map(_copied, group) for group in groups]

    def restore() -> None:
        with torch.no_grad():
            optimizer.state.clear()
            for weight, state in states.items():
                optimizer.state[weight] = state
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        value.copy_(contents[weight][key])
                    else:
                        state[key] = contents[weight][key]
            for group, before, value in zip(optimizer.param_groups, groups, values, strict=True):
                for key, kept in before.items():
                    if isinstance(kept, Tensor):
                        kept.copy_(value[key])
                    group[key] = kept

    return restore


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
