"""How a model is trained, as far as memory is concerned."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stoker.errors import ConfigError

__all__ = ["LOSSES", "OPTIMIZERS", "PRECISIONS", "QUANTISED", "Loss", "Optimizer", "Precision", "Setup"]


@dataclass(frozen=True)
class Precision:
    """Bytes of one element."""

    weight: int
    gradient: int
    master: int
    """Of an fp32 copy of the weights that the optimizer moves; 0: it moves the weights themselves."""
    moment: int
    compute: int
    """Of what the layers keep."""

    @property
    def autocast(self) -> bool:
        """Linear maps compute in fewer bits than their weights have, on copies of them."""
        return self.compute < self.weight


PRECISIONS: Mapping[str, Precision] = {
    "fp32": Precision(4, 4, 0, 4, 4),
    "autocast": Precision(4, 4, 0, 4, 2),
    "master": Precision(2, 2, 4, 4, 2),
    "master, fp32 gradients": Precision(2, 4, 4, 4, 2),
    "bf16": Precision(2, 2, 0, 2, 2),
}
"""fp32; fp32 weights under autocast to 16 bit; 16-bit weights with an fp32 master; everything in bf16."""


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer keeps of each parameter."""

    moments: float = 0.0
    """Elements kept, in the precision's `moment` bytes."""
    nbytes: float = 0.0
    """Bytes kept in any precision."""
    matrix_moments: float | None = None
    """For the layers' matrices instead, where it treats them otherwise."""
    factored: bool = False
    """Rows and columns of the second moment instead of its elements."""
    temporaries: int = 0
    """Copies of a tensor that a step makes and drops: of the largest in a loop, of all parameters with foreach."""


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(moments=2, temporaries=2),
    "adamw_8bit": Optimizer(nbytes=2 + 2 * 4 / 256),
    "adafactor": Optimizer(factored=True, temporaries=2),
    "muon": Optimizer(moments=2, matrix_moments=1, temporaries=2),
    "sgd": Optimizer(),
    "sgd_momentum": Optimizer(moments=1),
    "none": Optimizer(),
}
"""By name. 8 bit: two moments of a byte, an fp32 scale for each block of 256 (bitsandbytes, `blocksize=256`).
Muon: AdamW for what is no matrix of a layer. "none": the model isn't trained."""

QUANTISED: Mapping[str, float] = {
    "int8": 1.0,
    "nf4": 0.5 + 4 / 64,
    "nf4_double": 0.5 + 1 / 64 + 4 / (64 * 256),
}
"""Bytes of a weight in a layer's matrix. NF4 has a scale for each block of 64: fp32, or of 8 bits with an fp32 one for
256 of them (double quantisation; Dettmers et al. 2023, arXiv 2305.14314, section 3)."""


@dataclass(frozen=True)
class Loss:
    """Bytes of each logit, by the bytes of a computed element (2, 4)."""

    held: Mapping[int, float]
    """Until the backward pass."""
    peak: Mapping[int, float]
    """At the most, at the beginning of the backward pass."""


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss({2: 4, 4: 4}, {2: 12, 4: 12}),
    "cross_entropy, outputs kept": Loss({2: 6, 4: 8}, {2: 14, 4: 16}),
    "cross_entropy, own precision": Loss({2: 2, 4: 4}, {2: 6, 4: 12}),
    "log_softmax": Loss({2: 2, 4: 4}, {2: 8, 4: 12}),
    "logsumexp": Loss({2: 4, 4: 4}, {2: 16, 4: 16}),
    "logsumexp, entropy": Loss({2: 8, 4: 8}, {2: 20, 4: 20}),
    "none": Loss({2: 0, 4: 0}, {2: 0, 4: 0}),
}
"""`cross_entropy` is transformers' own loss, in fp32; its outputs (logits included) may be kept beside it; BERT's is in
the logits' own precision. `log_softmax`: likewise in their own, then gather. `logsumexp`: in fp32, then gather.
"""

UNGRADED: Mapping[int, float] = {2: 4, 4: 10}
"""Bytes of each logit at most where log-probs are computed without gradients."""


