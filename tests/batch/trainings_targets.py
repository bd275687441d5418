"""Small targets that train in well under a second, for the tests of everything that compares trainings."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stoker.batch import LoaderOptions, Target

Batch = tuple[Tensor, Tensor]
EXAMPLES, INPUTS = 512, 8


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]).squeeze(1), batch[1])


def regression(*, dropout: float = 0.0, learning_rate: float = 0.05, noise: float = 0.5) -> Target:
    """A linear truth with noise and a linear model; weights, not data, are drawn from the training's seed."""
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(EXAMPLES + 128, INPUTS, generator=draw)
    truth = torch.linspace(-1, 1, INPUTS)
    y = x @ truth + noise * torch.randn(len(x), generator=draw)
    train, held_out = (x[:EXAMPLES], y[:EXAMPLES]), (x[EXAMPLES:], y[EXAMPLES:])
    model = nn.Sequential(nn.Linear(INPUTS, 1), nn.Dropout(dropout))

    def load(size: int, options: LoaderOptions) -> Iterable[Batch]:
        return DataLoader(TensorDataset(*train), size, shuffle=True, drop_last=True, **options.keywords())

    return Target(
        model,
        torch.optim.SGD(model.parameters(), lr=learning_rate),
        lambda size: (train[0][:size], train[1][:size]),
        loss,
        most=EXAMPLES,
        load=load,
        validate=lambda model: float(loss(model, held_out)),
    )
