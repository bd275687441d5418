"""Targets that processes of their own make."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stoker.batch.target import Target
from tests.batch import models


def texts(kind: str) -> Target:
    """10 texts of 2 tokens and 10 of 101: 10 and 1,000 tokens with a loss. New random weights at each call."""
    model = nn.Sequential(nn.Embedding(17, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 17)).double()

    def own_counts(model: nn.Module, parts: Sequence[Any]) -> None:
        total = sum(models.labels_after_the_first(part) for part in parts)
        for part in parts:
            (models.token_sum(model, part) / total).backward()

    return Target(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.001),
        lambda size: models.ragged([2] * (size // 2) + [101] * (size - size // 2)),
        models.token_mean,
        count=models.labels_after_the_first if kind == "right" else None,
        accumulate=own_counts if kind == "own counts" else None,
    )


def vectors() -> Target:
    setup: models.Setup = models.mlp(dropout=0.1)
    model = setup.model.float()

    def make_batch(size: int) -> Any:
        inputs, labels = setup.make_batch(size)
        return inputs.float(), labels

    return Target(model, torch.optim.SGD(model.parameters(), lr=0.1), make_batch, models.classify)
