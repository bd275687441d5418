"""The table of the run file that turns rewards into a loss: pieces that combine, and named recipes of them."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from stoker.config.base import Finite, Fraction, NonNegative, Positive, PositiveInt, Section, Text

__all__ = ["ADVANTAGES", "LOSSES", "RECIPES", "Algorithm", "Recipe", "describe", "fill_leash", "same_as_other"]

ADVANTAGES = ("group", "leave_one_out", "greedy", "reward", "gae")
LOSSES = ("clip", "reinforce", "cispo", "sapo")


class Algorithm(Section):
    """From rewards to advantages to the loss. A name sets every key that its recipe names (docs/algorithms.md); a
    key beside it wins.
    """

    name: Literal[
        "grpo", "dr_grpo", "dapo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "gspo",
        "cispo", "sapo", "ppo",
    ] = "grpo"  # fmt: skip
    """The recipe whose values stand where this table has no key. The defaults below are GRPO's."""
    advantage: Text = "group"
    """Reward minus its group's mean (`group`), the mean of the group's others (`leave_one_out`), the reward of a
    greedy answer (`greedy`: one more sample a prompt) or nothing (`reward`); `gae`: from a critic, a second model;
    or your own `pkg.mod:fn` / `file.py:fn`, (prompts, samples) rewards to advantages."""
    advantage_scale: Literal["group", "batch", "whiten", "none"] = "group"
    """Divide advantages by the std of their group's rewards or of the whole step's; or give the step's response
    tokens zero mean and unit variance; or leave them."""
    loss: Text = "clip"
    """PPO's clipped surrogate; `reinforce`: not clipped; `cispo`: a clipped weight on the log-prob; `sapo`: a soft
    gate; or your own `pkg.mod:fn` / `file.py:fn`."""
    ratio: Literal["token", "sequence"] = "token"
    """New over old probability: of each token, or one for the answer, its tokens' geometric mean."""
    clip_low: NonNegative = 0.2
    """Ratios below 1 - clip_low are clipped."""
    clip_high: NonNegative = 0.2
    """Ratios above 1 + clip_high are clipped."""
    dual_clip: NonNegative = 0.0
    """Ceiling on the ratio where the advantage is negative, above 1 + clip_high; 0: none."""
    gate_positive: Positive = 1.0
    """SAPO: temperature of the gate where the advantage is positive; higher closes sooner."""
    gate_negative: Positive = 1.05
    """SAPO: likewise elsewhere."""
    loss_weighting: Literal["token", "sample", "prompt", "fixed"] = "token"
    """One denominator per update: response tokens; samples (mean of means); prompts (each the mean over its tokens);
    or samples x max_new_tokens."""
    entropy_coefficient: Finite = 0.0
    """Weight of the entropy in the loss: above 0 keeps the policy open."""
    mask_truncated: bool = False
    """Leave samples that hit max_new_tokens out of the loss and of its denominator."""
    overlong_share: Fraction = 0.0
    """Share of max_new_tokens (whole tokens, rounded down) over which an answer's reward falls linearly, to -1 more
    at the limit; 0: no such penalty."""
    dynamic_sampling_draws: PositiveInt = 1
    """Draws of prompts in a step, at most. Above 1, groups whose rewards are equal are replaced by new prompts until
    prompts_per_step are found; what is then missing is missing. 1: every group stays."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """GAE: discount per token."""
    gae_lambda: Fraction = 0.95
    """GAE: 1 trusts rewards alone, 0 the critic."""
    bootstrap_truncated: bool = False
    """GAE: V of the cut state stands for the missing rest, where the limit isn't part of the task."""
    value_clip: NonNegative = 0.2
    """GAE: limit on the critic's move per update; 0: none."""
    value_coefficient: Positive = 1.0
    """GAE: weight of the critic's loss."""

    @model_validator(mode="before")
    @classmethod
    def _with_recipe(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        name = data.get("name", cls.model_fields["name"].default)
        recipe = RECIPES.get(name) if isinstance(name, str) else None
        return {**recipe.sets, **data} if recipe else data

    @model_validator(mode="after")
    def _consistent(self) -> "Algorithm":
        _known("advantage", self.advantage, ADVANTAGES)
        _known("loss", self.loss, LOSSES)
        for key, (piece, choices) in _BELONGS_TO.items():
            default = type(self).model_fields[key].default
            value, chosen = getattr(self, key), getattr(self, piece)
            if value not in (default, RECIPES[self.name].sets.get(key)) and chosen not in choices and ":" not in chosen:
                raise ValueError(
                    f"{key} = {value!r} does nothing with {piece} = '{chosen}': drop it, or set {piece} to "
                    f"{_either(choices)}"
                )
        if self.needs_critic and self.advantage_scale not in ("whiten", "none"):
            raise ValueError(
                f"advantage_scale = '{self.advantage_scale}' is of groups, which advantage = 'gae' doesn't compare: "
                "use 'whiten' or 'none'"
            )
        if self.needs_critic and self.ratio == "sequence":
            raise ValueError(
                "ratio = 'sequence' needs one advantage for the whole answer, advantage = 'gae' has one for each "
                "token: use ratio = 'token'"
            )
        if self.dual_clip and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"dual_clip = {self.dual_clip:g} must be above 1 + clip_high = {1 + self.clip_high:g} (3 is usual), "
                "or 0 for none"
            )
        if self.dynamic_sampling_draws > 1 and not self.compares_samples and ":" not in self.advantage:
            raise ValueError(
                f"dynamic_sampling_draws = {self.dynamic_sampling_draws} replaces groups of equal rewards, which do "
                f"teach with advantage = '{self.advantage}': use 1, or advantage = 'group' or 'leave_one_out'"
            )
        return self

    @property
    def needs_critic(self) -> bool:
        """Whether a second model learns what answers are worth."""
        return self.advantage == "gae"

    @property
    def needs_greedy(self) -> bool:
        """Whether each prompt gets a greedy answer beside its samples, as their baseline."""
        return self.advantage == "greedy"

    @property
    def compares_samples(self) -> bool:
        """Whether a group's own samples are its baseline, so that one of equal rewards teaches nothing."""
        return self.advantage in ("group", "leave_one_out")


