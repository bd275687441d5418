"""Gradients of one batch in whole and in parts, measured so that nothing but the splitting differs between two of them.

Buffers are put back before each pass, every source of randomness is seeded, draws may be replaced by their expectation,
and the model may compute in fp64, where rounding is far below any fault.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.batch import nest, randomness
from stoker.batch.scalar import scalar
from stoker.errors import ConfigError

__all__ = [
    "Gap",
    "Gradient",
    "Rig",
    "combined",
    "expected_draws",
    "fit_weights",
    "gaps",
    "on_copies",
    "untouched",
    "worst",
]

Gradient = dict[str, Tensor]
"""By the parameter's name; those without a gradient are left out."""

FURTHEST = sys.float_info.max
"""A gradient that isn't a number, or is one where there should be none; JSON has no infinity."""
FLOOR = 1e-3
"""Differences of a parameter are held against its largest gradient, but no less than this share of the model's: some
gradients are zero but for rounding (a bias before a normalisation)."""


@dataclass(frozen=True)
class Gap:
    """How far a parameter's gradient is from that of the whole batch, at the element where it is furthest."""

    parameter: str
    absolute: float
    relative: float
    """Of the parameter's largest gradient, or of a thousandth of the model's largest where that is more."""


def gaps(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[Gap, ...]:
    """One for each parameter, furthest first. A gradient that is there on one side only counts as zero on the other."""
    largest = max((tensor.abs().max().item() for tensor in expected.values() if tensor.numel()), default=0.0)
    made = []
    for name in expected.keys() | found.keys():
        whole = expected[name] if name in expected else torch.zeros_like(found[name])
        part = found[name] if name in found else torch.zeros_like(whole)
        apart = nest.in_dtype(part, torch.float64) - nest.in_dtype(whole, torch.float64)
        absolute = apart.abs().max().item() if whole.numel() else 0.0
        if absolute != absolute:  # a NaN is as far as can be
            absolute = FURTHEST
        scale = max(whole.abs().max().item() if whole.numel() else 0.0, FLOOR * largest)
        made.append(Gap(name, absolute, absolute / scale if scale else (0.0 if absolute == 0 else FURTHEST)))
    return tuple(sorted(made, key=lambda gap: (-gap.relative, gap.parameter)))


def worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest relative gap."""
    return gaps(found, expected)[0].relative if expected or found else 0.0


def combined(parts: Sequence[Gradient], weights: Sequence[float]) -> Gradient:
    """The weighted sum of gradients; a part of weight 0 may be NaN, as the mean over no token is."""
    total: Gradient = {}
    for part, weight in zip(parts, weights, strict=True):
        if weight == 0:
            continue
        for name, tensor in part.items():
            total[name] = total[name] + weight * tensor if name in total else weight * tensor
    return total


def fit_weights(parts: Sequence[Gradient], whole: Gradient) -> list[float]:
    """The weights whose sum of the parts comes closest to the whole: least squares, refined twice. NaN if any is."""

    def product(a: Gradient, b: Gradient) -> float:
        wide = [(nest.in_dtype(a[name], torch.float64), nest.in_dtype(b[name], torch.float64)) for name in a.keys() & b]
        return sum(float((left * right.conj()).real.sum()) for left, right in wide)

    gram = np.array([[product(a, b) for b in parts] for a in parts])
    if not np.isfinite(gram).all():
        return [float("nan")] * len(parts)
    weights = np.zeros(len(parts))
    for _ in range(3):
        left = combined([whole, *parts], [1.0, *(-weights)])
        weights = weights + np.linalg.lstsq(gram, np.array([product(part, left) for part in parts]), rcond=None)[0]
    return [float(weight) for weight in weights]


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Gradients, buffers and random states are afterwards what they were; parameters must not be changed inside."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = _buffers(model)
    restore_draws = randomness.snapshot()
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        _restore(model, buffers)
        restore_draws()


@contextmanager
def on_copies(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """The model computes with copies of its parameters and buffers, in `dtype` if one is given; afterwards it has its
    own again, the same storage as before, whatever was done to the copies.
    """
    parameters = [(parameter, parameter.data) for parameter in model.parameters() if nest.inexact(parameter)]
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and nest.inexact(buffer)
    ]
    try:
        for parameter, data in parameters:
            parameter.data = nest.in_dtype(data, dtype or data.dtype, copy=True)
        for module, name, buffer in buffers:
            module._buffers[name] = nest.in_dtype(buffer, dtype or buffer.dtype, copy=True)
        yield
    finally:
        for parameter, data in parameters:
            parameter.grad = None
            parameter.data = data
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


@contextmanager
def expected_draws(model: nn.Module) -> Iterator[list[str]]:
    """Random draws are replaced by their expectation; gives the places that draw, modules by path, as they appear."""
    inside: list[str] = []
    places: list[str] = []

    def enter(path: str) -> Callable[..., None]:
        return lambda *_: inside.append(path)

    def leave(*_: Any) -> None:
        inside.pop()

    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(enter(path or "the model")))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        # A recomputed forward draws in the backward, which must see the mode: it is kept to this thread.
        with _Expectation(inside, places), torch.autograd.set_multithreading_enabled(False):
            yield places
    finally:
        for hook in hooks:
            hook.remove()


class Rig:
    """One real batch of a training, and passes over parts of it that all start from the same state."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        self.model = model
        self.loss = loss
        self._buffers = _buffers(model)

    def reset(self, seed: int = 0) -> None:
        """Buffers as at the start, no gradients, and all draws seeded."""
        _restore(self.model, self._buffers)
        self.seed(seed)

    def seed(self, seed: int) -> None:
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)

    def gradient(self, batch: Any, *, seed: int = 0, reset: bool = True, scale: float = 1.0) -> Gradient:
        """Of the loss of one batch; `reset=False` leaves the buffers as the pass before left them. `scale` multiplies
        the loss and divides the gradient.
        """
        self.reset(seed) if reset else self.seed(seed)
        torch.autograd.backward(scalar(self.loss(self.model, nest.shell(batch))) * scale)
        return {name: tensor / scale for name, tensor in self.taken().items()}

    def after(self, loop: Callable[[nn.Module, Sequence[Any]], object], parts: Sequence[Any]) -> Gradient:
        """What a loop over micro-batches leaves in `.grad`. ConfigError where it changes the weights."""
        self.reset()
        before = [parameter._version for parameter in self.model.parameters()]
        loop(self.model, [nest.shell(part) for part in parts])
        if before != [parameter._version for parameter in self.model.parameters()]:
            raise ConfigError(
                "the loop changes the weights: `accumulate` of a target goes from micro-batches to gradients only; "
                "leave the "
                "optimizer's step out of it"
            )
        return self.taken()

    def taken(self) -> Gradient:
        """The gradients, which leave the model."""
        made = {
            name: parameter.grad.detach().to_dense() if parameter.grad.is_sparse else parameter.grad.detach()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
        self.model.zero_grad(set_to_none=True)
        return made


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


@torch.no_grad()
def _restore(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if name in buffers and buffer.shape == buffers[name].shape:
            buffer.copy_(buffers[name])


class _Expectation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Below autograd, so that it meets every draw, whichever function asked for it."""

    def __init__(self, inside: Sequence[str], places: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside, self.places = inside, places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        made = self._made(func, name, args, kwargs)
        if made is None:
            return func(*args, **kwargs)
        place = self.inside[-1] if self.inside else "the loss"
        if place not in self.places:
            self.places.append(place)
        return made

    def _made(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The expectation in the place of a draw; None for what draws nothing."""
        if name == "native_dropout":
            if not args[1] or args[2] is False:
                return None
            return args[0] / (1 - args[1]), torch.ones_like(args[0], dtype=torch.bool)
        if name.startswith("_scaled_dot_product") and "backward" not in name:
            return _without_dropout(func, args, kwargs)
        if name in CONSTANT:
            return func(*args, **kwargs).fill_(CONSTANT[name])
        if name in ("uniform_", "normal_", "bernoulli_", "bernoulli", "exponential_"):
            return _filled(func, name, args, kwargs)
        return None


CONSTANT = {"rand": 0.5, "rand_like": 0.5, "randn": 0.0, "randn_like": 0.0}


def _filled(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    given = {argument.name: argument.default_value for argument in func._schema.arguments[1:]}
    given |= dict(zip(given, args[1:], strict=False)) | kwargs
    if name == "uniform_":
        return tensor.fill_((given["from"] + given["to"]) / 2)
    if name == "normal_":
        return tensor.fill_(given["mean"])
    if name == "exponential_":
        return tensor.fill_(1 / given["lambd"])
    probability = given.get("p")
    if name == "bernoulli":
        return tensor.clone() if probability is None else torch.full_like(tensor, probability)
    return tensor.copy_(probability) if isinstance(probability, Tensor) else tensor.fill_(probability)


def _without_dropout(func: Any, args: Any, kwargs: Any) -> Any:
    """Fused attention draws inside its kernel: it is called with no dropout."""
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return None
    place = names.index("dropout_p")
    if place < len(args):
        return func(*args[:place], 0.0, *args[place + 1 :], **kwargs) if args[place] else None
    return func(*args, **kwargs | {"dropout_p": 0.0}) if kwargs.get("dropout_p") else None
