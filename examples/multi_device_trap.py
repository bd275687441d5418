"""The multi-device trap on real ranks: 64 images a device train well, 512 over all devices don't, at equal samples.

python examples/multi_device_trap.py           # about a minute on two cores
python examples/multi_device_trap.py --quick   # three seeds for six

Handwritten digits (they come with scikit-learn), a small conv net, SGD with momentum; its learning rate is right for 64
images per update on one device. Two gloo processes are the devices. `judge_trap` reads the held-out losses.
"""

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stoker.batch import LoaderOptions, Maker, Target
from stoker.batch.scope import Scope
from stoker.batch.trainings.on_ranks import Legs, train_on_ranks
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Plan
from stoker.batch.trainings.trap import Measured, Trap, judge_trap

HELD_OUT = 360
DEVICE = 64
"""Images of a micro-batch: what fits one device."""
SAMPLES = 16_384
"""That every training sees."""

Batch = tuple[Tensor, Tensor]


def make_target() -> Target:
    """Called in every rank. It doesn't seed: each training begins from a seed of its own."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 16  # (1797, 1, 8, 8)
    labels = torch.tensor(digits.target)[order]
    data = TensorDataset(images[HELD_OUT:], labels[HELD_OUT:])
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 4 * 4, 10),
    )  # fmt: skip

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def load(size: int, options: LoaderOptions) -> Iterable[Batch]:
        return DataLoader(data, size, shuffle=True, drop_last=True, **options.keywords())

    def validate(model: nn.Module) -> dict[str, float]:
        outputs = model(images[:HELD_OUT])
        right = (outputs.argmax(1) == labels[:HELD_OUT]).float().mean()
        return {"loss": F.cross_entropy(outputs, labels[:HELD_OUT]).item(), "accuracy": right.item()}

    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return Target(model, optimizer, lambda size: data[:size], loss, load=load, validate=validate)


def legs(examples: int, *, rule: bool = False, first: int = 0) -> Legs:
    """A training at a global batch; `rule`: the rate follows linearly from 64; `first`: the batch of its first half."""
    setting = Setting(examples, base_examples=DEVICE, rule="linear" if rule else "keep", examples_per_microbatch=DEVICE)
    plan = Plan(SAMPLES, evaluations=1, kind="sgd")
    if not first:
        return [(setting, plan)]
    half = replace(plan, samples=SAMPLES // 2)
    return [(replace(setting, examples_per_update=first), half), (setting, half)]


CASES: dict[str, tuple[int, Legs]] = {
    "one device, 64": (1, legs(64)),
    "256": (2, legs(256)),
    "512": (2, legs(512)),
    "512 on one device": (1, legs(512)),
    "512, rate x 8": (2, legs(512, rule=True)),
    "128 for half, then 512, rates following": (2, legs(512, rule=True, first=128)),
}
"""Ranks, and what they train."""


def measure(seeds: range) -> dict[str, list[tuple[float, float]]]:
    """(held-out loss, accuracy) of each case at the end, by seed."""
    maker = Maker(f"{Path(__file__).resolve()}:make_target")
    found: dict[str, list[tuple[float, float]]] = {}
    for ranks in (1, 2):
        named = [name for name, (count, _) in CASES.items() if count == ranks]
        asked = [[(replace(setting, seed=seed), plan) for setting, plan in CASES[name][1]]
                 for name in named for seed in seeds]  # fmt: skip
        histories = [legs[-1] for legs in train_on_ranks(maker, asked, ranks)]
        for place, name in enumerate(named):
            ended = histories[place * len(seeds) : (place + 1) * len(seeds)]
            found[name] = [(h.final_loss, 0.0 if h.diverged else h.evaluations[-1].figures["accuracy"]) for h in ended]
    return found


def judged(found: dict[str, list[tuple[float, float]]]) -> Trap:
    """What the losses say."""

    def measured(name: str, accumulated: int, rate: float = 1.0, told: str = "") -> Measured:
        return Measured(Scope(DEVICE, accumulated, CASES[name][0]), tuple(loss for loss, _ in found[name]), rate, told)

    return judge_trap(
        measured("256", 2),
        measured("512", 4),
        [
            measured("512 on one device", 8),
            measured("512, rate x 8", 4, 8.0),
            measured("128 for half, then 512, rates following", 4, 8.0, "128 for half, then 512, rates following"),
        ],
        samples=SAMPLES,
        base_examples=DEVICE,
    )


def main() -> None:
    """Prints the table and the judgement."""
    found = measure(range(3) if "--quick" in sys.argv else range(6))
    print(f"{'':42} updates  held-out loss (by seed)")
    for name, (_, made) in CASES.items():
        updates = sum(plan.updates(setting) for setting, plan in made)
        losses = [loss for loss, _ in found[name]]
        right = sum(accuracy for _, accuracy in found[name]) / len(losses)
        each = " ".join(f"{loss:.3f}" for loss in losses)
        print(f"{name:42} {updates:7}  {sum(losses) / len(losses):.3f} ({each}), {right:.1%} right")
    print(judged(found))


if __name__ == "__main__":
    main()
