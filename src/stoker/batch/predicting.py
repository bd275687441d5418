"""The memory of any module's training, from a trace of it: what `stoker.memory` says of models that it knows."""

import torch

from stoker.batch.states import state_bytes
from stoker.batch.tracing import Trace
from stoker.errors import ConfigError
from stoker.memory.breakdown import MOMENTS, Breakdown, Margin, Row
from stoker.memory.setup import OPTIMIZERS, Optimizer
from stoker.memory.states import moment_bytes, temporaries

__all__ = ["predicted"]

LOSS, BEGINS, ENDS, TABLES, STEP = MOMENTS


def predicted(
    found: Trace, size: int, optimizer: torch.optim.Optimizer | str, margin: Margin | None = None
) -> Breakdown:
    """Bytes of a training step at `size`, from its second step on. No GPU context, no allocator's holes (`margin`).

    Weights, gradients and what layers keep are as traced; states are those of a twin of the optimizer that steps over
    shapes alone, or by its kind (a key of `stoker.memory.setup.OPTIMIZERS`). What the backward pass holds beyond that
    is taken for twice what the largest layer keeps: the gradients of its output and of its input. ConfigError where the
    states are known neither way.
    """
    element = found.gradient_bytes / found.trainable if found.trainable else 0.0
    if isinstance(optimizer, str):
        name, moments = optimizer, _by_name(optimizer, found, element)
        kind = OPTIMIZERS[name]
    else:
        name, kind, moments = _of_optimizer(optimizer, found, element)
    stepping = "loop" if isinstance(optimizer, str) else _stepping(optimizer)
    largest, grows = found.largest, sum(layer.per_unit for layer in found.layers)
    rows = (
        Row("weights", found.weight_bytes),
        Row("buffers", found.buffer_bytes),
        Row("optimizer states", moments, note=name),
        Row("gradients", found.gradient_bytes, (ENDS, TABLES, STEP)),
        Row(
            "optimizer's temporaries",
            temporaries(kind, stepping, found.largest_parameter, found.trainable) * element,
            (STEP,),
        ),
        Row("activations", found.activations(size), (LOSS, BEGINS), grows),
        Row(
            "the largest layer's backward pass",
            2 * largest.activations(size),
            (BEGINS, ENDS),
            2 * largest.per_unit,
            note=f"{largest.name or 'the model itself'} ({largest.kind})",
        ),
    )
    return Breakdown(f"{found.model}, {name}", size, rows, margin or Margin())


def _stepping(optimizer: torch.optim.Optimizer) -> str:
    """As PyTorch chooses: fused and foreach where they are asked for, foreach for CUDA's tensors, else a loop."""
    asked = {name: optimizer.defaults.get(name) for name in ("fused", "foreach")}
    if asked["fused"]:
        return "fused"
    on_cuda = all(weight.is_cuda for group in optimizer.param_groups for weight in group["params"])
    return "foreach" if asked["foreach"] or (asked["foreach"] is None and on_cuda) else "loop"


def _by_name(name: str, found: Trace, element: float) -> float:
    """Bytes of its states."""
    if name not in OPTIMIZERS:
        raise ConfigError(f"optimizer '{name}' isn't one of {', '.join(OPTIMIZERS)}")
    if OPTIMIZERS[name].factored:
        raise ConfigError("adafactor's states depend on each tensor's shape: measure them with stoker.batch.fit")
    return moment_bytes(name, found.trainable, found.matrix_parameters, 0, element)


def _of_optimizer(optimizer: torch.optim.Optimizer, found: Trace, element: float) -> tuple[str, Optimizer, float]:
    """Its name, what its kind's steps take (of an unknown one: as AdamW's), and bytes of its states: those of a twin,
    else by the kind.
    """
    name = _kind(optimizer)
    measured = state_bytes(optimizer)
    if measured is not None:
        return name or type(optimizer).__name__, OPTIMIZERS[name or "adamw"], measured
    if name is None:
        raise ConfigError(
            f"optimizer {type(optimizer).__name__}: its states can't be known before it steps; measure them with "
            "`stoker batch fit`"
        )
    return name, OPTIMIZERS[name], _by_name(name, found, element)


def _kind(optimizer: torch.optim.Optimizer) -> str | None:
    """The key of `stoker.memory.setup.OPTIMIZERS` that an optimizer is of; None where it is of none."""
    kind = type(optimizer).__name__
    known = {"Adam": "adamw", "AdamW": "adamw", "Adam8bit": "adamw_8bit", "AdamW8bit": "adamw_8bit", "Muon": "muon"}
    if kind == "SGD":
        return "sgd_momentum" if optimizer.defaults["momentum"] else "sgd"
    return None if optimizer.defaults.get("amsgrad") else known.get(kind)
