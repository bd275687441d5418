"""A batch that follows the noise scale against the best fixed batch: updates to the same held-out loss.

A byte model (12 bytes of context, 60,000 parameters, AdamW) on the manual that comes with Python; another part of it is
held out. Each run has a horizon in samples: a warm-up, then a cosine. On two seeds of their own every fixed batch gets
the learning rate that suits it, and the best fixed batch is the one with the lowest held-out loss after equal samples.
Then, on three other seeds:

- noise: from half the best fixed batch, at the rate tuned there, following the measured noise scale; given 20 % more
  samples. It has to reach the best fixed batch's lowest held-out loss with at least 25 % fewer updates, on each seed.
- beside it: the same samples in a ramp, in stages (small, then large), at a plateau of the held-out loss (its rate
  doesn't fall: the batch grows instead), and in the best fixed batch and twice as large a one.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.common import arguments, finish
from stoker.batch.accumulation import accumulate
from stoker.batch.changing import ChangingBatches, Size
from stoker.batch.controllers.by_noise import ByNoise
from stoker.batch.controllers.by_plateau import ByPlateau
from stoker.batch.horizons import Decay, Horizon
from stoker.batch.noise import NoiseScale
from stoker.batch.rates import RateFollower
from stoker.batch.scaling import Rule
from stoker.batch.stages import Ramp, Stages

FEWER = 0.25
SEEDS = (0, 1, 2)
TUNED_ON = (100, 101)
SAMPLES, QUICK_SAMPLES = 300_000, 60_000
MORE = 1.2
"""Samples of the schedules over those of the fixed batches."""
FIXED = (64, 128, 256, 512)
RATES = (0.0057, 0.008, 0.0113)
"""At 64 examples; at others times the root of the batch's ratio."""
LARGEST = 1024
MULTIPLE = 4
EVALUATIONS = 60
WARMUP = 0.05
TIMES = 0.3
MEASURED_EVERY, PARTS = 4, 4
"""Updates between two that are measured, and the micro-batches of those."""
CONTEXT = 12
HELD_OUT = 40_000
"""Bytes, of which every fifth place is predicted."""


class Text:
    """Windows of the manual, and those of its held-out end."""

    def __init__(self) -> None:
        text = "\n".join(words for _, words in sorted(topics.topics.items())).encode()
        kinds, coded = torch.unique(torch.tensor(list(text)), return_inverse=True)
        self.kinds = len(kinds)
        self._bytes = coded[:-HELD_OUT]
        self.examples = len(self._bytes) - CONTEXT
        self.held_out = _windows(coded[-HELD_OUT:], torch.arange(0, HELD_OUT - CONTEXT, 5))

    def batch(self, places: list[int]) -> tuple[Tensor, Tensor]:
        return _windows(self._bytes, torch.tensor(places))


