"""A real DataLoader with a slow transform and a real model: what the sweep says, beside loops that know nothing of it.

The truth about waiting comes from two parts measured alone, batches without steps and steps without batches; the truth
about the recommended change from plain loops with and without it, in turn.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from stoker.batch.loading import LoaderOptions
from stoker.batch.sweeping import sweep
from stoker.batch.swept import Sweep
from stoker.batch.target import Target
from stoker.batch.timing import Effort

__all__ = ["LOADERS", "Loader", "examine"]

SIZE = 32
IMAGES = 4096
SIDE = 48


@dataclass(frozen=True)
class Loader:
    """What reading and transforming one image costs."""

    name: str
    read_seconds: float
    """Asleep, as for a disk or a network."""
    resizes: int
    """Bicubic there and back, computed."""


LOADERS = (
    Loader("slow disk", 0.0015, 1),
    Loader("slow transform", 0.0, 6),
    Loader("quick", 0.0, 0),
)


class Images(Dataset[tuple[Tensor, int]]):
    """Noise with a label; every image costs what the loader says."""

    def __init__(self, loader: Loader) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(0, 256, (256, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
        self.loader = loader

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.loader.read_seconds:
            time.sleep(self.loader.read_seconds)
        image = self.images[index % 256].float().div(255)
        for _ in range(self.loader.resizes):
            larger = F.interpolate(image[None], scale_factor=2.0, mode="bicubic", antialias=True)
            image = F.interpolate(larger, size=(SIDE, SIDE), mode="bicubic", antialias=True)[0]
        return image, index % 10


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10),
    )  # fmt: skip


def make_target(loader: Loader) -> Target:
    images, model = Images(loader), network()

    def loss(module: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(module(batch[0]), batch[1])

    return Target(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        make_batch=lambda size: (torch.rand(size, 3, SIDE, SIDE), torch.arange(size) % 10),
        loss=loss,
        most=IMAGES,
        load=lambda size, options: DataLoader(images, size, shuffle=True, drop_last=True, **options.keywords()),
    )


def steps_alone(target: Target, count: int) -> float:
    """Seconds per step on one batch."""
    batch = target.make_batch(SIZE)
    for _ in range(3):
        target.step_on(batch)
    times = []
    for _ in range(count):
        start = time.perf_counter()
        target.step_on(batch)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def loop(target: Target, options: LoaderOptions, count: int, train: bool = True) -> float:
    """Seconds per batch of a plain loop, the first of them (workers that start) left out."""
    assert target.load is not None
    dropped = 4 + options.workers * options.ahead
    start = 0.0
    for i, batch in enumerate(target.load(SIZE, options)):
        if i == dropped:
            start = time.perf_counter()
        if train:
            target.step_on(batch)
        if i == dropped + count - 1:
            break
    return (time.perf_counter() - start) / count


def examine(loader: Loader, quick: bool) -> dict[str, Any]:
    """The sweep's figures, and those of plain loops."""
    torch.set_num_threads(1)
    target, count = make_target(loader), 20 if quick else 50
    sizes = [8, SIZE] if quick else [4, 8, 16, SIZE, 2 * SIZE]
    effort = Effort(seconds=0.3 if quick else 0.7)
    found = sweep(target, sizes, present=SIZE, loader=LoaderOptions(), roofline=False, effort=effort)
    print(found, flush=True)
    fetch, step = loop(target, LoaderOptions(), count, train=False), steps_alone(target, count)
    data = found.at(SIZE).data
    assert data is not None
    share = fetch / (fetch + step)
    return {
        "loader": loader.name,
        "verdict": found.verdict.kind,
        "batch_ms": round(fetch * 1e3, 2),
        "step_ms": round(step * 1e3, 2),
        "share": round(share, 4),
        "share_found": round(data.waited, 4),
        "share_by_rerun": round(data.by_rerun, 4),
        "share_within_5_points": abs(data.waited - share) <= 0.05,
        **_recommended(found, target, count),
    }


def _recommended(found: Sweep, target: Target, count: int) -> dict[str, Any]:
    """The gain of the workers it recommends: predicted, measured by the sweep, and by plain loops in turn."""
    workers = next(each for each in found.remedies if each.name == "workers")
    if workers.loading is None:
        return {"change": workers.change}
    turns = [[loop(target, options, count) for options in (LoaderOptions(), workers.loading)] for _ in range(3)]
    before, after = (statistics.median(column) for column in zip(*turns, strict=True))
    gain = before / after - 1
    assert workers.predicted is not None
    assert workers.measured is not None
    return {
        "change": f"workers {workers.change}",
        "predicted": round(workers.predicted, 3),
        "measured_by_sweep": round(workers.measured, 3),
        "measured_by_plain_loops": round(gain, 3),
        "gain_within_20_percent": abs(gain - workers.predicted) <= 0.2 * workers.predicted,
    }
