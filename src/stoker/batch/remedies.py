"""Remedies for a step that waits: each one's gain is predicted from what was measured, then tried and measured."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from stoker.batch.curve import Fit, fit
from stoker.batch.instruments import Instruments
from stoker.batch.loading import ENOUGH, Fetches, LoaderOptions, fewest_workers, seconds_per_step
from stoker.batch.swept import Remedy
from stoker.batch.target import Target
from stoker.batch.timing import Effort, Loaded, Loading, Timed, batches, time_loader, time_steps

__all__ = ["At", "compiled", "larger_batch", "loader_remedies", "time_fetches"]

MORE_AHEAD = 4
"""Times as many prefetched batches are tried."""
WORTH = 0.05
"""Of a step's time or of throughput: a smaller wait, or gain, is not worth a change."""
LONGER = 4
"""Times as long as a size of the sweep is each remedy measured: waits come in bursts."""
ENDS = 2
"""Ends of an epoch that are timed, with and without workers that persist, in turn."""
EPOCH = 6
"""Times the seconds of a size that an epoch may take to be run to its end."""
FETCHES = 5
"""Batches that are made one by one, at least."""


@dataclass(frozen=True)
class At:
    """Where remedies are tried: a workload at one size, and what was measured there."""

    target: Loading
    size: int
    instruments: Instruments
    effort: Effort
    held: Timed
    """Steps on a batch held ready, synchronised after every one."""

    def run(self, options: LoaderOptions) -> Loaded:
        longer = replace(self.effort, seconds=LONGER * self.effort.seconds)
        return time_loader(self.target, self.size, options, self.instruments, longer)

    def per_unit(self, seconds: float) -> float:
        return seconds / self.size


def loader_remedies(at: At, options: LoaderOptions, now: Loaded) -> Iterator[Remedy]:
    """More workers; then, with those that help, more prefetching, workers that persist, pinned memory."""
    if now.share < WORTH:
        note = f"the loader is waited for {now.share:.1%} of a step: nothing to gain"
        yield Remedy("workers", "leave them", 0.0, False, note, at.per_unit(now.seconds), None, "not needed")
        return
    fetches = time_fetches(at)
    workers, after = _workers(at, options, now, fetches)
    yield workers
    best, loaded = options, now
    if workers.loading is not None and after.seconds < now.seconds:
        best, loaded = workers.loading, after
    if best.workers:
        remedy, after = _prefetch(at, best, loaded, fetches)
        yield remedy
        if after.seconds < loaded.seconds * (1 - ENOUGH):
            best, loaded = remedy.loading or best, after
        yield _persistent(at, best, loaded, fetches)
    yield _pinned(at, best, loaded)


def time_fetches(at: At) -> Fetches:
    """Batches made in this process, one after the other, without training on them."""
    stream = batches(at.target, at.size, LoaderOptions(), at.instruments)
    clock = at.instruments.clock
    try:
        next(stream)  # caches, lazily opened files
        seconds: list[float] = []
        start, busy = clock(), at.instruments.busy()
        while len(seconds) < FETCHES or (clock() - start < at.effort.seconds and len(seconds) < at.effort.most):
            seconds.append(next(stream)[0])
        busy = (at.instruments.busy() - busy) / len(seconds)
    finally:
        stream.close()
    return Fetches(tuple(seconds), busy, at.held.busy, at.instruments.cores)


def _workers(at: At, options: LoaderOptions, now: Loaded, fetches: Fetches) -> tuple[Remedy, Loaded]:
    computing = now.seconds - now.waited
    count = fewest_workers(fetches, computing, max(at.instruments.cores, options.workers + 1))
    mean = sum(fetches.seconds) / len(fetches.seconds)
    basis = (
        f"a batch takes {mean * 1e3:,.3g} ms to make, {fetches.busy / mean:.0%} of it computing, and a step on it "
        f"{computing * 1e3:,.3g} ms; {fetches.cores} cores"
    )
    before = at.per_unit(now.seconds)
    if count <= options.workers:
        return Remedy("workers", f"leave {options.workers}", 0.0, False, basis, before, None, "enough of them"), now
    changed = replace(options, workers=count)
    predicted = now.seconds / seconds_per_step(fetches, computing, changed) - 1
    if predicted < WORTH:
        note = "nothing to gain"
        return Remedy("workers", f"leave {options.workers}", predicted, False, basis, before, None, note), now
    after = at.run(changed)
    change = f"{options.workers} -> {count}"
    return Remedy(
        "workers", change, predicted, False, basis, before, at.per_unit(after.seconds), loading=changed
    ), after


def _prefetch(at: At, options: LoaderOptions, now: Loaded, fetches: Fetches) -> tuple[Remedy, Loaded]:
    changed = replace(options, prefetch_factor=options.ahead * MORE_AHEAD)
    simulated = [seconds_per_step(fetches, now.seconds - now.waited, each) for each in (options, changed)]
    after = at.run(changed)
    spread = max(fetches.seconds) / (sum(fetches.seconds) / len(fetches.seconds))
    return Remedy(
        "prefetch_factor",
        f"{options.ahead} -> {changed.ahead}",
        simulated[0] / simulated[1] - 1,
        False,
        f"helps where batches differ: the slowest took {spread:.2g}x the mean",
        at.per_unit(now.seconds),
        at.per_unit(after.seconds),
        loading=changed,
    ), after


