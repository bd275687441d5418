"""Bytes of weights, gradients and optimizer states: what a batch of any size needs.

| set-up | weights + gradients + states, bytes a parameter |
|---|---|
| AdamW, fp32 (or autocast) | 4 + 4 + 8 = 16 |
| AdamW, 16-bit weights, fp32 master, 16-bit gradients | 2 + 2 + 4 + 8 = 16 (ZeRO, arXiv 1910.02054, section 3.1) |
| the same with fp32 gradients | 18 |
| AdamW, all in bf16 | 2 + 2 + 4 = 8 |
| 8-bit AdamW | states 2.03 for 8 |
| SGD with momentum, Muon's matrices | states 4 for 8 |
| LoRA | the base's 2 (NF4: 0.516 or 0.563), and the adapters' 16 |
"""

from dataclasses import dataclass

from stoker.memory.setup import OPTIMIZERS, QUANTISED, Optimizer, Setup
from stoker.memory.shape import Weights

__all__ = ["States", "deepspeed_estimate", "moment_bytes", "states_of", "temporaries"]


@dataclass(frozen=True)
class States:
    """Bytes on one rank."""

    weights: float
    gradients: float
    optimizer: float
    """Moments, and fp32 master weights."""
    stepping: float
    """What a step makes and drops."""
    gathered: float
    """Weights of the layers that sharded training has whole at a time: the one at work and the next."""
    head_gradient: float
    """Part of `gradients`: the first that a backward pass makes."""
    input_gradient: float
    """Part of `gradients`: the last, of tables that are no head too."""
    table_gradient: float
    """A tied table has two gradients for a moment."""
    cast: float
    """16-bit copies of linear weights under autocast."""


def states_of(weights: Weights, setup: Setup) -> States:
    """Bytes that one rank holds whatever the batch, in the steady state (from the second step on)."""
    size = setup.bytes_of
    trained = weights.trained if setup.trains else 0
    # Adapters are their own master.
    gradient = setup.adapter_bytes if setup.lora_rank else size.gradient
    waiting = min(trained, weights.largest) if setup.stepping == "in backward" else trained
    stage = ("none", "zero1", "zero2", "zero3").index(setup.sharding)
    share = [1 / setup.ranks if stage >= least else 1.0 for least in (1, 2, 3)]
    return States(
        weights=_stored(weights, setup) * share[2],
        gradients=waiting * gradient * share[1],
        optimizer=_optimizer(weights, setup) * share[0],
        stepping=_temporaries(weights, setup) * share[0],
        gathered=2 * weights.layer * size.compute if setup.sharding == "zero3" else 0,
        head_gradient=weights.head_table * gradient * setup.trains_all * share[1],
        input_gradient=weights.input_tables * gradient * setup.trains_all * (waiting == trained) * share[1],
        table_gradient=weights.table * gradient * setup.trains_all,
        # Layers that are computed again let go of theirs until then.
        cast=((weights.layer if setup.checkpointing else weights.linear) + weights.head_table) * size.compute
        if size.autocast
        else 0,
    )


def moment_bytes(optimizer: str, trained: int, matrices: int, factored: int, element: float) -> float:
    """Bytes of an optimizer's moments.

    `optimizer`: a key of OPTIMIZERS; `trained` parameters, `matrices` of them in matrices; `factored`: rows and columns
    of the matrices and elements of the rest; `element`: bytes of one.
    """
    kind = OPTIMIZERS[optimizer]
    moments = kind.moments * trained
    if kind.matrix_moments is not None:
        moments = kind.matrix_moments * matrices + kind.moments * (trained - matrices)
    if kind.factored:
        moments = factored
    return moments * element + kind.nbytes * trained


def _stored(weights: Weights, setup: Setup) -> float:
    size = setup.bytes_of.weight
    base: float = weights.parameters * size
    if setup.quantised:
        base = weights.unquantised * size + weights.linear * QUANTISED[setup.quantised]
    return base + (weights.trained * setup.adapter_bytes if setup.lora_rank else 0)


def _optimizer(weights: Weights, setup: Setup) -> float:
    size, trained = setup.bytes_of, weights.trained
    if not setup.trains:
        return 0.0
    if setup.lora_rank:
        return moment_bytes(
            setup.optimizer, trained, matrices=trained, factored=weights.factored, element=setup.adapter_bytes
        )
    moments = moment_bytes(setup.optimizer, trained, weights.linear, weights.factored, size.moment)
    return moments + size.master * trained


def temporaries(optimizer: Optimizer, stepping: str, largest: int, trained: int) -> int:
    """Elements that a step makes and drops. `largest`: of the largest trained tensor."""
    if stepping == "fused":
        return 0
    if stepping == "foreach":
        # Of all tensors, but the second in place of the first.
        return (optimizer.temporaries + 1) // 2 * trained
    return optimizer.temporaries * largest


def _temporaries(weights: Weights, setup: Setup) -> float:
    moment = setup.adapter_bytes if setup.lora_rank else setup.bytes_of.moment
    trained = weights.trained if setup.trains else 0
    return temporaries(OPTIMIZERS[setup.optimizer], setup.stepping, weights.largest, trained) * moment


def deepspeed_estimate(parameters: int, ranks: int, stage: int, largest_layer: int = 0) -> float:
    """Bytes of model states per device as DeepSpeed's own estimator counts them, nothing offloaded.

    `estimate_zero2_model_states_mem_needs` and `estimate_zero3_model_states_mem_needs` (deepspeed.runtime.zero): at
    stage 2, 4 bytes a parameter whole and 16 shared; at stage 3, 18 shared and 4 of the largest layer.
    """
    if stage == 2:
        return 4 * parameters + 16 * parameters / ranks
    if stage == 3:
        return 4 * largest_layer + 18 * parameters / ranks
    raise ValueError(f"stage {stage}: DeepSpeed estimates 2 and 3")
