"""The Trainer of transformers: fit, sweep and prove what it runs, and let it run at the size that was certified.

```python
from stoker.batch import fit
from stoker.batch.bridges.transformers import CertifiedBatch, target_of

found = fit(target_of(trainer))                      # the Trainer's own steps, on its longest examples
trainer.add_callback(CertifiedBatch(trainer, found)) # its examples per update stay what they are
trainer.train()
```
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stoker.batch import nest
from stoker.batch.bridges.examples import extent, readable
from stoker.batch.bridges.shares import Applied, Certified, Shares, divide
from stoker.batch.loading import LoaderOptions
from stoker.batch.longest import LongestExamples
from stoker.batch.target import Target
from stoker.errors import ConfigError, DataError, RunError

__all__ = ["CertifiedBatch", "TrainerTarget", "shares_of", "target_of"]

Batch = dict[str, Any]


@dataclass
class TrainerTarget(Target):
    """A Trainer's steps: its own forward, loss, backward and clipping, under its precision and checkpointing."""

    trainer: Trainer = field(kw_only=True)

    def step(self, size: int) -> None:
        """Two micro-batches where the Trainer would accumulate: then gradients are held beside the activations."""
        share = shares_of(self.trainer).examples_per_update // shares_of(self.trainer).ranks
        self._update([self.make_batch(size) for _ in range(1 if size >= share else 2)])

    def step_on(self, batch: Batch) -> None:
        """An update of this one batch."""
        self._update([batch])

    def _update(self, batches: list[Batch]) -> None:
        args, optimizer = self.trainer.args, self.trainer.optimizer  # accelerate's, which unscales, around the target's
        assert optimizer is not None  # `_prepared` made it
        optimizer.zero_grad()
        _accumulate(self.trainer, self.model, batches)
        if args.max_grad_norm:
            self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), args.max_grad_norm)
        optimizer.step()


def target_of(trainer: Trainer) -> TrainerTarget:
    """The training steps of a Trainer as a target; what `Trainer.train` sets up before its first step is set up here.

    Reads the whole training set once, to put its longest examples first. Raises DataError for a set without a length,
    ConfigError for trainings that one process can't run (DeepSpeed, FSDP, several GPUs in one process) and for
    `auto_find_batch_size`, whose back-off would change what is measured.
    """
    _check(trainer)
    if trainer.train_dataset is None:
        raise DataError("the Trainer has no train_dataset: give it one")
    loader = trainer.get_train_dataloader()
    data, collate = readable(loader.dataset), _Plain(loader.collate_fn)
    device = trainer.args.device

    def on_device(rows: list[Any]) -> Batch:
        moved: Batch = nest.move(collate(rows), device, pinned=False)
        return moved

    make_batch = LongestExamples(data, on_device, extent)
    model, optimizer = _prepared(trainer)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        found = trainer.compute_loss(model, dict(batch))  # a label smoother takes the labels out
        return found if isinstance(found, Tensor) else found[0]

    def load(size: int, options: LoaderOptions) -> DataLoader[Any]:
        return DataLoader(data, size, shuffle=True, drop_last=True, collate_fn=collate, **options.keywords())

    return TrainerTarget(
        model,
        optimizer,
        make_batch,
        loss,
        most=make_batch.most,
        count=_labels if trainer.model_accepts_loss_kwargs or trainer.compute_loss_func else None,
        accumulate=lambda model, batches: _accumulate(trainer, model, batches),
        load=load,
        trainer=trainer,
    )


