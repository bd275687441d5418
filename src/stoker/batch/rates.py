"""A torch optimizer whose learning rate follows samples seen and the batch of each update."""

from typing import TYPE_CHECKING, Any

from stoker.batch.horizons import Horizon
from stoker.batch.scaling import Kind, Moments, Rescaled, Rule, rescale
from stoker.errors import ConfigError

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["RateFollower", "kind_of"]

KINDS: dict[str, Kind] = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw", "Muon": "muon"}
"""By the name of an optimizer's class, or of one that it is made from."""
FOLLOWING = ("lr", "betas", "eps", "weight_decay")
"""What may be set, by torch's names."""


def kind_of(optimizer: "Optimizer") -> Kind:
    """Of torch's optimizers and their kin. ConfigError for another."""
    name = next((each.__name__ for each in type(optimizer).__mro__ if each.__name__ in KINDS), None)
    if name is None:
        raise ConfigError(
            f"no rule is known for a {type(optimizer).__name__}: name one that it is like, as kind = ... (--kind on "
            f"the command line): {', '.join(KINDS.values())}"
        )
    if name == "Adam" and any(group.get("decoupled_weight_decay") for group in optimizer.param_groups):
        return "adamw"
    return KINDS[name]


class RateFollower:
    """Sets an optimizer before each step. What it was set to at first is right for `base_examples` per update, at the
    peak of the `horizon`; each group keeps its own.

    It has no state: the first settings are kept in the optimizer's groups (`initial_lr` and so on) and so in its
    `state_dict`, and the rest is a function of samples seen and the batch.
    """

    def __init__(
        self,
        optimizer: "Optimizer",
        horizon: Horizon,
        base_examples: int,
        *,
        kind: Kind | None = None,
        rule: Rule | None = None,
        moments: Moments = "half-life",
        noise_scale: float | None = None,
    ) -> None:
        """`kind`, `rule`, `moments` and `noise_scale` as in `rescale`; the kind is told by the optimizer's class."""
        self._optimizer, self._horizon, self._base = optimizer, horizon, base_examples
        self._kind = kind or kind_of(optimizer)
        self._rule, self._moments, self._noise_scale = rule, moments, noise_scale
        for group in optimizer.param_groups:
            for name in FOLLOWING:
                if name in group:
                    group.setdefault(f"initial_{name}", _plain(group[name]))
        if rule != "adascale":  # whose gain isn't known yet
            self.rescaled(base_examples)  # so that what can't be is told now

    def rescaled(self, examples: int, *, gain: float | None = None) -> tuple[Rescaled, ...]:
        """What to set for a batch at the peak rate, by parameter group, with warnings."""
        return tuple(
            rescale(
                self._kind,
                self._base,
                examples,
                learning_rate=group["initial_lr"],
                betas=group.get("initial_betas") if self._kind in ("adam", "adamw") else None,
                eps=group.get("initial_eps") if self._kind in ("adam", "adamw") else None,
                weight_decay=group.get("initial_weight_decay"),
                rule=self._rule,
                moments=self._moments,
                noise_scale=self._noise_scale,
                gain=gain,
            )
            for group in self._optimizer.param_groups
        )

    def set(self, samples_seen: float, examples: int, *, gain: float | None = None, factor: float = 1.0) -> float:
        """Before the step of an update of so many examples, over all ranks. Returns the first group's rate.

        `samples_seen`: with this update's own. With AdaScale, `gain` is this step's and `samples_seen` the sum of
        gain x base_examples over steps, as one of them is worth that many. `factor`: of the rate, beyond all rules
        (`ByPlateau.rate_factor`).
        """
        made = self.rescaled(examples, gain=gain)
        for group, each in zip(self._optimizer.param_groups, made, strict=True):
            rate = factor * self._horizon.rate(each.learning_rate, samples_seen)
            _put(group, "lr", rate)
            for name, value in (("betas", each.betas), ("eps", each.eps), ("weight_decay", each.weight_decay)):
                if value is not None:
                    _put(group, name, value)
        return factor * self._horizon.rate(made[0].learning_rate, samples_seen)


def _plain(value: Any) -> Any:
    """A number, or a pair of them, from tensors too: captured steps keep their settings in such."""
    return tuple(map(float, value)) if isinstance(value, tuple | list) else float(value)


def _put(group: dict[str, Any], name: str, value: Any) -> None:
    """In place where it is a tensor, or a captured step wouldn't see it."""
    present = group[name]
    if hasattr(present, "fill_"):
        present.fill_(value)
    elif isinstance(present, tuple | list) and any(hasattr(each, "fill_") for each in present):
        for each, number in zip(present, value, strict=True):
            each.fill_(number)
    else:
        group[name] = value