def _windows(coded: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    return coded[places[:, None] + torch.arange(CONTEXT)], coded[places + CONTEXT]


class Model(nn.Module):
    """Of the next byte."""

    def __init__(self, kinds: int) -> None:
        super().__init__()
        self.table = nn.Embedding(kinds, 16)
        self.within = nn.Linear(16 * CONTEXT, 128)
        self.out = nn.Linear(128, kinds)

    def forward(self, places: Tensor) -> Tensor:
        found: Tensor = self.out(F.gelu(self.within(self.table(places).flatten(1))))
        return found


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@dataclass(frozen=True)
class Look:
    """At the held-out loss."""

    updates: int
    samples: int
    seconds: float
    """Of training, looks left out."""
    loss: float


@dataclass(frozen=True)
class Trained:
    """One run."""

    looks: list[Look]
    switches: int = 0

    @property
    def best(self) -> Look:
        return min(self.looks, key=lambda look: look.loss)

    def reached(self, loss: float) -> Look | None:
        return next((look for look in self.looks if look.loss <= loss), None)


def train(
    text: Text,
    seed: int,
    sizes: Size,
    rate: float,
    base: int,
    samples: int,
    *,
    rule: Rule | None = None,
    decay: Decay = "cosine",
) -> Trained:
    """`rate` is right for `base` examples per update."""
    torch.manual_seed(seed)
    model = Model(text.kinds)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    batches = ChangingBatches(text.examples, sizes, granularity="step", seed=seed)
    follower = RateFollower(optimizer, Horizon(samples, WARMUP * samples, decay), base, rule=rule)
    noise = NoiseScale(smoothing=0.97, independent=True, every=1)
    looks: list[Look] = []
    looking, begun = 0.0, time.perf_counter()
    for places in batches.through(batches):  # never a whole epoch
        optimizer.zero_grad()
        step, batch = batches.progress.step, text.batch(places)
        if isinstance(sizes, ByNoise) and step % MEASURED_EVERY == 0:
            parts = [part.chunk(PARTS) for part in batch]
            accumulate(model, loss, list(zip(*parts, strict=True)), noise=noise)
            sizes.observe(noise.estimate(), batches.undrawn)
        else:
            torch.autograd.backward(loss(model, batch))
        follower.set(batches.samples, batches.handed)
        optimizer.step()
        done, before = batches.samples, batches.samples - batches.handed
        if done * EVALUATIONS // samples > before * EVALUATIONS // samples:
            look_begun = time.perf_counter()
            with torch.no_grad():
                found = float(loss(model, text.held_out))
            looking += time.perf_counter() - look_begun
            looks.append(Look(step, done, time.perf_counter() - begun - looking, found))
            if isinstance(sizes, ByPlateau):
                sizes.observe(found, batches.undrawn)
        if done >= samples:
            break
    return Trained(looks, len(sizes.switches) if isinstance(sizes, ByNoise | ByPlateau) else 0)


def tuned(text: Text, samples: int, rates: Sequence[float]) -> dict[int, tuple[float, float]]:
    """Of each fixed batch: the best rate, and the held-out loss at its end, mean over seeds."""
    found: dict[int, tuple[float, float]] = {}
    for examples in FIXED:
        ends = {
            rate: statistics.mean(
                train(text, seed, examples, rate, examples, samples).looks[-1].loss for seed in TUNED_ON
            )
            for rate in (each * math.sqrt(examples / FIXED[0]) for each in rates)
        }
        best = min(ends, key=lambda rate: ends[rate])
        found[examples] = best, ends[best]
        told = ", ".join(f"{rate:.3g}: {end:.4f}" for rate, end in ends.items())
        print(f"{examples:>4} fixed, held-out loss by learning rate: {told}", flush=True)
    return found


def schedules(best: int, rates: Mapping[int, float], samples: int) -> dict[str, Callable[[Text, int], Trained]]:
    """By name, how each is trained on a seed."""
    first, more = best // 2, round(MORE * samples)
    rate = rates[first]

    def runs(make: Callable[[], Size], **told: Any) -> Callable[[Text, int], Trained]:
        return lambda text, seed: train(text, seed, make(), rate, first, more, **told)

    def fixed(examples: int) -> Callable[[Text, int], Trained]:
        return lambda text, seed: train(text, seed, examples, rates[examples], examples, more)

    return {
        "by noise": runs(lambda: ByNoise(first, highest=LARGEST, multiple=MULTIPLE, times=TIMES, wait=50)),
        "ramp": runs(lambda: Ramp(first, LARGEST, over=more, multiple=MULTIPLE)),
        "stages": runs(lambda: Stages((first, 2 * best, 4 * best), (0, more // 3, 2 * more // 3), "samples")),
        "by plateau": runs(
            lambda: ByPlateau(first, 4 * LARGEST, patience=1, threshold=0.005), rule="keep", decay="constant"
        ),
        **{f"{examples} fixed, {MORE:g} x samples": fixed(examples) for examples in (best, 2 * best)},
    }


def main() -> None:
    quick = arguments(__doc__ or "").quick
    torch.set_num_threads(1)
    text, samples = Text(), QUICK_SAMPLES if quick else SAMPLES
    found = tuned(text, samples, RATES[1:2] if quick else RATES)
    best = min(found, key=lambda examples: found[examples][1])
    if not FIXED[0] < best < FIXED[-1]:
        raise SystemExit(f"the best fixed batch is {best}, an end of {FIXED}: try others")
    rates = {examples: rate for examples, (rate, _) in found.items()}
    runs: dict[str, list[Trained]] = {
        f"{examples} fixed": [train(text, seed, examples, rates[examples], examples, samples) for seed in SEEDS]
        for examples in ((best,) if quick else FIXED)
    }
    baseline = runs[f"{best} fixed"]
    for name, run in schedules(best, rates, samples).items():
        runs[name] = [run(text, seed) for seed in SEEDS]
    wanted = [one.best for one in baseline]
    print(f"\nbest fixed batch: {best}; to reach: " + ", ".join(f"{look.loss:.4f}" for look in wanted))
    print("                           lowest loss   updates, by seed          fewer   samples   seconds  switches")
    fewer: dict[str, list[float | None]] = {}
    for name, trained in runs.items():
        reached = [one.reached(look.loss) for one, look in zip(trained, wanted, strict=True)]
        fewer[name] = [
            None if one is None else 1 - one.updates / look.updates for one, look in zip(reached, wanted, strict=True)
        ]
        print(_line(name, trained, reached, fewer[name]))
    by_noise = fewer["by noise"]
    passed = all(one is not None and one >= FEWER for one in by_noise)
    print(f"by noise: at least {FEWER:.0%} fewer updates on each seed: {'yes' if passed else 'NO'}")
    finish(
        {
            "seeds": list(SEEDS),
            "best_fixed": best,
            "loss": [look.loss for look in wanted],
            "updates": [look.updates for look in wanted],
            "fewer_updates": by_noise,
            "all": fewer,
            "passed": passed,
        }
    )


def _line(name: str, trained: Sequence[Trained], reached: Sequence[Look | None], fewer: Sequence[float | None]) -> str:
    lowest = statistics.mean(one.best.loss for one in trained)
    updates = ", ".join("never" if look is None else f"{look.updates:,}" for look in reached)
    there = [look for look in reached if look is not None]
    saved = [one for one in fewer if one is not None]
    least = f"{min(saved):7.0%}" if len(saved) == len(fewer) else "      –"
    samples = f"{statistics.mean(look.samples for look in there):9,.0f}" if there else "        –"
    seconds = f"{statistics.mean(look.seconds for look in there):9.1f}" if there else "        –"
    switches = statistics.mean(one.switches for one in trained)
    return f"{name:<26} {lowest:>11.4f}   {updates:<23} {least} {samples} {seconds} {switches:9.1f}"


if __name__ == "__main__":
    main()
