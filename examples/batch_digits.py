"""A vision set: 1,797 handwritten digits of 8 x 8 pixels (they come with scikit-learn) and a small conv net.

stoker batch fit    examples/batch_digits.py:make_target      # the largest batch that fits, certified
stoker batch sweep  examples/batch_digits.py:make_target      # where a larger one stops being faster
stoker batch memory examples/batch_digits.py:make_target      # where the bytes go
stoker batch prove  examples/batch_digits.py:make_target --size 64   # is accumulation exact?
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stoker.batch import LoaderOptions, Target

TRAINED = 1_437
"""Images; the other fifth is held out."""

Batch = tuple[Tensor, Tensor]


class ConvNet(nn.Module):
    """Three convolutions with GroupNorm, which unlike BatchNorm sees one image at a time; then a linear layer."""

    def __init__(self, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.GroupNorm(4, 2 * width), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images: Tensor) -> Tensor:  # (B, 1, 8, 8) -> (B, classes)
        return self.head(self.features(images).mean(dim=(2, 3)))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy, mean over the images."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def make_target(width: str = "32") -> Target:
    """What stoker fits, sweeps and proves: model, optimizer, batches of any size, loss.

    Called anew for each trial, in a process of its own. Words after it on the command line arrive here. It doesn't
    seed: where trainings are compared stoker does, so that each seed has its own first weights.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (1797, 1, 8, 8) in [0, 1]
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    held_out = (images[TRAINED:].to(device), labels[TRAINED:].to(device))
    images, labels = images[:TRAINED], labels[:TRAINED]

    def make_batch(size: int) -> Batch:
        return images[:size].to(device), labels[:size].to(device)  # all images are of one size: any will do

    def load(size: int, options: LoaderOptions) -> Iterable[Batch]:  # how training reads its data, for `sweep`
        return DataLoader(TensorDataset(images, labels), size, shuffle=True, drop_last=True, **options.keywords())

    def validate(model: nn.Module) -> dict[str, float]:
        outputs = model(held_out[0])
        right = (outputs.argmax(1) == held_out[1]).float().mean()
        return {"loss": F.cross_entropy(outputs, held_out[1]).item(), "accuracy": right.item()}

    model = ConvNet(int(width)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Target(model, optimizer, make_batch, loss, most=len(images), load=load, validate=validate)
