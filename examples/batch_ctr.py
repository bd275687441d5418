"""A click-through-rate table: 13 numbers and 8 categories a row, as in the Criteo set, with made rows.

Nearly all parameters are embeddings, so gradients and optimizer states, not activations, fill the memory.

stoker batch fit    examples/batch_ctr.py:make_target
stoker batch memory examples/batch_ctr.py:make_target
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stoker.batch import LoaderOptions, Target

NUMBERS = 13
CATEGORIES = (100_000, 50_000, 20_000, 5_000, 1_000, 300, 50, 10)
"""How many different values each category has."""
ROWS, TRAINED = 200_000, 180_000
"""The rows that aren't trained on are held out."""

Batch = tuple[Tensor, Tensor, Tensor]


def make_rows(rows: int, generator: torch.Generator) -> Batch:
    """Numbers (rows, 13), category ids (rows, 8), clicks (rows,).

    Ids fall off as in real logs: few values make up most rows. A click hangs on the numbers and the rare ids.
    """
    numbers = torch.randn(rows, NUMBERS, generator=generator)
    share = torch.rand(rows, len(CATEGORIES), generator=generator)
    sizes = torch.tensor(CATEGORIES)
    ids = (sizes**share).long() - 1  # log-uniform: P(id < k) = log k / log size
    chance = torch.sigmoid(numbers[:, :4].sum(1) - 2.5 + 0.5 * (share > 0.7).sum(1))
    clicks = (torch.rand(rows, generator=generator) < chance).float()
    return numbers, ids.clamp(min=0), clicks


class ClickModel(nn.Module):
    """An embedding for each category beside the numbers, then a small MLP to one logit."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in CATEGORIES)
        inputs = NUMBERS + width * len(CATEGORIES)
        self.mlp = nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:  # (B, 13), (B, 8) -> (B,)
        embedded = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return self.mlp(torch.cat([numbers, *embedded], dim=1)).squeeze(1)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Binary cross-entropy, mean over the rows."""
    numbers, ids, clicks = batch
    return F.binary_cross_entropy_with_logits(model(numbers, ids), clicks)


def make_target(width: str = "16") -> Target:
    """What stoker fits, sweeps and proves: model, optimizer, batches of any size, loss."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = make_rows(ROWS, torch.Generator().manual_seed(0))

    def make_batch(size: int) -> Batch:
        numbers, ids, clicks = (column[:TRAINED][:size].to(device) for column in rows)
        return numbers, ids, clicks

    def load(size: int, options: LoaderOptions) -> Iterable[Batch]:
        order = torch.randperm(TRAINED).split(size)  # slices of the table: row by row it would wait for data
        return DataLoader(order[: TRAINED // size], batch_size=None, collate_fn=rows_at, **options.keywords())

    def rows_at(places: Tensor) -> Batch:
        numbers, ids, clicks = (column[places] for column in rows)
        return numbers, ids, clicks

    def validate(model: nn.Module) -> float:
        return loss(model, tuple(column[TRAINED:].to(device) for column in rows)).item()

    model = ClickModel(int(width)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Target(model, optimizer, make_batch, loss, most=TRAINED, load=load, validate=validate)
