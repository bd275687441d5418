"""What one training is run with, of all that may be compared. No torch here."""

from dataclasses import asdict, dataclass
from typing import Any, get_args

from stoker.batch.horizons import Decay
from stoker.batch.scaling import Moments, Rule
from stoker.errors import ConfigError

__all__ = ["Setting"]


@dataclass(frozen=True)
class Setting:
    """Everything that a training may be given; what isn't here is the target's own and equal for all (fair comparison).

    The optimizer's settings are those that the target made it with: right for `base_examples` per update, and following
    by `rule` to another batch.
    """

    examples_per_update: int
    base_examples: int | None = None
    """None: the target's settings are right for `examples_per_update`."""
    rule: Rule | None = None
    """Of the learning rate; None: the optimizer's own (`scaling.RULES`)."""
    moments: Moments = "half-life"
    rate_factor: float = 1.0
    """Of the learning rate, beyond the rule."""
    examples_per_microbatch: int | None = None
    """None: the whole update at once."""
    warmup_samples: int = 0
    decay: Decay = "constant"
    clip_norm: float | None = None
    """The gradient's norm at most; None: as it is."""
    seed: int = 0
    """Of the first weights and of the data's order."""

    def __post_init__(self) -> None:
        for name in ("examples_per_update", "base_examples", "examples_per_microbatch"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} = {value!r}: a whole number of examples, at least 1")
        if self.examples_per_update % self.microbatch:
            raise ConfigError(
                f"{self.examples_per_update} examples per update are not a multiple of {self.microbatch} per "
                "micro-batch"
            )
        for name, known in (("rule", Rule), ("moments", Moments), ("decay", Decay)):
            value = getattr(self, name)
            if value not in get_args(known) and not (name == "rule" and value is None):
                raise ConfigError(f"{name} = {value!r}: one of {', '.join(get_args(known))}")
        if not 0 < self.rate_factor < float("inf"):
            raise ConfigError(f"rate_factor = {self.rate_factor}: a positive number")
        if self.warmup_samples < 0 or self.seed < 0:
            raise ConfigError(f"warmup_samples = {self.warmup_samples}, seed = {self.seed}: 0 or more")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"clip_norm = {self.clip_norm}: more than 0, or None")

    @property
    def microbatch(self) -> int:
        """Examples that one forward and backward pass holds."""
        return self.examples_per_microbatch or self.examples_per_update

    @property
    def microbatches(self) -> int:
        """Of an update."""
        return self.examples_per_update // self.microbatch

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        return asdict(self)