_GAE, _CLIPPING = ("advantage", ("gae",)), ("loss", ("clip", "cispo"))
_BELONGS_TO: dict[str, tuple[str, tuple[str, ...]]] = {
    "clip_low": _CLIPPING,
    "clip_high": _CLIPPING,
    "dual_clip": ("loss", ("clip",)),
    "gate_positive": ("loss", ("sapo",)),
    "gate_negative": ("loss", ("sapo",)),
    "gamma": _GAE,
    "gae_lambda": _GAE,
    "bootstrap_truncated": _GAE,
    "value_clip": _GAE,
    "value_coefficient": _GAE,
}
"""Keys that act with some choices of a piece only. A user's own loss may read any of its keys."""


@dataclass(frozen=True)
class Recipe:
    """A published algorithm as the keys in which it differs from the table's defaults."""

    title: str
    paper: str
    """arXiv id."""
    sets: Mapping[str, Any] = field(default_factory=dict)
    leash: Literal["loss", "reward", "none"] = "loss"
    """Where the paper has its KL to the reference; none: kl.coefficient is 0 unless the run file sets it."""


RECIPES: Mapping[str, Recipe] = {
    "grpo": Recipe("Group relative policy optimization", "2402.03300"),
    "dr_grpo": Recipe(
        "GRPO done right", "2503.20783", {"advantage_scale": "none", "loss_weighting": "fixed"}, leash="none"
    ),
    "dapo": Recipe(
        "Decoupled clip and dynamic sampling",
        "2503.14476",
        {"clip_high": 0.28, "overlong_share": 0.2, "dynamic_sampling_draws": 10},
        leash="none",
    ),
    "rloo": Recipe(
        "REINFORCE leave-one-out",
        "2402.14740",
        {"advantage": "leave_one_out", "advantage_scale": "none", "loss": "reinforce", "loss_weighting": "fixed"},
        leash="reward",
    ),
    "reinforce_plus_plus": Recipe(
        "REINFORCE++", "2501.03262", {"advantage": "reward", "advantage_scale": "whiten"}, leash="reward"
    ),
    "reinforce_plus_plus_baseline": Recipe(
        "REINFORCE++ with the group's mean as baseline", "2501.03262", {"advantage_scale": "whiten"}
    ),
    "remax": Recipe(
        "REINFORCE against the greedy answer",
        "2310.10505",
        {"advantage": "greedy", "advantage_scale": "none", "loss": "reinforce", "loss_weighting": "fixed"},
        leash="reward",
    ),
    "gspo": Recipe(
        "Group sequence policy optimization",
        "2507.18071",
        {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "loss_weighting": "sample"},
        leash="none",
    ),
    "cispo": Recipe(
        "Clipped importance-sampling weight",
        "2506.13585",
        {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
        leash="none",
    ),
    "sapo": Recipe(
        "Soft adaptive policy optimization", "2511.20347", {"loss": "sapo", "loss_weighting": "sample"}, leash="none"
    ),
    "ppo": Recipe(
        "Proximal policy optimization", "1707.06347", {"advantage": "gae", "advantage_scale": "whiten"}, leash="reward"
    ),
}


def fill_leash(data: dict[str, Any]) -> dict[str, Any]:
    """A run file's tables with `kl.coefficient = 0` where its recipe has no leash and [kl] names none."""
    algorithm, kl = data.get("algorithm"), data.get("kl", {})
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else None
    recipe = RECIPES.get(name) if isinstance(name, str) else None
    if recipe is None or recipe.leash != "none" or not isinstance(kl, Mapping):
        return data
    return {**data, "kl": {"coefficient": 0.0, **kl}}


def describe(algorithm: Algorithm) -> str:
    """The recipe in a line, and a line for each key that the run file sets otherwise."""
    recipe = RECIPES[algorithm.name]
    pieces = ("advantage", "advantage_scale", "loss", "ratio", "loss_weighting")
    lines = [
        f"algorithm: {algorithm.name} ({recipe.title}, arXiv {recipe.paper}): "
        + ", ".join(f"{piece} {getattr(algorithm, piece)}" for piece in pieces)
    ]
    pure = Algorithm(name=algorithm.name)
    for key in type(algorithm).model_fields:
        if getattr(algorithm, key) != getattr(pure, key):
            value, published = getattr(algorithm, key), getattr(pure, key)
            lines.append(f"  algorithm.{key} = {value!r} (the recipe: {published!r})")
    return "\n".join(lines)


def same_as_other(algorithm: Algorithm) -> str | None:
    """The recipe that the keys of `algorithm` make, where it isn't the one named."""
    keys = algorithm.model_dump(exclude={"name"})
    same = [name for name in RECIPES if Algorithm(name=name).model_dump(exclude={"name"}) == keys]
    return same[0] if same and algorithm.name not in same else None


def _known(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value in choices or ":" in value:
        return
    close = difflib.get_close_matches(value, choices, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    raise ValueError(f"{key} = '{value}' is not one of {', '.join(choices)}, nor a path `pkg.mod:fn`{hint}")


def _either(choices: tuple[str, ...]) -> str:
    return " or ".join(f"'{choice}'" for choice in choices)
