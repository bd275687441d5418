"""Lightning: fit, sweep and prove what a LightningModule trains, and let a Trainer run at the size that was certified.

```python
from stoker.batch import fit
from stoker.batch.bridges.lightning import CertifiedBatch, target_of

found = fit(target_of(module, datamodule, trainer))   # training_step and configure_optimizers, on the longest examples
trainer = Trainer(callbacks=[CertifiedBatch(found)])  # its examples per update stay what they are
trainer.fit(module, datamodule=datamodule)
```
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stoker.batch.bridges.examples import extent, readable
from stoker.batch.bridges.shares import Applied, Certified, Shares, divide
from stoker.batch.loading import LoaderOptions
from stoker.batch.longest import LongestExamples
from stoker.batch.target import Target
from stoker.errors import ConfigError, DataError, RunError

__all__ = ["CertifiedBatch", "ModuleTarget", "target_of"]


@dataclass
class ModuleTarget(Target):
    """Steps of a LightningModule's own loss and optimizer."""

    share: int = field(kw_only=True)
    """Examples of an update on one rank, as loader and Trainer are set."""

    def step(self, size: int) -> None:
        """Two micro-batches where the Trainer would accumulate: then gradients are held beside the activations."""
        self.optimizer.zero_grad()
        for _ in range(1 if size >= self.share else 2):
            torch.autograd.backward(self.loss(self.model, self.make_batch(size)))
        self.optimizer.step()


def target_of(
    module: LightningModule, data: LightningDataModule | DataLoader[Any], trainer: Trainer | None = None
) -> ModuleTarget:
    """A LightningModule's `training_step` and optimizer as a target, on the longest examples of `data`.

    `trainer` gives device and precision; without one the module runs as and where it is. Reads the whole training set
    once, to put its longest examples first. What `training_step` logs is dropped. Raises ConfigError for manual
    optimization or several optimizers, DataError for a set without a length.
    """
    if not module.automatic_optimization:
        raise ConfigError(
            f"{type(module).__name__} optimizes by hand (automatic_optimization = False), so its step isn't "
            "training_step's loss: write a stoker.batch.Target"
        )
    loader = _loader(data)
    rows = readable(loader.dataset)
    device = trainer.strategy.root_device if trainer is not None else module.device
    if trainer is not None:
        module.trainer = trainer
        trainer.precision_plugin.convert_module(module)
    module.to(device).train()
    optimizer = _optimizer(module)

    def on_device(examples: list[Any]) -> Any:
        assert loader.collate_fn is not None
        batch = loader.collate_fn(examples)
        owner = data if isinstance(data, LightningDataModule) else module
        for hook in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
            of_data = hook in vars(type(owner))
            where = (device, 0) if hook == "transfer_batch_to_device" else (0,)
            batch = getattr(owner if of_data else module, hook)(batch, *where)
        return batch

    make_batch = LongestExamples(rows, on_device, extent)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with _unlogged(module):
            if trainer is None:
                return _scalar(model.training_step(batch, 0))  # type: ignore[operator]
            with trainer.precision_plugin.train_step_context():
                return _scalar(model.training_step(batch, 0))  # type: ignore[operator]

    def load(size: int, options: LoaderOptions) -> DataLoader[Any]:
        keywords = options.keywords()
        return DataLoader(rows, size, shuffle=True, drop_last=True, collate_fn=loader.collate_fn, **keywords)

    share = (loader.batch_size or 0) * (trainer.accumulate_grad_batches if trainer is not None else 1)
    return ModuleTarget(module, optimizer, make_batch, loss, most=make_batch.most, load=load, share=share)


