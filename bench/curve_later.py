"""Families of trainings that came after the rules of read_curve were made, for bench.curves."""

from functools import cache

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn

from bench.curve_tasks import Data, Family

__all__ = ["LATER"]


@cache
def ratings() -> Data:
    """What 300 users give 300 items, by tastes of six dimensions, and by mood."""
    draw = torch.Generator().manual_seed(12)
    users, items = torch.randn(300, 6, generator=draw), torch.randn(300, 6, generator=draw)
    liked = torch.randn(300, generator=draw)
    pairs = torch.randint(0, 300, (14_000, 2), generator=draw)
    taste = (users[pairs[:, 0]] * items[pairs[:, 1]]).sum(dim=1) / 6**0.5
    given = 0.6 * taste + 0.7 * liked[pairs[:, 1]] + 0.4 * torch.randn(len(pairs), generator=draw)
    return pairs[:12_000], given[:12_000], pairs[12_000:], given[12_000:]


@cache
def arm() -> Data:
    """Where the hand of an arm of three joints is, and which way it points, by its angles."""
    draw = torch.Generator().manual_seed(13)
    angles = 2 * torch.rand(11_000, 3, generator=draw) - 1
    turned = (angles * torch.tensor([2.0, 1.5, 1.5])).cumsum(dim=1)
    lengths = torch.tensor([1.0, 0.8, 0.5])
    hand = torch.stack([(lengths * turned.cos()).sum(1), (lengths * turned.sin()).sum(1), turned[:, 2].sin()], dim=1)
    hand = hand + 0.05 * torch.randn(hand.shape, generator=draw)
    return angles[:10_000] * 1.7, hand[:10_000], angles[10_000:] * 1.7, hand[10_000:]


@cache
def tumours() -> Data:
    """30 measures of cells, and whether they are malignant."""
    found = load_breast_cancer()
    rows = torch.tensor(found.data, dtype=torch.float32)
    rows, answers = (rows - rows.mean(0)) / rows.std(0), torch.tensor(found.target)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(14))
    rows, answers = rows[order], answers[order]
    return rows[:400], answers[:400], rows[400:], answers[400:]


@cache
def codes() -> Data:
    """Digits, to be written in eight numbers and read again."""
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(15))]
    return images[:1500], images[:1500], images[1500:], images[1500:]


@cache
def shapes() -> Data:
    """Noisy pictures of 12 x 12 with two discs and a bar, and which pixels are a disc's."""
    draw = torch.Generator().manual_seed(16)
    count, side = 3_500, 12
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    mask = torch.zeros(count, side, side, dtype=torch.bool)
    for _ in range(2):
        at = side * torch.rand(count, 2, 1, 1, generator=draw)
        radius = 1.5 + 1.5 * torch.rand(count, 1, 1, generator=draw)
        mask |= (y - at[:, 0]) ** 2 + (x - at[:, 1]) ** 2 < radius**2
    bar = (y - torch.randint(0, side, (count, 1, 1), generator=draw)).abs() < 1
    pictures = torch.maximum(mask.float(), bar.float()) + 0.5 * torch.randn(count, side, side, generator=draw)
    inputs, answers = pictures.unsqueeze(1), mask.float().unsqueeze(1)
    return inputs[:3_000], answers[:3_000], inputs[3_000:], answers[3_000:]


class Ratings(nn.Module):
    """Factors of users and items, their products read by two layers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(300, width), nn.Embedding(300, width)
        self.layers = nn.Sequential(nn.Linear(3 * width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, pairs: Tensor) -> Tensor:  # (B, 2) -> (B,)
        user, item = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        return self.layers(torch.cat([user, item, user * item], dim=1)).squeeze(1)


def jointed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 48), nn.Tanh(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 3))


def tabular() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))


def writer() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8), nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 64))


def segments() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 1, 1)
    )


LATER = {
    each.name: each
    for each in (
        Family("ratings", ratings, Ratings, F.mse_loss, "adamw", 5e-3, 32, 8_000),
        Family("arm", arm, jointed, F.mse_loss, "sgd", 0.03, 32, 8_000),
        Family("tumours", tumours, tabular, F.cross_entropy, "sgd", 0.03, 16, 4_000),
        Family("codes", codes, writer, F.mse_loss, "adamw", 3e-3, 32, 8_000),
        Family("shapes", shapes, segments, F.binary_cross_entropy_with_logits, "sgd", 0.1, 32, 5_000),
    )
}
