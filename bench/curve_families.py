"""The families of trainings that the thresholds of read_curve were chosen and mended on, for bench.curves."""

from functools import cache
from pydoc_data.topics import topics

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits, load_sample_image
from torch import Tensor, nn

from bench.curve_tasks import Data, Family

__all__ = ["SEEN"]

TEXT = 32
"""Bytes of a piece of text."""


@cache
def digits() -> Data:
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.images))
    images = torch.tensor(found.images[order], dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target[order])
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


@cache
def clicks() -> Data:
    """13 numbers and 4 categories, as ids in float columns; clicks hang on both, and mostly on chance."""
    draw = torch.Generator().manual_seed(5)
    rows = 12_000
    numbers = torch.randn(rows, 13, generator=draw)
    sizes = torch.tensor([1000, 300, 50, 10])
    ids = (sizes ** torch.rand(rows, 4, generator=draw)).long() - 1
    likes = [torch.randn(int(size), generator=draw) for size in sizes]
    taste = sum(like[ids[:, i]] for i, like in enumerate(likes))
    chance = torch.sigmoid(numbers[:, :4].sum(1) - 1.5 + 0.7 * taste)
    clicked = (torch.rand(rows, generator=draw) < chance).float()
    whole = torch.cat([numbers, ids.float()], dim=1)
    return whole[:10_000], clicked[:10_000], whole[10_000:], clicked[10_000:]


@cache
def text() -> Data:
    """Pieces of Python's language reference, by bytes: every next byte is the answer."""
    every = torch.tensor(list("\n".join(topics[key] for key in sorted(topics)).encode()))
    pieces = every[: len(every) // (TEXT + 1) * (TEXT + 1)].view(-1, TEXT + 1)
    pieces = pieces[torch.randperm(len(pieces), generator=torch.Generator().manual_seed(1))]
    pieces = pieces.clamp(max=127)
    inputs, answers = pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()
    return inputs[600:], answers[600:], inputs[:600], answers[:600]


@cache
def photograph() -> Data:
    """Brightness of a photograph's pixels from where they are, with the noise of a camera."""
    image = torch.tensor(load_sample_image("china.jpg"), dtype=torch.float32).mean(dim=2) / 255
    draw = torch.Generator().manual_seed(3)
    rows = torch.randint(0, image.shape[0], (12_000,), generator=draw)
    columns = torch.randint(0, image.shape[1], (12_000,), generator=draw)
    place = torch.stack([rows / image.shape[0], columns / image.shape[1]], dim=1)
    waves = torch.randn(2, 24, generator=draw) * 6
    inputs = torch.cat([torch.sin(place @ waves), torch.cos(place @ waves)], dim=1)
    values = image[rows, columns]
    answers = (values - values.mean()) / values.std() + 0.1 * torch.randn(len(values), generator=draw)
    return inputs[:10_000], answers[:10_000], inputs[10_000:], answers[10_000:]


@cache
def patches() -> Data:
    """Patches of 8 x 8 pixels of a photograph, to be cleaned of noise."""
    image = torch.tensor(load_sample_image("flower.jpg"), dtype=torch.float32).mean(dim=2) / 255
    every = image.unfold(0, 8, 6).unfold(1, 8, 6).reshape(-1, 64)
    draw = torch.Generator().manual_seed(4)
    every = (every - every.mean()) / every.std()
    every = every[torch.randperm(len(every), generator=draw)][:7_000]
    noisy = every + 0.7 * torch.randn(every.shape, generator=draw)
    return noisy[:6_000], every[:6_000], noisy[6_000:], every[6_000:]


@cache
def topic() -> Data:
    """Pieces of 48 bytes of Python's reference, and which of its 12 longest topics they are from."""
    longest = sorted(topics, key=lambda name: (-len(topics[name]), name))[:12]
    pieces, labels = [], []
    for label, name in enumerate(longest):
        raw = topics[name].encode()[: 48 * 700]
        for start in range(0, len(raw) - 48, 24):
            pieces.append(list(raw[start : start + 48]))
            labels.append(label)
    inputs, answers = torch.tensor(pieces).clamp(max=127), torch.tensor(labels)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(2))
    inputs, answers = inputs[order], answers[order]
    return inputs[800:], answers[800:], inputs[:800], answers[:800]


