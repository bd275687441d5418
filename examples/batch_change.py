"""Batch 64 to 128 under SGD: what the old learning rate loses, and what keeps the accuracy. Three minutes on a CPU.

    python examples/batch_change.py            # as in docs/scan.md
    python examples/batch_change.py --quick    # shorter, two seeds: that it runs

The data are the 1,797 handwritten digits that come with scikit-learn, shifted by up to a pixel and drowned in noise,
anew in each epoch, so that a small network gets about 82 % of the held-out ones right. All trainings of a seed see the
same 256,000 images in the same order: 4,000 updates of 64, or 2,000 of 128.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean, stdev

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from stoker.batch import LoaderOptions, Plan, Setting, Target, scan_rates
from stoker.batch.scanning.arms import Arm
from stoker.batch.student import quantile
from stoker.batch.trainings.training import train_anew

TRAINED = 1_437
"""Images; the other fifth is held out, each with 20 draws of noise."""
NOISE = 0.3
"""Standard deviation, where ink is 1 and paper 0."""
RATE = 0.16
"""The best at 64, as the scan below finds."""

Batch = tuple[Tensor, Tensor]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy, mean over the images."""
    return F.cross_entropy(model(batch[0]), batch[1])


def spoilt(images: Tensor, draw: torch.Generator | None = None) -> Tensor:
    """(N, 8, 8): each shifted by -1, 0 or 1 pixel both ways, with noise."""
    by = torch.randint(0, 3, (len(images), 2, 1), generator=draw) + torch.arange(8)  # (N, 2, 8): rows, columns
    padded = F.pad(images, (1, 1, 1, 1))
    shifted = padded[torch.arange(len(images))[:, None, None], by[:, 0, :, None], by[:, 1, None, :]]
    return shifted + NOISE * torch.randn(images.shape, generator=draw)


def make_target() -> Target:
    """Noisy digits, two hidden layers, plain SGD. The first weights are drawn from each training's seed."""
    digits = load_digits()
    fixed = torch.Generator().manual_seed(0)
    order = torch.randperm(len(digits.target), generator=fixed)
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]
    (images, tested), (labels, answers) = images.split(TRAINED), labels.split(TRAINED)
    mean, scale = images.mean(), images.std()
    held_out = (spoilt(tested.repeat(20, 1, 1), fixed) - mean) / scale, answers.repeat(20)

    def load(size: int, options: LoaderOptions) -> Iterable[Batch]:
        """An epoch. Its noise is drawn at its beginning, so that images are the same whatever the size."""
        order = torch.randperm(len(images))
        x, y = (spoilt(images[order]) - mean) / scale, labels[order]
        for start in range(0, len(x) - size + 1, size):
            yield x[start : start + size], y[start : start + size]

    def validate(model: nn.Module) -> dict[str, float]:
        outputs = model(held_out[0])
        right = (outputs.argmax(1) == held_out[1]).float().mean()
        return {"loss": F.cross_entropy(outputs, held_out[1]).item(), "accuracy": right.item()}

    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10)
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    make_batch = lambda size: ((images[:size] - mean) / scale, labels[:size])  # noqa: E731
    return Target(model, optimizer, make_batch, loss, most=TRAINED, load=load, validate=validate)


def main(*words: str) -> dict[str, Arm]:
    """Tunes the rate at 64, then trains each way of going to 128."""
    quick = "--quick" in words
    plan = Plan(samples=12_800 if quick else 256_000, evaluations=4)
    seeds = range(2 if quick else 10)
    now = Setting(examples_per_update=64)
    print(scan_rates(make_target, plan, now, factors=(0.5, 1, 2), seeds=seeds[:3], on_part=told), end="\n\n")
    doubled = replace(now, examples_per_update=128, base_examples=64)
    warmed = replace(doubled, warmup_samples=min(300 * 128, plan.samples // 2))
    ways = {
        "64": now,
        "128, rate unscaled": replace(doubled, rule="keep"),
        "128, rate x 2": doubled,
        "128, rate x 2, 300 of warm-up": warmed,
        "the same as 2 x 64 accumulated": replace(warmed, examples_per_microbatch=64),
    }
    arms = {}
    for name, setting in ways.items():
        arms[name] = Arm(tuple(train_anew(make_target, replace(setting, seed=seed), plan) for seed in seeds))
        told(name, None)
    print("\n".join(table(arms, plan.samples)))
    whole, parts = (arm.histories[0].loss for arm in list(arms.values())[-2:])
    apart = [max(abs(a - b) for a, b in zip(whole[:first], parts[:first], strict=True)) for first in (10, 100)]
    print(
        f"\n128 at once and 2 x 64: training losses of the first 10 updates differ by at most {apart[0]:.0e}, ", end=""
    )
    print(f"of the first 100 by {apart[1]:.0e}")
    return arms


def table(arms: dict[str, Arm], samples: int) -> Iterable[str]:
    """Held-out loss and accuracy at the end, and how many points each differs from the first, seed by seed."""
    yield f"{f'at {samples:,} images':<34}{'rate':>6}{'updates':>9}{'loss':>9}{'accuracy':>11}{'against 64 (95 %)':>32}"
    base = accuracies(next(iter(arms.values())))
    for name, arm in arms.items():
        right = accuracies(arm)
        apart = [100 * (after - before) for after, before in zip(right, base, strict=True)]
        half = quantile(len(apart) - 1) * stdev(apart) / len(apart) ** 0.5
        low, mean, high = fmean(apart) - half, fmean(apart), fmean(apart) + half
        against = f"{mean:+.2f} ({low:+.2f} to {high:+.2f}) points" if any(apart) else ""
        yield (
            f"{name:<34}{arm.learning_rate:>6.3g}{arm.updates:>9,}{arm.mean:>9.4f}{100 * fmean(right):>9.2f} %"
            f"{against:>32}"
        )


def accuracies(arm: Arm) -> Sequence[float]:
    """At the end, by seed."""
    return [history.evaluations[-1].figures["accuracy"] for history in arm.histories]


def told(what: str, left: float | None) -> None:
    """On stderr, so that what is printed at the end stands alone."""
    print(what if left is None else f"{what}; about {left:.0f} s left", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