def _persistent(at: At, options: LoaderOptions, now: Loaded, fetches: Fetches) -> Remedy:
    """An epoch's end costs the start of its workers; what is tried is that end alone, spread over the epoch's steps."""
    before, changed = at.per_unit(now.seconds), replace(options, persistent_workers=True)
    name, change = "persistent_workers", "off -> on"
    if options.persistent_workers:
        return Remedy(name, "leave them on", 0.0, False, "they are on", before, None, "on already")
    if now.steps_per_epoch is None:
        return Remedy(name, change, None, False, "the loader has no length", before, None, "its epoch isn't known")
    mean = sum(fetches.seconds) / len(fetches.seconds)
    starting = max(now.first_wait - mean, 0.0) / now.steps_per_epoch
    predicted = now.seconds / max(now.seconds - starting, 1e-9) - 1
    basis = f"starting workers took {now.first_wait:.2g} s, once in {now.steps_per_epoch} steps"
    epoch = now.steps_per_epoch * now.seconds
    if epoch > EPOCH * at.effort.seconds:
        note = f"an epoch takes {epoch:,.0f} s, too long to be run to its end"
        return Remedy(name, change, predicted, False, basis, before, None, note, changed)
    ends = [_epoch_end(at, each) for each in (options, changed) * ENDS]
    saved = (statistics.median(ends[::2]) - statistics.median(ends[1::2])) / now.steps_per_epoch
    after = at.per_unit(max(now.seconds - saved, 1e-9))
    return Remedy(name, change, predicted, False, basis, before, after, loading=changed)


def _epoch_end(at: At, options: LoaderOptions) -> float:
    """Seconds from the last batch of one epoch to the first of the next."""
    loader = at.target.load(at.size, options)
    last = at.instruments.clock()
    for _ in loader:
        last = at.instruments.clock()
    next(iter(loader))
    return at.instruments.clock() - last


def _pinned(at: At, options: LoaderOptions, now: Loaded) -> Remedy:
    before = at.per_unit(now.seconds)
    if options.pin_memory:
        return Remedy("pin_memory", "leave it on", 0.0, False, "it is on", before, None, "on already")
    if at.target.device.type != "cuda":
        basis = f"batches stay on the {at.target.device.type}"
        return Remedy("pin_memory", "leave it off", 0.0, False, basis, before, None, "nothing to copy faster")
    changed = replace(options, pin_memory=True)
    batch = next(iter(at.target.load(at.size, options)))
    pageable, pinned = (_copy_seconds(at, batch, pin) for pin in (False, True))
    after = at.run(changed)
    return Remedy(
        "pin_memory",
        "off -> on",
        now.seconds / max(now.seconds - (pageable - pinned), 1e-9) - 1,
        False,
        f"a batch's copy takes {pageable * 1e3:.3g} ms, from pinned memory {pinned * 1e3:.3g} ms",
        before,
        at.per_unit(after.seconds),
        loading=changed,
    )


def _copy_seconds(at: At, batch: Any, pin: bool) -> float:
    held = tree_map_only(torch.Tensor, lambda each: each.pin_memory() if pin else each, batch)

    def copy() -> None:
        tree_map_only(torch.Tensor, lambda each: each.to(at.target.device, non_blocking=pin), held)

    return time_steps(copy, at.size, at.instruments, at.effort).median


def larger_batch(present: int, larger: int, seconds: dict[int, float]) -> Remedy:
    """From the present size to another measured one; predicted by a line through all other points."""
    others = [size for size in sorted(seconds) if size != larger]
    line: Fit | None = fit(others, [seconds[size] for size in others]) if len(others) > 1 else None
    predicted = line.rate(larger) / (present / seconds[present]) - 1 if line else None
    basis = "a line through the other points" if line else "too few other points for a line"
    before, after = seconds[present] / present, seconds[larger] / larger
    return Remedy("larger batch", f"{present:,} -> {larger:,}", predicted, False, basis, before, after)


def compiled(
    target: Target, size: int, batch: Any, seconds: float, line: Fit, instruments: Instruments, effort: Effort
) -> Remedy:
    """torch.compile of the model, with CUDA graphs where there is CUDA; at most the step's fixed cost can go."""
    on_cuda = target.device.type == "cuda"
    change = "torch.compile(model" + (', mode="reduce-overhead")' if on_cuda else ")")
    bound = seconds / (line.beta * size) - 1 if line.beta > 0 else None
    basis = f"{max(line.floor, line.alpha) * 1e3:.3g} ms of a step don't grow with the batch"
    made = torch.compile(target.model, mode="reduce-overhead" if on_cuda else "default")
    changed = replace(target, model=cast(nn.Module, made))
    try:
        after = time_steps(lambda: changed.step_on(batch), size, instruments, effort).median
    except Exception as error:  # whatever a compiler meets: the remedy isn't to be had, and the sweep goes on
        note = f"can't be compiled: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Remedy("compile", change, bound, True, basis, seconds / size, None, note)
    return Remedy("compile", change, bound, True, basis, seconds / size, after / size)
