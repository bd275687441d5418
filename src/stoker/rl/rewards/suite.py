"""All rewards of a run as one: the weighted sum over those that answered, and what became of the rest."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stoker.config import schema
from stoker.dotted import nearest
from stoker.errors import ConfigError, RewardError
from stoker.rl.rewards import audit
from stoker.rl.rewards.answers import DEFAULT_FORMS, FORMS
from stoker.rl.rewards.numeric import RELATIVE_TOLERANCE
from stoker.rl.rewards.outcome import Answered, Outcome, Score
from stoker.rl.rewards.rules import Exact, Math, Scores
from stoker.rl.rewards.user import User
from stoker.rl.rewards.workers import Workers
from stoker.rl.types import Prompt, Sample, Scored

__all__ = ["RewardSuite", "build"]


@dataclass(frozen=True)
class _Part:
    """One reward of the suite."""

    name: str
    config: schema.Reward
    score: Score


class _Judged(NamedTuple):
    scored: list[Scored]
    answers: dict[str, Answered]


@dataclass
class RewardSuite:
    """Scores samples. Holds child processes where user functions or symbolic maths need them: close it."""

    parts: tuple[_Part, ...]
    _outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    _logged: dict[str, list[float]] = field(default_factory=dict)
    _extras: list[dict[str, Any]] = field(default_factory=list)

    def begin(self, samples: Sequence[Sample], step: int) -> None:
        """All samples of one prompt have ended: rewards with workers start on them, for the call that brings them."""
        for part in self.parts:
            if isinstance(part.score, Workers):
                part.score.begin(samples, step)

    def __call__(self, samples: Sequence[Sample], step: int) -> list[Scored]:
        """One Scored a sample, same order. Raises RewardError where a function fails beyond what its config allows."""
        judged = self._judge(samples, step)
        for name, answered in judged.answers.items():
            self._outcomes.setdefault(name, []).extend(answered.outcomes)
            for metric, values in answered.metrics.items():
                self._logged.setdefault(f"reward/{name}/{metric}", []).extend(values)
        for i, sample in enumerate(samples):
            extra = {
                f"{name}/{column}": value
                for name, answered in judged.answers.items()
                for column, value in answered.outcomes[i].extra.items()
            }
            if extra:
                self._extras.append({"id": sample.id, **extra})
        return judged.scored

    def _judge(self, samples: Sequence[Sample], step: int) -> _Judged:
        answers = {}
        for part in self.parts:
            answered = part.score(samples, step)
            _check_errors(part, samples, answered.outcomes, step)
            answers[part.name] = answered
        by_sample = [{name: a.outcomes[i] for name, a in answers.items()} for i in range(len(samples))]
        return _Judged([self._scored(s, o) for s, o in zip(samples, by_sample, strict=True)], answers)

    def _scored(self, sample: Sample, outcomes: Mapping[str, Outcome]) -> Scored:
        values = [(p.config.weight, outcomes[p.name].value) for p in self.parts]
        answered = [weight * value for weight, value in values if value is not None]
        verdicts = [outcomes[p.name].kind for p in self.parts if p.score.rule]
        spoke = [kind for kind in verdicts if kind in ("correct", "wrong", "unparsed", "truncated")]
        return Scored(
            sample=sample,
            rewards={name: outcome.value for name, outcome in outcomes.items()},
            reward=math.fsum(answered) if answered else None,
            parsed=all(kind in ("correct", "wrong") for kind in spoke) if spoke else None,
        )

    def solved(self, scored: Scored) -> bool:
        """Is the answer right: did the first reward that answered give the best it can?"""
        for part in self.parts:
            value = scored.rewards[part.name]
            if value is not None:
                return value >= part.score.range[1]
        return False

    def audit(self, prompts: Sequence[Prompt], rows: int = 8, taught: bool = False) -> list[audit.AuditLine]:
        """Score known right, wrong, unparsable and gamed answers of the first `rows` prompts that have a reference.

        `taught`: a warm start teaches the references as they are.
        """
        return audit.run(lambda samples: [s.reward for s in self._judge(samples, 0).scored], prompts, rows, taught)

    def metrics(self) -> dict[str, float]:
        """Since the last call, per reward: mean and population std of the answered, and shares of all samples."""
        found: dict[str, float] = {}
        for part in self.parts:
            outcomes = self._outcomes.get(part.name, [])
            if outcomes:
                found.update({f"reward/{part.name}/{k}": v for k, v in _summary(outcomes, part.score.rule).items()})
        found.update({name: math.fsum(values) / len(values) for name, values in self._logged.items() if values})
        self._outcomes, self._logged = {}, {}
        return found

    def extras(self) -> list[dict[str, Any]]:
        """Since the last call, per sample with any: {"id", "<reward>/<column>": value}, for the samples record."""
        extras, self._extras = self._extras, []
        return extras

    def close(self) -> None:
        for part in self.parts:
            part.score.close()


def _summary(outcomes: Sequence[Outcome], rule: bool) -> dict[str, float]:
    values = [o.value for o in outcomes if o.value is not None]
    total = len(outcomes)

    def share(*kinds: str) -> float:
        return sum(o.kind in kinds for o in outcomes) / total

    abstained = sum(o.value is None for o in outcomes) / total
    found = {"abstained": abstained, "errors": share("error"), "timeouts": share("timeout")}
    if values:
        mean = math.fsum(values) / len(values)
        found |= {"mean": mean, "std": math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))}
    if rule:
        found |= {kind: share(kind) for kind in ("correct", "wrong", "unparsed", "truncated")}
    return found


def _check_errors(part: _Part, samples: Sequence[Sample], outcomes: Sequence[Outcome], step: int) -> None:
    failed = [(s.id, o.detail) for s, o in zip(samples, outcomes, strict=True) if o.kind == "error"]
    if failed and len(failed) / len(samples) > part.config.max_error_rate:
        ids = ", ".join(sample_id for sample_id, _ in failed[:10]) + (", ..." if len(failed) > 10 else "")
        raise RewardError(
            f"reward '{part.name}' ({part.config.function}) raised on {len(failed)} of {len(samples)} samples of step "
            f"{step}, more than max_error_rate = {part.config.max_error_rate:g} allows: {ids}\n"
            f"sample {failed[0][0]}:\n{failed[0][1]}"
        )


_SCORES = ("correct", "wrong", "unparsed")


def _options(config: schema.Reward, known: Sequence[str]) -> dict[str, Any]:
    for name in config.kwargs:
        if name not in known:
            raise ConfigError(f"rewards: '{config.function}' takes no kwargs.{name}{nearest(name, list(known))}")
    return config.kwargs


def _number(name: str, value: Any, least: float = -math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < least:
        raise ConfigError(f"rewards: kwargs.{name} = {value!r} is not a finite number of at least {least:g}")
    return float(value)


def _scores(options: Mapping[str, Any]) -> Scores:
    return Scores(**{name: _number(name, options[name]) for name in _SCORES if name in options})


def _forms(chosen: Any) -> tuple[str, ...]:
    if isinstance(chosen, str) or not chosen:
        raise ConfigError(f"rewards: kwargs.forms = {chosen!r} is not a list of answer forms ({', '.join(FORMS)})")
    for form in chosen:
        if form not in FORMS:
            raise ConfigError(f"rewards: kwargs.forms has no form '{form}'{nearest(str(form), list(FORMS))}")
    return tuple(chosen)


def _score(config: schema.Reward, name: str) -> Score:
    if config.function == "exact":
        if config.workers:
            raise ConfigError(f"rewards: '{name}' only compares texts, which no process speeds up: leave workers out")
        return Exact(name, _scores(_options(config, _SCORES)))
    if config.workers:
        return Workers(lambda: _own_process(config, name), config.workers)
    return _own_process(config, name)


def _own_process(config: schema.Reward, name: str) -> Math | User:
    if config.function == "math":
        options = _options(config, (*_SCORES, "forms", "tolerance"))
        return Math(
            name,
            _scores(options),
            _forms(options.get("forms", DEFAULT_FORMS)),
            _number("tolerance", options.get("tolerance", RELATIVE_TOLERANCE), 0.0),
            config.timeout_s,
            config.on_timeout,
        )
    return User(config, name)


def _check_range(config: schema.Reward, name: str, score: Score) -> None:
    low, high = config.range or score.range
    if low >= high:
        raise ConfigError(f"rewards: '{name}' has range [{low:g}, {high:g}]; the first must be below the second")
    declared = (("a score", score.range[0]), ("a score", score.range[1]), ("on_timeout", config.on_timeout))
    for what, value in declared:
        if value is not None and not low <= value <= high:
            raise ConfigError(f"rewards: '{name}': {what} of {value:g} is outside its range [{low:g}, {high:g}]")


def build(rewards: Sequence[schema.Reward]) -> RewardSuite:
    """The suite of a run file's rewards. User functions are loaded now. Raises ConfigError, RewardError."""
    parts: list[_Part] = []
    try:
        for config in rewards:
            name = config.name or config.function.rpartition(":")[2]
            if name in {part.name for part in parts}:
                raise ConfigError(f"rewards: two are called '{name}'; give each its own name")
            parts.append(_Part(name, config, _score(config, name)))
            _check_range(config, name, parts[-1].score)
    except BaseException:
        RewardSuite(tuple(parts)).close()  # children of those that did load
        raise
    return RewardSuite(tuple(parts))
