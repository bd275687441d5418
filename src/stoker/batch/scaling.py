"""What to set when the batch of an optimizer step changes: learning rate, betas, eps, weight decay. No torch here.

Batches count the examples of one update, over all micro-batches and ranks.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from stoker.errors import ConfigError

__all__ = [
    "Kind",
    "Moments",
    "Rescaled",
    "Rule",
    "Setting",
    "adascale_gain",
    "decay_per_example",
    "half_life_betas",
    "malladi_betas",
    "rate_factor",
    "rescale",
    "saturating_rate",
]

Kind = Literal["sgd", "adam", "adamw", "muon"]
"""Of the update rule. "adam": weight decay, if any, is added to the gradient; "adamw": it is decoupled."""
Rule = Literal["linear", "sqrt", "saturating", "adascale", "keep"]
"""Of the learning rate."""
Moments = Literal["half-life", "malladi", "keep"]
"""Of Adam's betas and eps."""

RULES: dict[Kind, Rule] = {"sgd": "linear", "adam": "sqrt", "adamw": "sqrt", "muon": "keep"}
OVERSHOOT = 1.1
"""Linear rates this far above the saturating form's are warned of."""
FAR = 8
"""Growth from which a linear rate without a measured noise scale is more hope than rule."""


def saturating_rate(limit: float, examples: float, noise_scale: float) -> float:
    """SGD's best rate at a batch: limit / (1 + noise_scale / examples) (McCandlish et al. 2018, equation 2.6).

    `limit`: the best rate without noise. Linear far below the noise scale (in examples), constant far above.
    """
    return limit / (1 + noise_scale / examples)


def adascale_gain(variance: float, squared_norm: float, before: float, now: float) -> float:
    """Steps at `before` examples that one step at `now` is worth (Johnson et al. 2020, AdaScale SGD): from 1 to their
    ratio. The rate takes it as a factor, and the schedule advances by as many of the old steps.

    `variance`: the trace of the covariance of one example's gradient, `squared_norm`: of the true gradient; both
    smoothed over steps first, never clamped. Estimates may be negative: a variance without sign of noise gives 1, a
    gradient that is lost in noise gives the full ratio. ConfigError for a batch that shrinks, or what isn't finite.
    """
    if not (math.isfinite(variance) and math.isfinite(squared_norm)):
        raise ConfigError(f"AdaScale: variance {variance} and squared norm {squared_norm} must be finite")
    if not 0 < before <= now:
        raise ConfigError(
            f"AdaScale is for batches that grow, not from {before:g} to {now:g} examples: use another rule"
        )
    if variance <= 0:
        return 1.0
    if squared_norm <= 0:
        return now / before
    gain = (variance / before + squared_norm) / (variance / now + squared_norm)
    return min(max(gain, 1.0), now / before)


def half_life_betas(betas: tuple[float, float], kappa: float) -> tuple[float, float]:
    """Betas that forget as many examples ago when a step holds kappa times as many: beta^kappa."""
    return betas[0] ** kappa, betas[1] ** kappa


def malladi_betas(betas: tuple[float, float], kappa: float) -> tuple[float, float]:
    """1 - beta becomes kappa (1 - beta) (Malladi et al. 2022, square root scaling rule).

    ConfigError beyond kappa = 1 / (1 - beta) of either, from where a beta would be negative.
    """
    least = min(betas)
    if kappa * (1 - least) > 1 + 1e-12:
        raise ConfigError(
            f"1 - beta x {kappa:g} holds up to 1 / (1 - {least:g}) = {1 / (1 - least):.4g} times the batch, beyond "
            "which a beta would be negative: take moments = 'half-life', or grow the batch in smaller steps"
        )
    first, second = (max(0.0, 1 - kappa * (1 - beta)) for beta in betas)
    return first, second


