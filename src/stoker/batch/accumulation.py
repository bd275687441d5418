"""Exact gradient accumulation in a plain PyTorch loop: any split into micro-batches gives the gradient of the whole.

The mean over a whole batch is the mean over its micro-batches only where each weighs as many units (tokens, examples)
as it holds: sum over i of n_i / N x mean_i. Dividing each by the number of micro-batches is right for equal n_i alone;
so is the average over ranks that DistributedDataParallel takes. N therefore counts the units of all micro-batches of
all ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stoker.batch import nest
from stoker.batch.noise import NoiseScale
from stoker.batch.norms import MicrobatchNorms
from stoker.batch.scalar import scalar
from stoker.errors import ConfigError, RunError

__all__ = ["Accumulated", "Count", "accumulate", "windows"]

OTHERS = ("no_sync", "set_requires_gradient_sync")
"""What wrappers have that exchange gradients: FSDP of either kind, engines."""
Count = Callable[[Any], float | Tensor]
"""How many units (examples, tokens) the loss of a micro-batch is the mean or sum of."""


@dataclass(frozen=True)
class Accumulated:
    """What one window of micro-batches came to, over all ranks."""

    loss: Tensor
    """() the loss of the whole batch, detached, on the device."""
    count: float
    """Units in the whole batch."""
    microbatches: int
    """Run on this rank; those without a unit are skipped."""


def accumulate(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    microbatches: Iterable[Any],
    *,
    count: Count | Sequence[float] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    scaler: torch.amp.GradScaler | None = None,
    noise: NoiseScale | None = None,
) -> Accumulated:
    """Run forward and backward of each micro-batch, and add to `.grad` the gradient of the whole batch.

    `loss(model, microbatch)` is a scalar: by `reduction` the mean or the sum over the units of that micro-batch.
    `count` gives those units, by a function or one number for each micro-batch; None: its examples (dim 0). The
    gradient is that of the mean over all units; with "sum" and no `count`, that of the plain sum.

    With a DistributedDataParallel model the whole batch is that of all ranks: their counts are added up, and gradients
    are exchanged once, in the last backward. Ranks may have different numbers of micro-batches. With a `scaler` the
    loss is scaled; unscale, clip and step after the call, as clipping needs the whole gradient.

    `noise` gets, in the updates it measures, the squared norms of every micro-batch's gradient, on every rank those of
    all, and of the whole; then there may be no gradient from before.

    Raises ConfigError for a loss that can't be differentiated or counts that don't fit, RunError for a window without
    any unit, on every rank alike.
    """
    window = list(microbatches)
    if not isinstance(model, DistributedDataParallel) and any(hasattr(model, name) for name in OTHERS):
        raise ConfigError(
            f"{type(model).__name__} exchanges gradients in its own way, and accumulate doesn't know how it divides "
            "them: give a plain module or one in DistributedDataParallel"
        )
    ranks = dist.get_world_size(model.process_group) if isinstance(model, DistributedDataParallel) else 1
    plain_sum = reduction == "sum" and count is None
    counts, fault = _counts(window, count)
    norms = MicrobatchNorms(model, noise) if noise is not None and noise.begin_update() else None
    if norms is not None:
        fault = fault or norms.leftover()
    total = _total(model, counts, reduction, fault, watched=norms is not None)
    run = [(batch, n) for batch, n in zip(window, counts, strict=True) if n > 0 or reduction == "sum"]
    summed = torch.zeros(())
    scale = scaler.get_scale() if scaler is not None and norms is not None else 1.0
    with norms or nullcontext():
        for place, (batch, n) in enumerate(run):
            weight = 1.0 if plain_sum else (n / total if reduction == "mean" else 1 / total)
            last = place == len(run) - 1
            with model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext():
                part = _backward(loss(model, batch), weight, ranks, scaler)
            summed = summed.to(part.device) + part
            if norms is not None:
                norms.end_microbatch()
    if isinstance(model, DistributedDataParallel):
        dist.all_reduce(summed, group=model.process_group)
    if norms is not None:
        norms.report([n for _, n in run], scale, mean=not plain_sum)
    return Accumulated(loss=summed, count=total, microbatches=len(run))


def windows(microbatches: Iterable[Any], microbatches_per_update: int) -> Iterator[list[Any]]:
    """The micro-batches of each update, in order; the last window holds what is left, and is no special case."""
    if microbatches_per_update < 1:
        raise ConfigError(f"microbatches_per_update = {microbatches_per_update}: at least 1")
    window: list[Any] = []
    for batch in microbatches:
        window.append(batch)
        if len(window) == microbatches_per_update:
            yield window
            window = []
    if window:
        yield window


def _backward(found: Any, weight: float, ranks: int, scaler: torch.amp.GradScaler | None) -> Tensor:
    """Adds a micro-batch's share of the gradient; gives its share of the loss, detached."""
    value = scalar(found)
    # in fp16 a weight of one in 50,000 would lose its digits
    part = value.reshape(()).to(torch.promote_types(value.dtype, torch.float32)) * weight
    scaled = part * ranks  # DDP divides by the ranks
    torch.autograd.backward(scaler.scale(scaled) if scaler is not None else scaled)
    return part.detach()


def _counts(window: Sequence[Any], count: Count | Sequence[float] | None) -> tuple[list[float], str]:
    """The units of each micro-batch, and what is wrong with them."""
    if count is None:
        count = nest.examples
    counts = [float(count(batch)) for batch in window] if callable(count) else [float(n) for n in count]
    if len(counts) != len(window):
        return counts, f"{len(counts)} counts for {len(window)} micro-batches: give one for each"
    if wrong := [n for n in counts if not 0 <= n < float("inf")]:
        return counts, f"a micro-batch counts {wrong[0]} units: a count is a number of tokens or examples"
    return counts, ""


def _total(model: nn.Module, counts: Sequence[float], reduction: str, fault: str, watched: bool) -> float:
    """Units over all ranks. A rank that failed alone would leave the others waiting: all learn of it here."""
    idle = not counts or (reduction == "mean" and not any(counts))
    own = [sum(counts), float(idle), float(bool(fault)), float(watched)]
    if not isinstance(model, DistributedDataParallel):
        numbers = [own]
    else:
        device = next(model.parameters()).device
        mine = torch.tensor(own, dtype=torch.float64, device=device)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(model.process_group))]
        dist.all_gather(gathered, mine, group=model.process_group)
        numbers = [row.tolist() for row in gathered]
    if any(wrong for _, _, wrong, _ in numbers):
        raise ConfigError(
            fault or "another rank can't accumulate this window (counts, gradients from before); its own error says why"
        )
    if len({by for *_, by in numbers}) > 1:
        raise ConfigError(
            "some ranks measure the noise of this update and others don't: give accumulate a `noise` on all of them, "
            "made alike and in the same state, or on none"
        )
    if empty := [rank for rank, (_, none, _, _) in enumerate(numbers) if none]:
        where = f" on rank {', '.join(map(str, empty))}" if isinstance(model, DistributedDataParallel) else ""
        raise RunError(
            f"a window without a single token or example{where}: nothing to differentiate there. Leave such windows "
            "out or deal the micro-batches anew, so that every rank has some"
        )
    total = sum(number for number, *_ in numbers)
    if total == 0:
        raise RunError("a window of 0 tokens or examples over all ranks: its loss has no mean; leave it out")
    return total