class CertifiedBatch(Callback):
    """Has a Trainer run micro-batches that are certified to fit, and as many of them as keep its examples per update.

    The data module (or module) must hold its size in an attribute, as for Lightning's own BatchSizeFinder: it is set
    before the loader is made, and when training begins the loader is checked to have it. A resumed training keeps the
    certified size, not the checkpoint's. `applied` says what was changed.
    """

    def __init__(
        self, found: Any, *, attribute: str = "batch_size", say: Callable[[str], object] | None = print
    ) -> None:
        """`found`: the result of a fit, or a number of examples. `say`: where to report; None: nowhere."""
        self._certified, self._attribute, self._say = Certified(found).examples, attribute, say
        self.applied: Applied | None = None
        self._restored: dict[str, int] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Before the loaders are made. Raises ConfigError where the size can't be set or something else sets it too."""
        if stage != "fit":
            return
        for rival in trainer.callbacks:  # type: ignore[attr-defined]  # its own, set by a connector
            if isinstance(rival, BatchSizeFinder | GradientAccumulationScheduler):
                raise ConfigError(f"{type(rival).__name__} sets sizes too: use it or CertifiedBatch, not both")
        if not pl_module.automatic_optimization:
            raise ConfigError(
                "with automatic_optimization = False the module accumulates by itself: set its size there"
            )
        if not lightning_hasattr(pl_module, self._attribute):
            raise ConfigError(
                f"neither the data module nor the module has '{self._attribute}' to set: let its train_dataloader read "
                "it, or name the attribute that it reads (CertifiedBatch(found, attribute=...))"
            )
        if self.applied is None:  # a second fit goes on with what the first set
            before = Shares(
                lightning_getattr(pl_module, self._attribute) or 0, trainer.accumulate_grad_batches, trainer.world_size
            )
            after = divide(before.examples_per_update, before.ranks, self._certified)
            self.applied = Applied(before, after, self._certified, _notes(pl_module, after))
            if self._say is not None and trainer.is_global_zero:
                self._say(str(self.applied))
        self._set(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Once more: a checkpoint's data module may have brought its own size back."""
        self._set(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raises RunError where the training that begins doesn't have the sizes that were set."""
        assert self.applied is not None
        wanted = self.applied.after
        loaders = trainer.fit_loop._combined_loader
        for loader in loaders.flattened if loaders is not None else ():
            runs = getattr(loader, "batch_size", None) or getattr(
                getattr(loader, "batch_sampler", None), self._attribute, None
            )
            if runs is not None and runs != wanted.examples_per_microbatch:
                raise RunError(
                    f"the loader gives {runs} examples a micro-batch, not the {wanted.examples_per_microbatch} in "
                    f"'{self._attribute}': train_dataloader must read that attribute whenever it is called"
                )
        if trainer.accumulate_grad_batches != wanted.microbatches:
            raise RunError(
                f"the Trainer accumulates {trainer.accumulate_grad_batches}, not {wanted.microbatches} as set here: "
                "something changed it since (another callback)"
            )
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if self._restored is not None and self._restored != self.state_dict() and done:
            raise RunError(
                f"resumed {done} micro-batches into an epoch of {self._restored['examples_per_microbatch']} examples "
                f"each: Lightning counts micro-batches, and {wanted.examples_per_microbatch} each would skip other "
                "examples. Resume from the end of an epoch, or certify the size of then"
            )

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        if self.applied is None:
            return {}
        after = self.applied.after
        return {"examples_per_microbatch": after.examples_per_microbatch, "microbatches": after.microbatches}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """The checkpoint's, kept for the check at the start."""
        self._restored = dict(state_dict) or None

    def _set(self, trainer: Trainer, module: LightningModule) -> None:
        if self.applied is not None:
            lightning_setattr(module, self._attribute, self.applied.after.examples_per_microbatch)
            trainer.accumulate_grad_batches = self.applied.after.microbatches


def _loader(data: LightningDataModule | DataLoader[Any]) -> DataLoader[Any]:
    if isinstance(data, LightningDataModule):
        data.prepare_data()
        data.setup("fit")
        data = data.train_dataloader()
    if not isinstance(data, DataLoader):
        raise DataError(f"training data of one DataLoader can be fitted, not a {type(data).__name__}")
    return data


def _optimizer(module: LightningModule) -> torch.optim.Optimizer:
    """The one optimizer of `configure_optimizers`, whose result has many forms."""
    made: Any = module.configure_optimizers()
    if isinstance(made, dict):
        made = made["optimizer"]
    if isinstance(made, tuple | list) and made and isinstance(made[0], tuple | list):
        made = made[0]
    if isinstance(made, tuple | list):
        found = [each["optimizer"] if isinstance(each, dict) else each for each in made]
        made = found[0] if len(found) == 1 else found
    if not isinstance(made, torch.optim.Optimizer):
        what = f"{len(made)} optimizers" if isinstance(made, list) else type(made).__name__
        raise ConfigError(f"configure_optimizers gives {what}: one is needed; for others write a stoker.batch.Target")
    return made


def _scalar(output: Any) -> Tensor:
    found = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(found, Tensor):
        raise ConfigError(
            f"training_step gives a {type(output).__name__} without a loss: return the loss, or a dict with it"
        )
    return found


@contextmanager
def _unlogged(module: LightningModule) -> Iterator[None]:
    """`self.log` needs the loop of a running Trainer; outside it nothing is logged."""
    names = ("log", "log_dict")
    for name in names:
        object.__setattr__(module, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name in names:
            object.__delattr__(module, name)


def _notes(module: LightningModule, after: Shares) -> tuple[str, ...]:
    notes = ["learning rate and schedule are unchanged: they follow the examples per update, not the micro-batch"]
    if after.microbatches > 1:
        notes.append(
            f"Lightning divides each micro-batch's loss by {after.microbatches}: exact for a mean over examples, while "
            "the shorter window at an epoch's end, and a mean over unequal numbers of tokens, weigh differently; "
            "`stoker.batch.prove` measures the difference"
        )
        if any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in module.modules()):
            notes.append("the module has BatchNorm, whose statistics are of one micro-batch: they change with its size")
    return tuple(notes)