class CertifiedBatch(TrainerCallback):
    """Has a Trainer run micro-batches that are certified to fit, and as many of them as keep its examples per update.

    The sizes are set as soon as this is made, since a Trainer builds its loader before any callback of the training
    runs; when training begins it is checked that the loader has them. `applied` says what was changed. A resumed
    training keeps the certified size, not the checkpoint's; the learning rate needs no change, as an update is as large
    as before.
    """

    def __init__(self, trainer: Trainer, found: Any, *, say: Callable[[str], object] | None = print) -> None:
        """`found`: the result of a fit, or a number of examples. `say`: where to report; None: nowhere."""
        _check(trainer)
        self._trainer, self._say = trainer, say
        certified = Certified(found).examples
        before = shares_of(trainer)
        after = divide(before.examples_per_update, before.ranks, certified)
        _set(trainer, after)
        self.applied = Applied(before, after, certified, _notes(trainer, after))
        if say is not None and trainer.is_world_process_zero():
            say(str(self.applied))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raises RunError where the training that begins doesn't have the sizes that were set."""
        wanted = self.applied.after
        loader = kwargs.get("train_dataloader")
        runs = getattr(loader, "total_batch_size", None) or getattr(loader, "batch_size", None)
        ranks = wanted.ranks if getattr(loader, "total_batch_size", None) else 1
        if runs is not None and runs != wanted.examples_per_microbatch * ranks:
            raise RunError(
                f"the loader gives {runs // ranks} examples a micro-batch, not the {wanted.examples_per_microbatch} "
                "set here: get_train_dataloader must use the Trainer's per-device size"
            )
        if shares_of(self._trainer) != wanted:
            raise RunError(
                f"the Trainer's sizes are {shares_of(self._trainer)}, not {wanted} as set here: something changed them "
                "since (another callback, a hyperparameter search); add CertifiedBatch last"
            )
        state.train_batch_size = wanted.examples_per_microbatch * max(1, args.n_gpu)  # else the checkpoint's goes on


def shares_of(trainer: Trainer) -> Shares:
    """The examples of one update as the Trainer is set now."""
    args = trainer.args
    per_rank = args.per_device_train_batch_size * args.gradient_accumulation_steps
    ranks = trainer.get_total_train_batch_size(args) // per_rank
    return Shares(args.per_device_train_batch_size, args.gradient_accumulation_steps, ranks)


def _set(trainer: Trainer, shares: Shares) -> None:
    args = trainer.args
    args.per_device_train_batch_size = shares.examples_per_microbatch
    args.gradient_accumulation_steps = shares.microbatches
    trainer._train_batch_size = args.train_batch_size  # read by the loader, and only set when a Trainer is made


def _check(trainer: Trainer) -> None:
    args = trainer.args
    if args.auto_find_batch_size:
        raise ConfigError(
            "auto_find_batch_size = True lowers the size at run time and leaves accumulation as it is, so updates "
            "shrink: set it to False"
        )
    if args.n_gpu > 1:
        raise ConfigError(f"{args.n_gpu} GPUs in one process: start one process for each (torchrun)")
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ConfigError("DeepSpeed and FSDP hold sizes of their own: set the certified size in their config")


def _notes(trainer: Trainer, after: Shares) -> tuple[str, ...]:
    notes = ["learning rate and schedule are unchanged: they follow the examples per update, not the micro-batch"]
    if after.microbatches > 1:
        model = trainer.model
        if model is not None and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
            notes.append("the model has BatchNorm, whose statistics are of one micro-batch: they change with its size")
        if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
            notes.append(
                "this model's loss is a mean per micro-batch (it takes no num_items_in_batch): exact only where "
                "micro-batches hold equally many labels; `stoker.batch.prove` measures the difference"
            )
    return tuple(notes)


class _Prepared(Exception):
    """Leaves `Trainer.train` when all is set up for its first step."""


class _Stop(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.model = kwargs["model"]
        raise _Prepared


def _prepared(trainer: Trainer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Model and optimizer as training has them: checkpointing, precision and placement are `Trainer.train`'s own."""
    stop = _Stop()
    callbacks = trainer.callback_handler.callbacks
    callbacks.insert(0, stop)  # before loggers, which begin their work at this event
    try:
        trainer.train()
    except _Prepared:
        pass
    finally:
        callbacks.remove(stop)
        trainer.is_in_train = False
    optimizer: Any = trainer.optimizer
    return trainer.model_wrapped, getattr(optimizer, "optimizer", optimizer)


def _accumulate(trainer: Trainer, model: nn.Module, batches: Sequence[Batch]) -> None:
    """From micro-batches to gradients, the Trainer's way."""
    samples, labels = trainer.get_batch_samples(iter(batches), len(batches), trainer.args.device)
    trainer.current_gradient_accumulation_steps = len(samples)
    for batch in samples:
        trainer.training_step(model, dict(batch), labels)


@dataclass(frozen=True)
class _Plain:
    """A collator whose batches are plain dicts; workers of a loader can be sent it."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, rows: list[Any]) -> Batch:
        return dict(self.collate(rows))


def _labels(batch: Batch) -> float:
    """Labels that the loss is a mean of, less the first of each row where they are of its tokens; else examples."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor):
        return float(len(next(iter(batch.values()))))
    return float((labels[..., 1:] if labels.ndim > 1 else labels).ne(-100).sum())
