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

from stoker.memory.setup import OPTIMIZERS, QUANTISED, Setup
from stoker.memory.shape import Weights

__all__ = ["States", "deepspeed_estimate", "states_of"]


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
    table_gradient: float
    """A tied table has two gradients for a moment."""
    cast: float
    """16-bit copies of linear weights under autocast."""


def states_of(weights: Weights, setup: Setup) -> States:
    """Bytes that one rank holds whatever the batch, in the steady state (from the second step on)."""
    size, optimizer = setup.bytes_of, OPTIMIZERS[setup.optimizer]
    stored = weights.parameters * size.weight
    if setup.quantised:
        stored = weights.unquantised * size.weight + weights.linear * QUANTISED[setup.quantised]
    gradient = size.gradient
    moment, master = size.moment, size.master
    trained = weights.trained if setup.trains else 0
    if setup.lora_rank:
        # Adapters beside a 16-bit base are fp32, and are their own master (peft's `autocast_adapter_dtype`).
        gradient, moment, master = 4, 4, 0
        stored += trained * 4
    matrices = min(weights.linear, trained) if not setup.lora_rank else trained
    moments = optimizer.moments * trained
    if optimizer.matrix_moments is not None:
        moments = optimizer.matrix_moments * matrices + optimizer.moments * (trained - matrices)
    if optimizer.factored:
        moments = weights.factored
    kept = moments * moment + optimizer.nbytes * trained + master * trained
    temporaries = {
        "loop": optimizer.temporaries * weights.largest,
        # One of the two at a time: the second takes the first's place.
        "foreach": (optimizer.temporaries + 1) // 2 * trained,
        "fused": 0,
    }[setup.stepping]
    everything = setup.trains_all
    stage = ("none", "zero1", "zero2", "zero3").index(setup.sharding)
    states, gradients, whole = (setup.ranks if stage >= least else 1 for least in (1, 2, 3))
    return States(
        weights=stored / whole,
        gradients=trained * gradient / gradients,
        optimizer=kept / states,
        stepping=temporaries * (4 if master or setup.lora_rank else size.moment) / states,
        gathered=2 * weights.layer * size.compute if setup.sharding == "zero3" else 0,
        head_gradient=weights.head_table * gradient * everything / gradients,
        table_gradient=weights.table * gradient * everything,
        cast=(weights.linear + weights.head_table) * size.compute if size.autocast else 0,
    )


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
