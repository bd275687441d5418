"""The memory of any module's training, from a trace of it: what `stoker.memory` says of models that it knows."""

import torch

from stoker.batch.tracing import Trace
from stoker.errors import ConfigError
from stoker.memory.breakdown import MOMENTS, Breakdown, Margin, Row
from stoker.memory.setup import OPTIMIZERS
from stoker.memory.states import moment_bytes, temporaries

__all__ = ["optimizer_kind", "predicted"]

LOSS, BEGINS, ENDS, TABLES, STEP = MOMENTS


def predicted(
    found: Trace, size: int, optimizer: torch.optim.Optimizer | str, margin: Margin | None = None
) -> Breakdown:
    """Bytes of a training step at `size`, from its second step on. No GPU context, no allocator's holes (`margin`).

    Weights, gradients and what layers keep are as traced; states by the optimizer's kind (a key of
    `stoker.memory.setup.OPTIMIZERS`, or the optimizer itself). What the backward pass holds beyond that is taken for
    twice what the largest layer keeps: the gradients of its output and of its input. ConfigError where the optimizer's
    kind isn't known.
    """
    name = optimizer if isinstance(optimizer, str) else optimizer_kind(optimizer)
    if name not in OPTIMIZERS:
        raise ConfigError(f"optimizer '{name}' isn't one of {', '.join(OPTIMIZERS)}")
    kind = OPTIMIZERS[name]
    if kind.factored:
        raise ConfigError("adafactor's states depend on each tensor's shape: measure them with stoker.batch.fit")
    element = found.gradient_bytes / found.trainable if found.trainable else 0.0
    moments = moment_bytes(name, found.trainable, found.matrix_parameters, 0, element)
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


def optimizer_kind(optimizer: torch.optim.Optimizer) -> str:
    """The key of `stoker.memory.setup.OPTIMIZERS` for an optimizer. ConfigError where its states aren't known."""
    if optimizer.defaults.get("amsgrad"):
        raise ConfigError("an optimizer with amsgrad keeps a third moment: measure it with stoker.batch.fit")
    kind = type(optimizer).__name__
    known = {"Adam": "adamw", "AdamW": "adamw", "Adam8bit": "adamw_8bit", "AdamW8bit": "adamw_8bit", "Muon": "muon"}
    if kind == "SGD":
        return "sgd_momentum" if optimizer.defaults["momentum"] else "sgd"
    if kind not in known:
        raise ConfigError(
            f"optimizer {kind}: its states aren't known; name the kind that keeps as much ({', '.join(OPTIMIZERS)}), "
            "or measure it with stoker.batch.fit"
        )
    return known[kind]
