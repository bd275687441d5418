"""With the real Trainer of Lightning."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stoker.batch import LoaderOptions, fit
from stoker.batch.bridges.shares import Shares
from stoker.errors import ConfigError, DataError, RunError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Lightning about its dependencies, when it is imported
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, ModelCheckpoint

    from stoker.batch.bridges.lightning import CertifiedBatch, target_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),  # advice about workers and loggers
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),  # its use of torch
]


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.seen: list[int] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.seen.append(len(x))
        loss = nn.functional.mse_loss(self.net(x).squeeze(1), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 100)}


class Data(pl.LightningDataModule):
    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(64, 6, generator=generator)
        self.rows = TensorDataset(x, x.sum(1))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.rows, self.batch_size)


class Stubborn(Data):
    """Reads its size once."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.rows, 16)


class Remembers(Data):
    """A checkpoint brings its size back."""

    def state_dict(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batch_size = state_dict["batch_size"]


def trainer(folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    given: dict[str, Any] = {
        "max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": folder,
    }  # fmt: skip
    return pl.Trainer(callbacks=list(callbacks), **given | options)


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_a_target_steps_training_step_and_its_optimizer(tmp_path: Path) -> None:
    module = Net()
    target = target_of(module, Data(), trainer(tmp_path))
    assert (target.most, target.unit) == (64, "examples")
    before = target.loss(module, target.make_batch(64)).item()
    for _ in range(5):
        target.step(64)
    assert target.loss(module, target.make_batch(64)).item() < before
    module.seen.clear()
    target.step(8)  # below the 16 of an update: gradients are held
    assert module.seen == [8, 8]
    with pytest.raises(DataError, match="65 examples is larger"):
        target.make_batch(65)
    assert "log" not in vars(module)
    assert target.load is not None
    assert [len(x) for x, _ in target.load(24, LoaderOptions())] == [24, 24]


def test_a_fit_in_this_process(tmp_path: Path) -> None:
    module = Net()
    before = weights(module).clone()
    found = fit(target_of(module, Data(), trainer(tmp_path)), in_process=True, limit_bytes=2**31)
    assert (found.size, found.bound) == (64, "data")
    assert torch.equal(weights(module), before)


def test_what_one_step_can_not_show_is_refused() -> None:
    module = Net()
    module.automatic_optimization = False
    with pytest.raises(ConfigError, match="optimizes by hand"):
        target_of(module, Data())
    two = Net()
    two.configure_optimizers = lambda: [torch.optim.SGD(two.parameters()), torch.optim.SGD(two.parameters())]  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="2 optimizers"):
        target_of(two, Data())
    with pytest.raises(DataError, match="a list"):
        target_of(Net(), [1, 2])  # type: ignore[arg-type]


def test_the_certified_size_trains_the_same_updates(tmp_path: Path) -> None:
    plain, certified = Net(), Net()
    trainer(tmp_path).fit(plain, datamodule=Data())
    said: list[str] = []
    callback = CertifiedBatch(5, say=said.append)
    run = trainer(tmp_path, callback)
    run.fit(certified, datamodule=Data())
    assert callback.applied is not None
    assert callback.applied.after == Shares(4, 4, 1)
    assert certified.seen == [4] * 16
    assert run.global_step == 4
    torch.testing.assert_close(weights(certified), weights(plain), rtol=1e-5, atol=1e-6)
    assert said[0].startswith("stoker: 16 per micro-batch x 1 accumulated -> 4 per micro-batch x 4 accum")
    assert "Lightning divides each micro-batch's loss by 4" in said[0]


def test_a_larger_certified_size_takes_accumulation_away(tmp_path: Path) -> None:
    callback, module = CertifiedBatch(1000, say=None), Net()
    trainer(tmp_path, callback, accumulate_grad_batches=4).fit(module, datamodule=Data(4))
    assert module.seen == [16] * 4


def test_peer_fault_25_a_size_that_the_loader_ignores_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the loader gives 16 examples a micro-batch, not the 4"):
        trainer(tmp_path, CertifiedBatch(4, say=None)).fit(Net(), datamodule=Stubborn())
    with pytest.raises(ConfigError, match="has 'batch_size' to set"):
        trainer(tmp_path, CertifiedBatch(4, say=None)).fit(Net(), DataLoader(TensorDataset(torch.ones(4, 6)), 2))


@pytest.mark.parametrize("rival", [BatchSizeFinder(), GradientAccumulationScheduler({0: 2})])
def test_peer_fault_25_another_callback_that_sets_sizes_is_refused(tmp_path: Path, rival: pl.Callback) -> None:
    with pytest.raises(ConfigError, match="sets sizes too"):
        trainer(tmp_path, CertifiedBatch(4, say=None), rival).fit(Net(), datamodule=Data())


def test_peer_fault_25_a_resume_keeps_the_certified_size(tmp_path: Path) -> None:
    """The checkpoint was written at 16 a micro-batch, by a data module that brings that back."""
    whole = Net()
    trainer(tmp_path, max_epochs=2).fit(whole, datamodule=Remembers())
    first = trainer(tmp_path)
    first.fit(Net(), datamodule=Remembers())
    first.save_checkpoint(tmp_path / "first.ckpt")
    resumed = Net()
    run = trainer(tmp_path, CertifiedBatch(8, say=None), max_epochs=2)
    run.fit(resumed, datamodule=Remembers(), ckpt_path=tmp_path / "first.ckpt", weights_only=False)
    assert resumed.seen == [8] * 8
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=1e-5, atol=1e-6)


def test_a_resume_amid_an_epoch_of_another_size_is_refused(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    trainer(tmp_path, CertifiedBatch(8, say=None), saving, enable_checkpointing=True).fit(Net(), datamodule=Data())
    run = trainer(tmp_path, CertifiedBatch(4, say=None))
    with pytest.raises(RunError, match="resumed 6 micro-batches into an epoch of 8 examples each"):
        run.fit(Net(), datamodule=Data(), ckpt_path=tmp_path / "step=3.ckpt", weights_only=False)
