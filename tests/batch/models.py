"""Small real models with their losses, for tests of accumulation: fp64 batches of any size, ragged where they can
be.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100


@dataclass
class Setup:
    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    make_batch: Callable[[int], Any]
    count: Callable[[Any], float | Tensor] | None = None


class TinyTransformer(nn.Module):
    """A causal language model of two layers with padding masked."""

    def __init__(self, vocab: int = 17, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        layer = nn.TransformerEncoderLayer(width, 2, 24, dropout=dropout, batch_first=True)
        self.trunk = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:  # (B, T) -> (B, T, V)
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        return self.head(self.trunk(self.embed(ids), mask=causal))


def labels_after_the_first(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"][:, 1:] != IGNORED).sum()


def token_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["ids"])[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)


def token_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["ids"])[:, :-1]
    return F.cross_entropy(
        logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
    )


def ragged(lengths: list[int], vocab: int = 17, seed: int = 0) -> dict[str, Tensor]:
    """Texts of those lengths, padded to the longest with 0; labels ignore the padding."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocab, (len(lengths), max(lengths)), generator=draw)
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"ids": ids * real, "labels": ids.masked_fill(~real, IGNORED)}


def transformer(seed: int = 0, dropout: float = 0.0) -> Setup:
    torch.manual_seed(seed)
    lengths = [9, 3, 7, 2, 8, 4, 9, 5]
    return Setup(
        TinyTransformer(dropout=dropout).double(),
        token_mean,
        lambda size: ragged([lengths[place % 8] for place in range(size)], seed=seed),
        labels_after_the_first,
    )


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _classes(shape: tuple[int, ...], seed: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def make(size: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        inputs = torch.randn(size, *shape, generator=draw, dtype=torch.float64)
        return inputs, torch.randint(0, 5, (size,), generator=draw)

    return make


def mlp(seed: int = 0, dropout: float = 0.0) -> Setup:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.LayerNorm(16), nn.Linear(16, 5))
    return Setup(model.double(), classify, _classes((6,), seed))


def conv(seed: int = 0, norm: Callable[[int], nn.Module] = lambda channels: nn.GroupNorm(2, channels)) -> Setup:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        norm(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, stride=2),
        norm(8),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    return Setup(model.double(), classify, _classes((3, 8, 8), seed))
