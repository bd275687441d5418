"""Runs one training of a target at a chosen setting, and notes what every update showed."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from stoker.batch import nest, randomness
from stoker.batch.accumulation import accumulate, windows
from stoker.batch.horizons import Horizon
from stoker.batch.loading import LoaderOptions
from stoker.batch.noise import NoiseScale
from stoker.batch.rates import RateFollower
from stoker.batch.scalar import scalar
from stoker.batch.scaling import Kind
from stoker.batch.target import Maker, Target, Workload, asks_itself
from stoker.batch.trainings.history import Evaluation, History
from stoker.batch.trainings.setting import Setting
from stoker.errors import ConfigError

__all__ = ["Make", "Plan", "check", "made_anew", "targeted", "train", "train_anew", "whole"]

Make = str | Maker | Callable[[], Target]
"""Makes a target anew, by a function or where to find one (`file.py:make_target`)."""


@dataclass(frozen=True)
class Plan:
    """What is equal for all trainings that are compared."""

    samples: int
    """That each is trained on; the horizon of the rate."""
    evaluations: int = 8
    """Of held-out data, evenly over the samples, the last one at the end; 0: none."""
    loader: LoaderOptions = field(default_factory=LoaderOptions)
    kind: Kind | None = None
    """Of the optimizer's rule, where its class doesn't tell."""
    agreement: bool = False
    """Note how far each gradient agrees with the one before, which `read_curve` reads best by. Keeps a second copy of
    the gradients."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.evaluations < 0:
            raise ConfigError(f"samples = {self.samples} (at least 1), evaluations = {self.evaluations} (0 or more)")

    def updates(self, setting: Setting) -> int:
        """That a training has: the last one reaches the samples."""
        return -(-self.samples // setting.examples_per_update)

    def due(self, samples: int) -> int:
        """Evaluations that are due when so many samples were trained on."""
        return min(samples, self.samples) * self.evaluations // self.samples


def train_anew(make: Make, setting: Setting, plan: Plan, **told: Any) -> History:
    """`train` of a target that is made from the setting's seed. The random numbers of this process stay as they were.

    ConfigError where what is made is no Target.
    """
    with randomness.kept():
        return train(made_anew(make, setting.seed), setting, plan, **told)


def made_anew(make: Make, seed: int) -> Target:
    """Made from a seed, which is where the random numbers then are. ConfigError where what is made is no Target."""
    randomness.begin(seed)
    return targeted(make)


def targeted(make: Make) -> Target:
    """What is made. ConfigError where that is no Target."""
    made: Workload = Maker(make)() if isinstance(make, str) else make()
    if not isinstance(made, Target):
        raise ConfigError(
            f"a training needs a stoker.batch.Target with a model, a loss and a loader, not a {type(made).__name__}"
        )
    return made


def train(
    target: Target,
    setting: Setting,
    plan: Plan,
    *,
    first_epoch: int = 0,
    noise: NoiseScale | None = None,
    stop: Callable[[History], bool] | None = None,
) -> History:
    """Trains the target as it is now, and leaves it trained.

    Each epoch begins from (seed, epoch): settings that differ in their batch only see the same examples in the same
    order. `first_epoch` begins with another order. `noise` gets each update's micro-batches. `stop` is asked after each
    evaluation.

    A loss or gradient that isn't finite ends the training, and the history says so. ConfigError for a target without a
    loader, or, where evaluations are asked for, without `validate`.
    """
    check(target, plan)
    base = setting.base_examples or setting.examples_per_update
    kind = plan.kind or ("sgd" if base == setting.examples_per_update else None)  # with nothing to follow any will do
    horizon = Horizon(plan.samples, min(setting.warmup_samples, plan.samples), setting.decay)
    follower = RateFollower(target.optimizer, horizon, base, kind=kind, rule=setting.rule, moments=setting.moments)
    history = History(setting, target.unit)
    agreement = _Agreement() if plan.agreement else None
    with randomness.kept(), _mode(target.model, training=True):
        stream = _windows(target, setting, plan, first_epoch)
        for update in range(1, plan.updates(setting) + 1):
            start = time.perf_counter()
            window = next(stream)
            waited = time.perf_counter() - start
            seen = update * setting.examples_per_update
            follower.set(seen, setting.examples_per_update)
            rate = _scale(target.optimizer, setting.rate_factor)
            loss, norm = _update(target, setting, window, noise, agreement)
            if agreement is not None:
                history.agreement.append(agreement.cosine)
            history.note(seen, loss, norm, rate, time.perf_counter() - start, waited)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                what = f"gradient norm {norm}" if math.isfinite(loss) else f"loss {loss}"
                history.ended = f"diverged: {what} at update {update}"
                break
            if plan.due(seen) > plan.due(seen - setting.examples_per_update):
                history.evaluations.append(_evaluate(target, history))
                if stop is not None and stop(history):
                    history.ended = f"stopped at update {update}"
                    break
    return history


def check(target: Target, plan: Plan) -> None:
    """ConfigError for a target that can't be trained by the plan."""
    missing = "load" if target.load is None else ("validate" if plan.evaluations and target.validate is None else "")
    if missing:
        what = {
            "load": "load(size, options), which gives an epoch of real batches",
            "validate": "validate(model), which gives the loss of held-out data",
        }[missing]
        raise ConfigError(f"the target has no `{missing}`, and trainings can't be compared without: give it {what}")
    if asks_itself(target.optimizer):
        raise ConfigError(
            f"{type(target.optimizer).__name__} computes the loss itself, as often as it likes, so that updates can't "
            "be compared at equal samples: take another optimizer"
        )


@contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Within, all of the model is in that mode; afterwards each module in its own."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _windows(target: Target, setting: Setting, plan: Plan, first_epoch: int) -> Iterator[list[Any]]:
    """Epoch after epoch, the micro-batches of each update on the model's device."""
    assert target.load is not None
    for epoch in count(first_epoch):
        randomness.begin(setting.seed, epoch)
        loader = whole(target.load(setting.microbatch, plan.loader), setting.microbatch, target)
        moved = (nest.move(batch, target.device, pinned=plan.loader.pin_memory) for batch in loader)
        any_whole = False
        for window in windows(moved, setting.microbatches):
            if len(window) == setting.microbatches:  # the epoch's rest is left out, as by a larger batch
                any_whole = True
                yield window
        if not any_whole:
            raise ConfigError(
                f"an epoch of load({setting.microbatch}, ...) holds no update of {setting.examples_per_update} "
                f"{target.unit}: take a smaller batch, or more data"
            )


def whole(batches: Iterable[Any], size: int, target: Target) -> Iterator[Any]:
    """An epoch's batches of `size` examples; a smaller last one is left out.

    ConfigError for others, as samples are counted by what was asked for: sizes that weren't held would be compared as
    if they had been. Of a batch whose examples can't be counted, as what they lie in is the target's own, any will do.
    """
    if not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise ConfigError(f"load({size}, ...) gives a {type(batches).__name__}, not the batches of an epoch")
    rest = 0
    for batch in batches:
        there = _examples(batch, target)
        if rest or (there is not None and there > size):
            raise ConfigError(
                f"load({size}, ...) gives a batch of {rest or there} examples{' and others after it' if rest else ''}: "
                f"make each of {size}, as only an epoch's last one may be smaller (which is left out)"
            )
        if there is None or there == size:
            yield batch
        else:
            rest = there


def _examples(batch: Any, target: Target) -> int | None:
    """None: they don't lie along dim 0."""
    try:
        return None if target.take is not None else nest.examples(batch)
    except ConfigError:
        return None


def _scale(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """The first group's rate after all are multiplied."""
    for group in optimizer.param_groups:
        group["lr"] *= factor
    return float(optimizer.param_groups[0]["lr"])


class _Agreement:
    """Of each gradient with the one before. An update makes its gradients anew, so that the last ones can be held."""

    def __init__(self) -> None:
        self.cosine = 0.0
        self._before: dict[Tensor, Tensor] = {}

    def note(self, held: list[nn.Parameter]) -> None:
        """Before clipping; of the weights that had a gradient both times."""
        now: dict[Tensor, Tensor] = {weight: _dense(weight.grad) for weight in held}
        both = [weight for weight in now if weight in self._before and now[weight].shape == self._before[weight].shape]
        pairs = [(now[weight].flatten(), self._before[weight].flatten()) for weight in both]
        product = float(sum((torch.dot(a, b) for a, b in pairs), torch.zeros(())))
        norms = [float(nn.utils.get_total_norm([pair[side] for pair in pairs])) for side in (0, 1)] if pairs else [0.0]
        self.cosine = product / math.prod(norms) if math.prod(norms) > 0 else 0.0
        self._before = now


def _update(
    target: Target, setting: Setting, window: list[Any], noise: NoiseScale | None, agreement: _Agreement | None
) -> tuple[float, float]:
    """The loss and the gradient's norm. Where one isn't finite the weights stay as they are."""
    target.optimizer.zero_grad(set_to_none=True)
    if len(window) == 1 and noise is None:
        found = scalar(target.loss(target.model, window[0]))
        torch.autograd.backward(found)
        loss = found.detach()
    else:
        loss = accumulate(target.model, target.loss, window, count=target.count, noise=noise).loss
    held = [weight for weight in target.weights() if weight.grad is not None]
    norm = nn.utils.get_total_norm([_dense(weight.grad) for weight in held])
    if agreement is not None:
        agreement.note(held)
    if torch.isfinite(loss) and torch.isfinite(norm):
        if setting.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(held, setting.clip_norm, norm)
        target.optimizer.step()
    return float(loss), float(norm)


def _dense(gradient: Any) -> Tensor:
    """The values of a sparse one."""
    values: Tensor = gradient.coalesce().values() if gradient.is_sparse else gradient
    return values


def _evaluate(target: Target, history: History) -> Evaluation:
    """In eval mode, without a trace in the training's random numbers."""
    assert target.validate is not None
    with _mode(target.model, training=False), torch.no_grad(), randomness.kept():
        found = target.validate(target.model)
    named = found if isinstance(found, Mapping) else {"loss": found}
    if "loss" not in named:
        given = ", ".join(map(str, named)) or "no figure"
        raise ConfigError(f"validate(model) gives {given} without a 'loss', by which trainings are compared")
    figures = {str(name): _number(str(name), value) for name, value in named.items()}
    loss = figures.pop("loss")
    return Evaluation(history.samples[-1], len(history.samples), sum(history.seconds), loss, figures)


def _number(name: str, value: Any) -> float:
    """Of what `validate` gives."""
    many = isinstance(value, Tensor) and value.numel() != 1
    if not many and not isinstance(value, str):  # which may be words of a number
        with suppress(TypeError, ValueError):
            return float(value)
    what = f"a tensor of {value.numel()} numbers" if many else f"a {type(value).__name__}"
    raise ConfigError(
        f"validate(model) gives {what} as its {name}: a number is needed, or a dict of numbers with a 'loss' among them"
    )