def decay_per_example(weight_decay: float, kappa: float, factor: float) -> float:
    """Weight decay that shrinks weights equally per example, where a step shrinks them by rate x weight decay: the step
    holds kappa times the examples at `factor` times the rate.
    """
    return weight_decay * kappa / factor


def rate_factor(rule: Literal["linear", "sqrt"], kappa: float) -> float:
    """Of the learning rate: kappa (SGD, Goyal et al. 2017) or its root (Adam and its kin, Malladi et al. 2022)."""
    return kappa if rule == "linear" else math.sqrt(kappa)


@dataclass(frozen=True)
class Setting:
    """One number of the optimizer, for the old batch and for the new one."""

    name: str
    before: float
    now: float
    why: str


@dataclass(frozen=True)
class Rescaled:
    """What an optimizer should be set to for another batch. None: not given, so not said."""

    kind: Kind
    before: int
    """Examples per update so far."""
    now: int
    rule: Rule
    moments: Moments
    learning_rate: float
    betas: tuple[float, float] | None
    eps: float | None
    weight_decay: float | None
    settings: tuple[Setting, ...]
    warnings: tuple[str, ...]

    @property
    def kappa(self) -> float:
        """The new batch over the old."""
        return self.now / self.before

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, texts and lists."""
        made = asdict(self) | {"kappa": self.kappa}
        return made | {
            "settings": [asdict(each) for each in self.settings],
            "warnings": list(self.warnings),
            "betas": self.betas and list(self.betas),
        }

    def __str__(self) -> str:
        head = (
            f"{self.kind}: {self.before:,} -> {self.now:,} examples per update (x {self.kappa:.4g}), rule {self.rule}"
        )
        rows = [("", "before", "now", "from")]
        rows += [(each.name, f"{each.before:.6g}", f"{each.now:.6g}", each.why) for each in self.settings]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([head, *lines, *(f"warning: {text}" for text in self.warnings)])


def rescale(
    kind: Kind,
    before: int,
    now: int,
    *,
    learning_rate: float,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    rule: Rule | None = None,
    moments: Moments = "half-life",
    noise_scale: float | None = None,
    gain: float | None = None,
) -> Rescaled:
    """What to set where an update holds `now` examples instead of the `before` that the numbers given are right for.

    `rule`: None takes linear for SGD, the square root for Adam and AdamW, and leaves Muon's rate alone, for which there
    is no settled rule. "saturating" needs the `noise_scale` (examples; the others warn by it where it is given),
    "adascale" the `gain` of `adascale_gain`. `moments`: how Adam's betas follow; eps follows by 1 / sqrt(kappa) as the
    noise in the gradient does. ConfigError for what can't be: no examples, another kind, Malladi's rule out of range.
    """
    _check(kind, before, now, rule, moments, learning_rate)
    taken = rule or RULES[kind]
    factor, why = _factor(taken, before, now, noise_scale, gain)
    kappa = now / before
    adam = kind in ("adam", "adamw")
    made = [Setting("learning rate", learning_rate, learning_rate * factor, why)]
    if not adam or moments == "keep":
        new_betas, new_eps = betas, eps
    else:
        new_betas = betas and (half_life_betas if moments == "half-life" else malladi_betas)(betas, kappa)
        new_eps = eps if eps is None else eps / math.sqrt(kappa)
    if adam and betas and new_betas:
        how = {"half-life": "beta^{:.4g}: equal half-life in examples", "malladi": "1 - {:.4g} (1 - beta)"}
        text = how.get(moments, "kept").format(kappa)
        made += [Setting(f"beta {place + 1}", betas[place], new_betas[place], text) for place in range(2)]
    if adam and eps is not None and new_eps is not None:
        made.append(Setting("eps", eps, new_eps, "kept" if moments == "keep" else f"/ sqrt({kappa:.4g})"))
    new_decay = weight_decay
    if weight_decay is not None:
        # Adam divides a decay in the gradient by the gradient's own size; for Muon no rate is known to hold it against.
        follows = kind in ("sgd", "adamw")
        new_decay = decay_per_example(weight_decay, kappa, factor) if follows else weight_decay
        text = f"x {kappa:.4g} / {factor:.4g}: equal decay per example" if follows else "kept"
        made.append(Setting("weight decay", weight_decay, new_decay, text))
    warnings = _warnings(kind, taken, before, now, noise_scale, weight_decay)
    return Rescaled(
        kind, before, now, taken, moments, made[0].now, new_betas, new_eps, new_decay, tuple(made), tuple(warnings)
    )


def _check(kind: str, before: int, now: int, rule: str | None, moments: str, learning_rate: float) -> None:
    for name, value, known in (("kind", kind, Kind), ("rule", rule, Rule), ("moments", moments, Moments)):
        if value is not None and value not in get_args(known):
            raise ConfigError(f"{name} = {value!r}: one of {', '.join(get_args(known))}")
    for name, examples in (("before", before), ("now", now)):
        if examples < 1:
            raise ConfigError(f"{name} = {examples} examples per update: at least 1")
    if not (math.isfinite(learning_rate) and learning_rate >= 0):
        raise ConfigError(f"learning_rate = {learning_rate}: a finite number, 0 or more")


def _factor(rule: Rule, before: int, now: int, noise_scale: float | None, gain: float | None) -> tuple[float, str]:
    kappa = now / before
    if rule == "keep":
        return 1.0, "kept"
    if rule == "linear":
        return rate_factor("linear", kappa), f"x {kappa:.4g}"
    if rule == "sqrt":
        return rate_factor("sqrt", kappa), f"x sqrt({kappa:.4g})"
    if rule == "saturating":
        if noise_scale is None or not (math.isfinite(noise_scale) and noise_scale >= 0):
            raise ConfigError("rule = 'saturating' needs the noise_scale in examples: measure it, or take 'linear'")
        factor = saturating_rate(1, now, noise_scale) / saturating_rate(1, before, noise_scale)
        return factor, f"x {factor:.4g}: limit / (1 + {noise_scale:.4g} / examples)"
    if gain is None or not min(1.0, kappa) <= gain <= max(1.0, kappa):
        raise ConfigError(
            f"rule = 'adascale' needs the gain of a step, 1 to {kappa:.4g}, not {gain}: adascale_gain gives it"
        )
    return gain, f"x {gain:.4g}: AdaScale's gain"


def _warnings(
    kind: Kind, rule: Rule, before: int, now: int, noise_scale: float | None, weight_decay: float | None
) -> list[str]:
    told = []
    kappa = now / before
    if kind == "muon":
        told.append(
            "no rule for Muon's learning rate is settled: "
            + ("it is left as it was; " if rule == "keep" else f"{rule} is a guess; ")
            + "try a few rates around it at the new batch"
        )
    if kind == "adam" and weight_decay:
        told.append("Adam normalises a weight decay that is in the gradient, so it can't follow: use AdamW")
    if rule == "linear" and noise_scale is not None:
        over = kappa * saturating_rate(1, before, noise_scale) / saturating_rate(1, now, noise_scale)
        if over > OVERSHOOT:
            told.append(
                f"the linear rate is {over:.3g} times what a noise scale of {noise_scale:,.4g} examples supports, and "
                "may diverge: take rule = 'saturating'"
            )
    elif rule == "linear" and kappa > FAR:
        told.append(
            f"the linear rule holds far below the noise scale, which isn't given, and {kappa:.4g} times the batch is "
            "far: a rate that is too high diverges. Measure the noise scale, or take rule = 'sqrt' with a warm-up"
        )
    if kind in ("adam", "adamw") and noise_scale is not None and now > noise_scale and kappa > 1 and rule != "keep":
        told.append(
            f"{now:,} examples are beyond the noise scale of {noise_scale:,.4g}, where Adam's best learning rate falls "
            "again (Li et al. 2024): try lower ones as well"
        )
    return told