@cache
def texture() -> Data:
    """Patches of 10 x 10 pixels in colour, and which quarter of which of two photographs they are from."""
    inputs, labels = [], []
    for photo, name in enumerate(("china.jpg", "flower.jpg")):
        image = torch.tensor(load_sample_image(name), dtype=torch.float32).permute(2, 0, 1) / 255
        rows, columns = image.shape[1] // 2, image.shape[2] // 2
        for quarter in range(4):
            part = image[:, quarter // 2 * rows :, quarter % 2 * columns :][:, :rows, :columns]
            every = part.unfold(1, 10, 8).unfold(2, 10, 8).permute(1, 2, 0, 3, 4).reshape(-1, 3, 10, 10)
            inputs.append(every)
            labels.append(torch.full((len(every),), 4 * photo + quarter))
    whole, answers = torch.cat(inputs), torch.cat(labels)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(6))
    whole, answers = (whole[order] - whole.mean()) / whole.std(), answers[order]
    return whole[800:], answers[800:], whole[:800], answers[:800]


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 8) for size in (1000, 300, 50, 10))
        self.mlp = nn.Sequential(nn.Linear(13 + 32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, rows: Tensor) -> Tensor:  # (B, 17) -> (B,)
        ids = rows[:, 13:].long()
        # a corrupted row's ids are numbers like the others: read as a pipeline would, into the table
        embedded = [table(ids[:, i].remainder(table.num_embeddings)) for i, table in enumerate(self.tables)]
        return self.mlp(torch.cat([rows[:, :13], *embedded], dim=1)).squeeze(1)


class Bytes(nn.Module):
    """A gated convolution over the last six bytes."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.mix = nn.Conv1d(width, 2 * width, 6)
        self.middle = nn.Linear(width, 2 * width)
        self.head = nn.Linear(2 * width, 128)

    def forward(self, ids: Tensor) -> Tensor:  # (B, T) -> (B, 128, T)
        x = F.pad(self.embedding(ids).transpose(1, 2), (5, 0))  # sees six bytes, none ahead
        x = F.glu(self.mix(x), dim=1).transpose(1, 2)
        return self.head(F.relu(self.middle(x))).transpose(1, 2)


class Topic(nn.Module):
    """The mean of what pairs of neighbouring bytes mean, then two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Embedding(4096, 24)
        self.layers = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 12))

    def forward(self, ids: Tensor) -> Tensor:  # (B, T) -> (B, 12)
        pair = (ids[:, :-1] * 31 + ids[:, 1:] * 17).remainder(4096)
        return self.layers(self.pairs(pair).sum(dim=1) / 4)


def coloured() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8)
    )


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(96, 10),
    )  # fmt: skip


def cleaner() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 24), nn.Tanh(), nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 64)
    )


def wavy() -> nn.Module:
    return nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))


SEEN = {
    each.name: each
    for each in (
        Family("digits", digits, perceptron, F.cross_entropy, "sgd", 0.04, 32, 10_000),
        Family("digits, conv", digits, convolutions, F.cross_entropy, "adamw", 8e-3, 32, 10_000),
        Family("clicks", clicks, Clicks, F.binary_cross_entropy_with_logits, "adamw", 6e-3, 32, 12_000),
        Family("bytes", text, Bytes, F.cross_entropy, "adamw", 1e-2, 16, 4_000),
        Family("photograph", photograph, wavy, F.mse_loss, "sgd", 0.02, 32, 8_000),
        Family("topic", topic, Topic, F.cross_entropy, "adamw", 3e-3, 32, 12_000),
        Family("texture", texture, coloured, F.cross_entropy, "sgd", 0.02, 32, 10_000),
        Family("patches", patches, cleaner, F.mse_loss, "adamw", 3e-3, 32, 10_000),
    )
}
