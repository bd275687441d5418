"""From scored groups to rows with advantages.

    rows = rows_from_groups(groups)               # who stays
    rows = with_scores(rows, old_values=...)      # what the engine says of them
    rows = with_advantages(rows, groups, ...)     # how good each token was

Every sample keeps its row from end to end, in the groups' order: one that leaves has an empty mask, so
nothing is ever reshaped back into groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.config import schema
from stoker.errors import RunError
from stoker.rl import ragged
from stoker.rl.advantages import Scale, gae, reward_to_go, sample_advantages, token_rewards, whiten
from stoker.rl.select import model_mask, reason_to_leave
from stoker.rl.types import Bools, Floats, Group, Sample, Scored, TrainRow

__all__ = [
    "NO_PENALTY",
    "KlPenalty",
    "counted_tokens",
    "gae_advantages",
    "group_advantages",
    "mean_sequence_kl",
    "rows_from_groups",
    "with_advantages",
    "with_scores",
]


@dataclass(frozen=True)
class KlPenalty:
    """The KL to the reference (k1, nats) as part of the reward."""

    coefficient: float = 0.0
    level: Literal["token", "sequence"] = "token"


NO_PENALTY = KlPenalty()


def rows_from_groups(
    groups: Sequence[Group], *, mask_truncated: bool = False, bootstrap_truncated: bool = False
) -> list[TrainRow]:
    """One row per sample, in order; no advantages and no weights yet. A sample that leaves has an empty mask."""
    scored = [one for group in groups for one in group.scored]
    leave = [
        reason_to_leave(one, mask_truncated=mask_truncated, bootstrap_truncated=bootstrap_truncated) is not None
        for one in scored
    ]
    lengths = ragged.lengths([one.sample.token_ids for one in scored])
    written = ragged.joined([model_mask(one.sample) for one in scored], np.bool_)
    masks = written & ~np.repeat(np.array(leave, dtype=np.bool_), lengths)
    nothing = np.zeros(len(masks), dtype=np.float32)

    def row(sample: Sample, mask: Bools, nothing: Floats) -> TrainRow:
        return TrainRow(
            sample_id=sample.id,
            prompt_ids=sample.prompt.token_ids,
            token_ids=sample.token_ids,
            mask=mask,
            weights=nothing,
            advantages=nothing,
            sampler_logprobs=sample.logprobs,
            temperature=sample.params.temperature,
            kept=sample.kept,
        )

    samples = (one.sample for one in scored)
    return [
        row(*one) for one in zip(samples, ragged.split(masks, lengths), ragged.split(nothing, lengths), strict=True)
    ]


def with_scores(
    rows: Sequence[TrainRow],
    *,
    old_logprobs: Sequence[Floats] | None = None,
    reference_logprobs: Sequence[Floats] | None = None,
    old_values: Sequence[Floats] | None = None,
) -> list[TrainRow]:
    """The rows with what `Learner.score` said of them, in the same order; None leaves a field as it is."""
    given = {"old_logprobs": old_logprobs, "reference_logprobs": reference_logprobs, "old_values": old_values}
    present = {name: scores for name, scores in given.items() if scores is not None}
    by_row = zip(*present.values(), strict=True) if present else [()] * len(rows)
    return [replace(row, **dict(zip(present, scores, strict=True))) for row, scores in zip(rows, by_row, strict=True)]


def with_advantages(
    rows: Sequence[TrainRow], groups: Sequence[Group], algorithm: schema.Algorithm, penalty: KlPenalty = NO_PENALTY
) -> list[TrainRow]:
    """The rows with the advantages (and with a critic the returns) that the run file asks for."""
    if algorithm.needs_critic:
        rows = gae_advantages(rows, groups, gamma=algorithm.gamma, lam=algorithm.gae_lambda, penalty=penalty)
    else:
        rows = group_advantages(rows, groups, algorithm.advantage, algorithm.advantage_scale, penalty)
    return _whitened(rows) if algorithm.advantage_scale == "whiten" else list(rows)


def group_advantages(
    rows: Sequence[TrainRow],
    groups: Sequence[Group],
    estimator: str = "group",
    scale: Scale = "group",
    penalty: KlPenalty = NO_PENALTY,
) -> list[TrainRow]:
    """Every token gets its sample's advantage.

    A sequence-level penalty is part of the sample's reward. A token-level one is charged to the tokens that
    could still avoid it, as reward-to-go, and not scaled by the group's std: like the KL as a loss.
    """
    by_sequence = penalty.coefficient if penalty.level == "sequence" else 0.0
    by_token = penalty.coefficient if penalty.level == "token" else 0.0

    counted = counted_tokens(rows).tolist()
    charges = (by_sequence * _sequence_kls(rows)).tolist() if by_sequence else [0.0] * len(rows)

    def reward(row: TrainRow, scored: Scored, tokens: int, charge: float) -> float:
        if not tokens:
            return np.nan
        if scored.reward is None:
            raise RunError(f"sample {row.sample_id} stays without a reward: bootstrap_truncated needs a critic (ppo)")
        return scored.reward - charge

    def to_go(row: TrainRow) -> NDArray[Any]:
        return reward_to_go(token_rewards(0.0, _log_ratio(row), row.mask, kl_coefficient=by_token), row.mask)

    of_row = iter(zip(counted, charges, strict=True))
    paired = _paired(rows, groups)
    rewards = np.full((len(groups), max((len(pairs) for pairs in paired), default=0)), np.nan)
    for line, pairs in zip(rewards, paired, strict=True):
        line[: len(pairs)] = [reward(*pair, *next(of_row)) for pair in pairs]
    by_group = sample_advantages(rewards, _greedy_rewards(groups), name=estimator, scale=scale)
    of_samples = [line[: len(pairs)] for line, pairs in zip(by_group, paired, strict=True)]
    advantages = np.repeat(ragged.joined(of_samples, np.float64), ragged.lengths([row.mask for row in rows]))
    if by_token:
        advantages += ragged.joined([to_go(row) for row in rows], np.float64)
    return _advantaged(rows, advantages)


def gae_advantages(
    rows: Sequence[TrainRow], groups: Sequence[Group], *, gamma: float, lam: float, penalty: KlPenalty = NO_PENALTY
) -> list[TrainRow]:
    """Per-token advantages and returns from the critic's values, which the rows must carry.

    A row that stays without a reward was cut off (`bootstrap_truncated`): the value before its last token,
    the nearest that the critic has seen, stands for the rest. A cut row with a reward keeps it instead, or
    a penalty for length would vanish.
    """
    advantages, returns = [], []
    for row, scored in chain(*_paired(rows, groups)):
        if row.old_values is None:
            raise RunError(f"sample {row.sample_id} has no critic values: score the rows with role 'critic' first")
        goes_on = scored.reward is None and row.mask.any()
        rewards = token_rewards(
            0.0 if scored.reward is None else scored.reward,
            _log_ratio(row) if penalty.coefficient else np.zeros(row.mask.shape),
            row.mask,
            kl_coefficient=penalty.coefficient,
            level=penalty.level,
        )
        rest = row.old_values[row.mask][-1] if goes_on else 0.0
        found = gae(rewards, row.old_values, row.mask, gamma=gamma, lam=lam, final_values=rest)
        advantages.append(found[0])
        returns.append(found[1].astype(np.float32))
    rows = _advantaged(rows, ragged.joined(advantages, np.float64))
    return [replace(row, returns=target) for row, target in zip(rows, returns, strict=True)]


def mean_sequence_kl(rows: Sequence[TrainRow]) -> float | None:
    """KL to the reference in nats per sequence: summed over tokens, averaged over the samples that stay."""
    stay = counted_tokens(rows) > 0
    if not stay.any():
        return None
    staying = [row for row, stays in zip(rows, stay, strict=True) if stays]
    return float(sum(_sequence_kls(staying).tolist())) / len(staying)


def counted_tokens(rows: Sequence[TrainRow]) -> NDArray[np.int64]:
    """(R,) tokens of each row's mask; 0: the sample left the step."""
    masks = ragged.joined([row.mask for row in rows], np.bool_)
    return ragged.sums(masks, ragged.lengths([row.mask for row in rows])).astype(np.int64)


