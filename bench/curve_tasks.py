"""Small real trainings with faults that can be planted in them, for bench.curves.

Each family makes a fresh target of the same data; only first weights and order follow the training's seed.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stoker.batch import LoaderOptions, Target
from stoker.batch.scaling import Kind

__all__ = ["Batch", "Data", "Family", "Spoil", "spoiled", "target"]

Batch = tuple[Tensor, Tensor]
Data = tuple[Tensor, Tensor, Tensor, Tensor]
"""Inputs and answers to train on, then those held out."""
Spoil = Literal["", "labels", "rows", "shard"]
"""How a share of the training data is bad: wrong answers, rows of noise many times too large, or wrong answers of one
stretch of an unshuffled epoch."""
LONG = 20.0
"""How many times too large the numbers of a corrupted row are."""


@dataclass(frozen=True)
class Family:
    """One kind of task. Around `rate` the best at `examples` per update is looked for on a grid."""

    name: str
    data: Callable[[], Data]
    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Kind
    rate: float
    examples: int
    samples: int
    """That a training has."""


def target(family: Family, *, spoil: Spoil = "", share: float = 0.3, dead: bool = False, fade: int = 0) -> Target:
    """`spoil`, `share`: of the training data. `dead`: first weights at which units are saturated. `fade`: updates after
    which the learning rate falls to nothing within as many more as a tenth.
    """
    inputs, answers, held_inputs, held_answers = family.data()
    if spoil:
        seen = min(len(inputs), family.samples)
        inputs, answers = spoiled(inputs[:seen], answers[:seen], spoil, share)
    model = family.model()
    if dead:
        saturate(model)
    if family.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=family.rate, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=family.rate)
    if fade:
        fading(optimizer, fade)

    def load(size: int, options: LoaderOptions) -> Iterator[Batch]:
        # an unshuffled stretch stays together: its examples come one after the other
        order = torch.arange(len(inputs)) if spoil == "shard" else torch.randperm(len(inputs))
        for rows in order.split(size):
            if len(rows) == size:
                yield inputs[rows], answers[rows]

    return Target(
        model,
        optimizer,
        lambda size: (inputs[:size], answers[:size]),
        lambda model, batch: family.loss(model(batch[0]), batch[1]),
        most=len(inputs),
        load=load,
        validate=lambda model: float(family.loss(model(held_inputs), held_answers)),
    )


def spoiled(inputs: Tensor, answers: Tensor, how: Spoil, share: float) -> Batch:
    draw = torch.Generator().manual_seed(99)
    count = int(share * len(inputs))
    if how == "shard":
        start = int(0.45 * len(inputs))
        rows = torch.arange(start, start + count)
    else:
        rows = torch.randperm(len(inputs), generator=draw)[:count]
    inputs, answers = inputs.clone(), answers.clone()
    if how == "rows" and inputs.is_floating_point():
        inputs[rows] = LONG * torch.randn(inputs[rows].shape, generator=draw)
    elif how == "rows":  # ids: any of them
        inputs[rows] = torch.randint(0, int(inputs.max()) + 1, inputs[rows].shape, generator=draw)
    if answers.dtype == torch.long or how != "rows":
        anything = torch.randint(0, len(answers), (count,), generator=draw)
        answers[rows] = answers[anything] if answers.dim() == 1 else shuffled(answers[anything], draw)
    return inputs, answers


def shuffled(answers: Tensor, draw: torch.Generator) -> Tensor:
    return answers.flatten()[torch.randperm(answers.numel(), generator=draw)].view_as(answers)


def saturate(model: nn.Module) -> None:
    """Biases of all hidden units so low that they give nothing."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d)]
    for layer in layers[:-1]:
        assert layer.bias is not None
        nn.init.constant_(layer.bias, -30.0)


def fading(optimizer: torch.optim.Optimizer, after: int) -> None:
    done = 0

    def fall(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal done
        done += 1
        if done > after:
            for group in optimizer.param_groups:
                group["initial_lr"] *= math.exp(-100.0 / after)

    optimizer.register_step_post_hook(fall)