@dataclass(frozen=True)
class Setup:
    """One training set-up, per device. ConfigError where a name isn't known or numbers contradict each other."""

    examples: int
    """In one micro-batch."""
    tokens: int
    """Of one example, padding included."""
    precision: str = "fp32"
    """A key of PRECISIONS."""
    optimizer: str = "adamw"
    """A key of OPTIMIZERS."""
    stepping: Literal["loop", "foreach", "fused", "in backward"] = "foreach"
    """How the optimizer goes through its tensors; PyTorch takes foreach on GPUs and a loop on CPUs. "in backward": each
    tensor is stepped as soon as it has its gradient, which is then dropped.
    """
    checkpointing: bool = False
    """Each layer keeps its input alone and is computed again in the backward pass."""
    attention: Literal["flash", "eager"] = "flash"
    """Eager attention keeps the weights of all pairs of tokens."""
    padding_mask: bool = False
    """A mask makes flash attention repeat keys and values for every query head."""
    fused_norm: bool = False
    fused_mlp: bool = False
    dropout: bool = True
    """As the model's config has it; False: none."""
    loss: str = "cross_entropy"
    """A key of LOSSES."""
    logits_chunk: int = 0
    """Tokens whose logits are in memory together; 0: all."""
    accumulating: bool = False
    """Several micro-batches add to the gradients before a step: they are there through every forward pass."""
    lora_rank: int = 0
    """0: all weights are trained."""
    lora_dtype: Literal["fp32", "base"] = "fp32"
    """Of adapters, their gradients and moments: peft takes fp32 beside a 16-bit base, torchtune the base's own."""
    quantised: str | None = None
    """A key of QUANTISED, for the layers' matrices of a model that isn't trained itself."""
    ranks: int = 1
    """Data-parallel devices."""
    sharding: Literal["none", "zero1", "zero2", "zero3"] = "none"
    """What the ranks share: optimizer states; gradients too; weights too (FSDP's full shard)."""
    offload: bool = False
    """Optimizer states and master weights lie in the host's memory."""
    cache_tokens: int = 0
    """Tokens that a key-value cache has room for."""
    cache_bytes: int = 2
    """Of an element of that cache."""
    device: Literal["cuda", "cpu"] = "cuda"
    context: int = 0
    """Bytes taken before anything is in memory: a CUDA context has 0.35 to 1.4 GB."""

    def __post_init__(self) -> None:
        tables = {"precision": PRECISIONS, "optimizer": OPTIMIZERS, "loss": LOSSES}
        for field, table in tables.items():
            if getattr(self, field) not in table:
                raise ConfigError(f"memory set-up: {field} = {getattr(self, field)!r} isn't one of {', '.join(table)}")
        if self.quantised is not None and self.quantised not in QUANTISED:
            raise ConfigError(f"memory set-up: quantised = {self.quantised!r} isn't one of {', '.join(QUANTISED)}")
        if self.quantised and self.trains_all:
            raise ConfigError("memory set-up: quantised weights aren't trained; set lora_rank, or optimizer = 'none'")
        for field in ("examples", "tokens", "ranks"):
            if getattr(self, field) < 1:
                raise ConfigError(f"memory set-up: {field} = {getattr(self, field)} must be at least 1")
        for field in ("lora_rank", "logits_chunk", "cache_tokens", "context"):
            if getattr(self, field) < 0:
                raise ConfigError(f"memory set-up: {field} = {getattr(self, field)} is negative")
        if self.accumulating and self.stepping == "in backward":
            raise ConfigError("memory set-up: a step in the backward pass leaves no gradients to accumulate")
        if self.sharding != "none" and self.ranks == 1:
            raise ConfigError(f"memory set-up: sharding = '{self.sharding}' needs ranks above 1")

    @property
    def bytes_of(self) -> Precision:
        return PRECISIONS[self.precision]

    @property
    def adapter_bytes(self) -> int:
        """Of an element of an adapter."""
        return 4 if self.lora_dtype == "fp32" else self.bytes_of.weight

    @property
    def trains(self) -> bool:
        return self.optimizer != "none"

    @property
    def trains_all(self) -> bool:
        return self.trains and not self.lora_rank

    def to_json(self) -> dict[str, Any]:
        """Every field."""
        return asdict(self)