def _paired(rows: Sequence[TrainRow], groups: Sequence[Group]) -> list[list[tuple[TrainRow, Scored]]]:
    """Each group's rows beside its samples, by name: a dropped or moved row is an error, not a shift."""
    wanted = [scored.sample.id for group in groups for scored in group.scored]
    if wanted != [row.sample_id for row in rows]:
        raise RunError("rows and groups differ in samples: pass all rows of rows_from_groups(groups), in their order")
    rest = iter(rows)
    return [[(next(rest), scored) for scored in group.scored] for group in groups]


def _greedy_rewards(groups: Sequence[Group]) -> NDArray[Any] | None:
    """(G,) of the greedy answers, NaN where one got none; None where none were drawn."""
    if any(group.greedy is None for group in groups):
        return None
    rewards = [group.greedy.reward for group in groups if group.greedy is not None]
    return np.array([np.nan if reward is None else reward for reward in rewards])


def _log_ratio(row: TrainRow) -> Floats:
    """(T,) log-prob under the policy that sampled minus under the reference."""
    if row.reference_logprobs is None:
        raise RunError(f"sample {row.sample_id} has no reference log-probs: score the rows with role 'reference' first")
    return (row.sampler_logprobs if row.old_logprobs is None else row.old_logprobs) - row.reference_logprobs


def _sequence_kls(rows: Sequence[TrainRow]) -> NDArray[np.float64]:
    """(R,) log-ratio of each row summed over its counted tokens, nats."""
    masks = ragged.joined([row.mask for row in rows], np.bool_)
    ratios = ragged.joined([_log_ratio(row) for row in rows], np.float32)
    return ragged.sums(ratios[masks], counted_tokens(rows))


def _advantaged(rows: Sequence[TrainRow], advantages: NDArray[Any]) -> list[TrainRow]:
    """The rows with these advantages, given end to end; 0 outside the masks."""
    masks = ragged.joined([row.mask for row in rows], np.bool_)
    parts = ragged.split(
        np.where(masks, advantages, 0.0).astype(np.float32), ragged.lengths([row.mask for row in rows])
    )
    return [replace(row, advantages=part) for row, part in zip(rows, parts, strict=True)]


def _whitened(rows: Sequence[TrainRow]) -> list[TrainRow]:
    """Advantages with zero mean and unit variance over the step's counted tokens."""
    masks = ragged.joined([row.mask for row in rows], np.bool_)
    return _advantaged(rows, whiten(ragged.joined([row.advantages for row in rows], np.float32), masks))
