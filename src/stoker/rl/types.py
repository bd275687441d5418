"""What flows through the loop. One sample is one generated answer, with how it was drawn.

Arrays here are numpy on the host: an engine may live in another process or on another machine.
T is the number of response tokens of one sample.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Bools",
    "Floats",
    "Group",
    "Ints",
    "KeptTokens",
    "Message",
    "Objective",
    "Prompt",
    "Request",
    "Sample",
    "SamplingParams",
    "Scored",
    "TrainBatch",
    "TrainRow",
]

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One row of a task, ready for the model."""

    id: str
    """`source:row`, unique in the run: groups are keyed by it, never by text."""
    token_ids: tuple[int, ...]
    content: str | tuple[Message, ...]
    """As the task gave it: what reward functions are shown."""
    answer: str | None
    """The reference answer, where the row has one."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the row, for reward functions."""
    source: str = ""


@dataclass(frozen=True)
class SamplingParams:
    """The sampled distribution: softmax(logits / temperature), cut by top_k then top_p, renormalised."""

    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()

    @property
    def greedy(self) -> bool:
        """True where each token is the most likely one."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """True where tokens are cut, so that log-probs need the kept set."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True)
class Request:
    """One sample to draw. The draw depends on (seed, prompt, sample, position), never on batching."""

    prompt: Prompt
    index: int
    """Which sample of its group."""
    params: SamplingParams
    seed: int
    """Differs from visit to visit of the same prompt."""


@dataclass(frozen=True)
class KeptTokens:
    """The tokens that top-k/top-p left at each position, ragged: position t owns ids[offsets[t]:offsets[t+1]]."""

    ids: Ints
    offsets: Ints  # (T + 1,)


@dataclass(frozen=True)
class Sample:
    """One generated answer."""

    prompt: Prompt
    index: int
    params: SamplingParams
    weight_version: int
    """Optimizer steps behind the weights it was drawn from."""
    token_ids: Ints  # (T,) with the stop token, where there was one
    logprobs: Floats  # (T,) under the sampled distribution
    text: str
    """Decoded answer without stop token or stop string."""
    finish: Literal["stop", "length"]
    kept: KeptTokens | None = None
    model_mask: Bools | None = None  # (T,) False: a token the model didn't write (tool output); None: all True

    @property
    def id(self) -> str:
        return f"{self.prompt.id}/{self.index}"

    @property
    def truncated(self) -> bool:
        return self.finish == "length"


@dataclass(frozen=True)
class Scored:
    """A sample with what the rewards said of it."""

    sample: Sample
    rewards: Mapping[str, float | None]
    """By reward name, unweighted; None: that reward abstained."""
    reward: float | None
    """Weighted sum over those that answered; None: all abstained, so the sample leaves the step."""
    parsed: bool | None = None
    """False: a rule reward found no answer to check; None: no rule reward spoke."""


@dataclass(frozen=True)
class Group:
    """The samples of one prompt in one step."""

    prompt: Prompt
    scored: tuple[Scored, ...]
    greedy: Scored | None = None
    """The prompt's greedy answer, where the algorithm measures the samples against it; never trained on."""


@dataclass(frozen=True)
class TrainRow:
    """One sample as the learner sees it. All arrays (T,), aligned with token_ids."""

    sample_id: str
    prompt_ids: tuple[int, ...]
    token_ids: Ints
    mask: Bools
    """Tokens that count: written by the model, in a sample that stays."""
    weights: Floats
    """Loss weight, the update's one denominator already divided in; 0 outside the mask. The update's
    loss is sum(weights * loss_t), so it can't depend on how rows are split into micro-batches."""
    advantages: Floats
    sampler_logprobs: Floats
    temperature: float = 1.0
    kept: KeptTokens | None = None
    old_logprobs: Floats | None = None
    """None: the policy hasn't moved since sampling, so the loss detaches the current ones."""
    reference_logprobs: Floats | None = None
    old_values: Floats | None = None
    returns: Floats | None = None


@dataclass(frozen=True)
class TrainBatch:
    """The rows behind one optimizer step, over all micro-batches."""

    rows: tuple[TrainRow, ...]
    measure: int | None = None
    """Measure the gradient's noise while it is added up, with this seed (see `rl.noise`); None: don't."""


@dataclass(frozen=True)
class Objective:
    """Which pure loss of `rl.losses` to apply, and its numbers (those of the run file's [algorithm] and [kl])."""

    loss: Literal["policy", "value", "sft"]
    surrogate: str = "clip"
    """The policy's: one of `rl.losses.SURROGATES`, or a user's path."""
    ratio: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    gate_positive: float = 1.0
    gate_negative: float = 1.05
    kl_coefficient: float = 0.0
    kl_estimator: str = "k2"
    kl_level: str = "token"
    entropy_coefficient: float = 0.0
    value_clip: float = 0.0
    value_coefficient: float = 1.0
