"""What the loop needs of an engine. Samples and batches cross here, never modules or device tensors."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from stoker.rl.types import Floats, Objective, Prompt, Request, Sample, Scored, TrainBatch, TrainRow

__all__ = ["Learner", "Metrics", "PromptSource", "RewardPort", "Role", "Sampler", "Watcher"]

Role = Literal["policy", "reference", "critic"]
Metrics = dict[str, float]


class PromptSource(Protocol):
    """Training prompts in an order that only the seed decides."""

    def take(self, n: int, besides: Sequence[Prompt] = ()) -> list[Prompt]:
        """The next n prompts, all different and none of `besides`: fewer where those leave fewer."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Sampler(Protocol):
    """Draws answers. Every sample names the weight version it came from."""

    @property
    def notes(self) -> Sequence[str]:
        """What was detected of the model, or adapted to the machine so far; a sentence each, for the user."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue samples to draw."""
        ...

    def collect(self) -> Iterator[Sample]:
        """Yield every queued sample, in whatever order suits the engine."""
        ...

    def push(self, weight_version: int) -> None:
        """Make later samples come from the learner's current weights; drops caches of older ones."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON-able settings that adapted in the run (e.g. concurrent_samples after an OOM)."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Learner(Protocol):
    """Two verbs: add a batch's gradient, take an optimizer step. Policy and critic step together."""

    @property
    def notes(self) -> Sequence[str]:
        """As `Sampler.notes`."""
        ...

    def forward_backward(self, batch: TrainBatch, objective: Objective) -> Metrics:
        """Add the gradient of sum(weights * loss_t) over the batch, in micro-batches of its own choosing."""
        ...

    def step(self, samples_seen: int, growth: float = 1.0) -> Metrics:
        """Clip, set the learning rate, update, zero the gradients. `optim/skipped`: 1 if refused.

        The rate goes by samples seen, and follows an update that has `growth` times the samples it is right for.
        """
        ...

    def score(self, rows: Sequence[TrainRow], role: Role) -> list[Floats]:
        """Per row (T,): log-probs of its tokens (policy, reference) or values before each (critic); 0 off its mask."""
        ...

    def begin_rl(self) -> None:
        """Call once when RL begins, after any warm start: the policy as it is now is "the initial policy"."""
        ...

    def save_reference(self, folder: Path) -> None:
        """Once a run, after `begin_rl`: later checkpoints can't tell what the initial policy was."""
        ...

    def load_reference(self, folder: Path) -> None:
        """On resume, instead of `begin_rl`."""
        ...

    def save(self, folder: Path) -> None:
        """Policy in Hugging Face form under `policy/`, optimizer state and RNG beside it."""
        ...

    def load(self, folder: Path) -> None: ...

    def checkpoint_bytes(self) -> int:
        """About what `save` will write; 0: not known."""
        ...

    def memory(self) -> Metrics:
        """`memory/*` in bytes, as far as the device tells."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON-able settings that adapted in the run (e.g. tokens_per_microbatch after an OOM)."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class RewardPort(Protocol):
    """Scores the samples of a step; one Scored per sample, same order."""

    def begin(self, samples: Sequence[Sample], step: int) -> None:
        """All samples of one prompt, while others are still drawn: what can be scored beside that may start.

        Returns at once; the samples come again in the call.
        """
        ...

    def __call__(self, samples: Sequence[Sample], step: int) -> list[Scored]: ...


class Watcher(Protocol):
    """Sees each step's record; may ask the run to stop (reason) or pass (None)."""

    def __call__(self, record: Mapping[str, float]) -> str | None: ...
