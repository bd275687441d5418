"""Child process of `bench.fit`: one peer's finder on one model, under the limit, as its documentation has it used.

    python -m bench.fit_peers lightning|accelerate MODEL LIMIT

Prints JSON: `size`, and `trials`, every size that it tried.
"""

import importlib
import json
import logging
import sys
import tempfile
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from bench.fit_models import target
from stoker.batch.limits import Meter, warm_up
from stoker.batch.target import Target

EXAMPLES = 2**20
STARTS_AT = 16384
"""accelerate only goes down, from a size that a user must know to be too large; Lightning goes no further (`max_val`,
by itself 8192)."""
STEPS = 3


class Examples(Dataset[Any]):
    """Indices only: what a batch holds is made by `collate`."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def accelerate(made: Target, tried: list[int]) -> int:
    """STEPS complete steps in the function that it runs."""
    from accelerate.utils import find_executable_batch_size

    found = 0

    @find_executable_batch_size(starting_batch_size=STARTS_AT)
    def train(batch_size: int) -> None:
        nonlocal found
        tried.append(batch_size)
        for _ in range(STEPS):
            made.step(batch_size)
        found = batch_size

    train()
    return found


def lightning(made: Target, tried: list[int]) -> int:
    """BatchSizeFinder in its mode "binsearch", without the margin that it would take off afterwards."""
    import lightning.pytorch as pl
    from lightning.pytorch.tuner.tuning import Tuner

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: nn.Module = made.model
            self.batch_size = 2

        def train_dataloader(self) -> DataLoader[Any]:
            size = self.batch_size
            return DataLoader(Examples(), batch_size=size, collate_fn=lambda rows: made.make_batch(len(rows)))

        def on_train_start(self) -> None:
            tried.append(self.batch_size)

        def training_step(self, batch: Any, _: int) -> Tensor:
            return made.loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            default_root_dir=folder, accelerator="cpu", logger=False, enable_progress_bar=False, max_epochs=1,
            enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        size = Tuner(trainer).scale_batch_size(
            Module(), mode="binsearch", init_val=2, steps_per_trial=STEPS, max_trials=50, margin=0.0, max_val=STARTS_AT
        )
    return size or 0


def main() -> None:
    which, name, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    warm_up()
    importlib.import_module({"lightning": "lightning.pytorch", "accelerate": "accelerate.utils"}[which])
    # What the peer itself needs is loaded, and isn't counted either.
    meter = Meter(fresh=True)
    made = target(name)
    tried: list[int] = []
    size, error = 0, ""
    try:
        with meter.limited(made.device, limit):
            size = {"lightning": lightning, "accelerate": accelerate}[which](made, tried)
    except Exception as caught:  # reported as the answer that it is: none
        error = f"{type(caught).__name__}: {str(caught)[:200]}"
    print(json.dumps({"size": size, "trials": tried, "error": error}))


if __name__ == "__main__":
    main()
