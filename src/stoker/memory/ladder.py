"""What can be done where memory is short, from cheap to dear, each step with the bytes it is predicted to save."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from stoker.memory.breakdown import Breakdown, Margin, gib
from stoker.memory.prediction import predict
from stoker.memory.setup import Setup
from stoker.memory.shape import ModelShape

__all__ = ["Lever", "levers"]

Change = Callable[[ModelShape, Setup], Setup | None]
CHUNK = 1024
"""Tokens whose logits are in memory together, where chunks are proposed."""


@dataclass(frozen=True)
class Lever:
    """One step of the ladder."""

    name: str
    saves: float
    """Bytes of the peak, pulled alone; 0 where another moment is then the peak, or where it can't be predicted."""
    peak: float
    """Bytes of the peak with this lever and all before it."""
    most_examples: int
    """Of a micro-batch within the capacity, with this lever and all before it."""
    costs: str
    how: str
    """What to call or set."""
    setup: Setup
    """With this lever and all before it."""

    def to_json(self) -> dict[str, Any]:
        """Everything, in plain types."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.name}: saves {gib(self.saves)} alone; with all above {gib(self.peak)}, and up to "
            f"{self.most_examples:,} examples fit. Costs: {self.costs}. How: {self.how}"
        )


def levers(
    shape: ModelShape, setup: Setup, capacity: float | None = None, margin: Margin | None = None
) -> tuple[Lever, ...]:
    """The ladder for a set-up, from the cheapest lever to the dearest; those that are pulled already aren't in it.

    `capacity`: the device's bytes, for the examples that fit; None: what the set-up takes as it is.
    """
    before = predict(shape, setup, margin)
    room = before.expected if capacity is None else capacity
    ladder, current = [], setup
    for name, change, costs, how in _LADDER:
        alone, further = change(shape, setup), change(shape, current)
        if alone is None or further is None:
            continue
        # Fewer tokens or examples are another batch: the rest of the ladder is for the one that was asked for.
        kept = further if (further.tokens, further.examples) == (setup.tokens, setup.examples) else current
        found = predict(shape, further, margin)
        saves = before.expected - predict(shape, alone, margin).expected
        ladder.append(Lever(name, saves, found.expected, found.most_examples(room), costs, how, further))
        current = kept
    return (*ladder, _fragmentation(predict(shape, current, margin), current, room))


def _mixed(shape: ModelShape, setup: Setup) -> Setup | None:
    return replace(setup, precision="autocast") if setup.precision == "fp32" else None


def _freed(shape: ModelShape, setup: Setup) -> Setup | None:
    kept = setup.loss == "cross_entropy, outputs kept"
    stepping = "fused" if setup.optimizer == "adamw" and setup.stepping in ("loop", "foreach") else setup.stepping
    if not kept and stepping == setup.stepping:
        return None
    return replace(setup, stepping=stepping, loss="cross_entropy" if kept else setup.loss)


def _chunked(shape: ModelShape, setup: Setup) -> Setup | None:
    fits = setup.logits_chunk or shape.logits < shape.hidden or setup.examples * setup.tokens <= CHUNK
    return None if fits or not setup.trains else replace(setup, logits_chunk=CHUNK)


def _shorter(shape: ModelShape, setup: Setup) -> Setup | None:
    return replace(setup, tokens=setup.tokens // 2) if setup.tokens > 1 else None


def _flash(shape: ModelShape, setup: Setup) -> Setup | None:
    softcap = any(block.attention.softcap for block in shape.blocks)
    return None if setup.attention == "flash" or softcap else replace(setup, attention="flash")


def _micro(shape: ModelShape, setup: Setup) -> Setup | None:
    return replace(setup, examples=setup.examples // 2, accumulating=True) if setup.examples > 1 else None


def _checkpointed(shape: ModelShape, setup: Setup) -> Setup | None:
    return None if setup.checkpointing or not setup.trains else replace(setup, checkpointing=True)


def _eight_bit(shape: ModelShape, setup: Setup) -> Setup | None:
    return replace(setup, optimizer="adamw_8bit", stepping="fused") if setup.optimizer == "adamw" else None


def _adapters(shape: ModelShape, setup: Setup) -> Setup | None:
    return replace(setup, lora_rank=16, precision="bf16") if setup.trains_all else None


def _offloaded(shape: ModelShape, setup: Setup) -> Setup | None:
    return None if setup.offload or not setup.trains else replace(setup, offload=True)


def _fragmentation(found: Breakdown, setup: Setup, room: float) -> Lever:
    """Always the last: how much an allocator's holes take can't be known before a run."""
    return Lever(
        "fragmentation",
        0.0,
        found.expected,
        found.most_examples(room),
        "nothing, or a restart",
        "on CUDA PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, torch.cuda.empty_cache() once after a peak that "
        "doesn't come again (an evaluation), or a fresh process: memory_reserved() less memory_allocated() is what "
        "they can give; on a CPU with glibc MALLOC_MMAP_THRESHOLD_=1048576",
        setup,
    )


_LADDER: tuple[tuple[str, Change, str, str], ...] = (
    (
        "mixed precision",
        _mixed,
        "rounding to 16 bit in the layers; on most devices it is faster. Of activations and logits it saves near half; "
        "weights, gradients and states stay at 16 bytes a parameter with AdamW",
        "torch.autocast(device, torch.bfloat16) around the forward pass",
    ),
    (
        "freeing temporaries",
        _freed,
        "nothing",
        "AdamW(fused=True); optimizer.zero_grad(set_to_none=True), its default; keep loss.item(), not the outputs",
    ),
    ("flash attention", _flash, "nothing", "attn_implementation='sdpa', or F.scaled_dot_product_attention"),
    (
        "chunked logits",
        _chunked,
        "a second product of the head",
        f"a loss that computes the logits of {CHUNK:,} tokens at a time",
    ),
    (
        "half the input length",
        _shorter,
        "what the longest examples said",
        "truncate, pack or bucket the data; the predicted bytes are those of the longest example",
    ),
    (
        "half the micro-batch",
        _micro,
        "the same gradient in twice as many passes; slower where the device isn't filled",
        "stoker.batch.accumulate",
    ),
    (
        "checkpointing",
        _checkpointed,
        "every layer's forward pass again: about 30 % more time",
        "model.activation_checkpointing_enable() of transformers, or torch.utils.checkpoint.checkpoint(layer, x, "
        "use_reentrant=False)",
    ),
    ("8-bit optimizer", _eight_bit, "moments rounded in blocks", "bitsandbytes.optim.AdamW8bit"),
    (
        "optimizer offload",
        _offloaded,
        "states cross the bus at every step; fewer steps, each of more micro-batches, hide it",
        "torchao's CPUOffloadOptimizer, DeepSpeed ZeRO-Offload or FSDP's CPUOffloadPolicy",
    ),
    (
        "adapters",
        _adapters,
        "another training: only low-rank changes are learned",
        "peft.LoraConfig(r=16, target_modules='all-linear')",
    ),
)
