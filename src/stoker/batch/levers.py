"""What can be done where a traced target's memory is short, cheapest first, each with the bytes it should save."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["TracedLever", "levers_of"]

_EIGHT_BIT_SHARE = 2.03 / 8
"""8-bit Adam: two moments of one byte and a scale per block, for two of four bytes (arXiv 2110.02861)."""
_HALF = 0.5


@dataclass(frozen=True)
class TracedLever:
    """One step of the ladder, pulled alone."""

    name: str
    saves_bytes: int | None
    """Predicted, of the peak at the certified size; None: can't be known before it is tried."""
    more_units: int | None
    """How much larger the size could be with them; None: nothing grew with the size, or the bytes aren't known."""
    costs: str
    how: str

    def to_json(self) -> dict[str, Any]:
        """Everything, in plain types."""
        return asdict(self)


def levers_of(
    trace: Mapping[str, Any], size: int, states_bytes: int, bytes_per_unit: float | None, unit: str
) -> tuple[TracedLever, ...]:
    """The ladder from a `Trace.to_json()`, the optimizer's real states and the growth that was measured.

    What is without effect here (a mixed precision of 16-bit weights, states that aren't there) isn't in it.
    """
    kept = {layer["name"]: layer["fixed"] + layer["per_unit"] * size for layer in trace["layers"]}
    grown = sum(layer["per_unit"] for layer in trace["layers"]) * size
    inside = sum(kept.values()) - kept.get("batch", 0.0)
    keeping = sum(bytes_ > 0 for name, bytes_ in kept.items() if name not in ("batch", "loss"))
    fp32 = trace["weight_bytes"] >= 4 * trace["parameters"] > 0
    mixed = inside * _HALF - trace["weight_bytes"] * _HALF  # autocast keeps 16-bit copies of the weights it uses
    checkpointed = inside * (1 - 2 / math.sqrt(keeping)) if keeping else 0.0
    found: list[tuple[str, float | None, str, str]] = [
        (
            "mixed precision",
            mixed if fp32 else 0,
            "rounding to 16 bit inside the layers; weights, gradients and states stay as they are",
            "torch.autocast(device, torch.bfloat16) around the forward pass",
        ),
        (
            "half the input length",
            sum(kept.values()) * _HALF,
            "what the longest examples said; only where inputs have a length",
            "truncate, or split the longest examples",
        ),
        (
            f"half the micro-batch, accumulated twice ({size // 2} {unit})",
            grown * _HALF if size > 1 else 0,
            "the same gradient in twice as many passes",
            "stoker.batch.accumulate",
        ),
        (
            "checkpointing",
            checkpointed,
            "each layer's forward pass again: about 30 % more time (arXiv 1604.06174)",
            "torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)",
        ),
        ("8-bit optimizer", states_bytes * (1 - _EIGHT_BIT_SHARE), "moments rounded in blocks", "bitsandbytes.optim"),
        (
            "optimizer offload",
            states_bytes,
            "states cross to the host and back at every update",
            "torchao's CPUOffloadOptimizer, or FSDP's CPUOffloadPolicy",
        ),
    ]
    if trace["device"] != "cpu":
        how = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; torch.cuda.empty_cache() after a peak; a fresh process"
        found.append(("fragmentation", None, "nothing, or a restart", how))

    def lever(name: str, saves: float | None, costs: str, how: str) -> TracedLever:
        more = int(saves / bytes_per_unit) if saves is not None and bytes_per_unit else None
        return TracedLever(name, None if saves is None else int(saves), more, costs, how)

    return tuple(lever(*one) for one in found if one[1] is None or one[1] >= 1)
