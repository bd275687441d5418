"""A target whose held-out loss is a known function of the batch and of the rate, for the tests of searches."""

import math
import os
import signal
from pathlib import Path

import torch
from torch import Tensor, nn

from stoker.batch import LoaderOptions, Target

RATE, BASE, BEST_BATCH, BEST_FACTOR = 0.01, 32, 64, 3.0
EXAMPLES = 256


class Planted(nn.Module):
    """Its weight falls by the rate at each update, and so tells what rate it was trained with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.size = self.updates = 0

    def held_out(self) -> float:
        """Lowest at `BEST_BATCH` and at `BEST_FACTOR` times the rate that follows linearly from `BASE`."""
        rate = -self.weight.item() / self.updates
        if rate > 9 * RATE * self.size / BASE:
            return math.nan
        factor = rate / (RATE * self.size / BASE)
        bowl = math.log2(self.size / BEST_BATCH) ** 2 + 2 * math.log(factor / BEST_FACTOR) ** 2
        return 1 + 0.1 * bowl + 1 / (self.updates * self.size)


def planted() -> Target:
    model = Planted()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        model.size, model.updates = len(batch), model.updates + 1
        return model.weight.sum()

    def load(size: int, options: LoaderOptions) -> list[Tensor]:
        return list(torch.arange(EXAMPLES).split(size))

    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return Target(model, optimizer, torch.arange, loss, load=load, validate=lambda model: model.held_out())


def killed(counts: str, at: str) -> Target:
    """`planted`, that once, at the start of its training number `at`, kills its process. `counts` is a file."""
    file = Path(counts)
    begun = int(file.read_text()) + 1 if file.exists() else 1
    file.write_text(str(begun))
    if begun == int(at):
        os.kill(os.getpid(), signal.SIGKILL)
    return planted()
