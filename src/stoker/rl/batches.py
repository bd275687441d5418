"""From scored groups to the rows of each update.

    rows = rows_from_groups(groups)               # who stays
    rows = with_scores(rows, old_values=...)      # what the engine says of them
    rows = with_advantages(rows, groups, ...)     # how good each token was
    for batch in updates(rows, ...):              # what each optimizer step sees, weights included

Every sample keeps its row from end to end, in the groups' order: one that leaves has an empty mask, so
nothing is ever reshaped back into groups.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.config import schema
from stoker.errors import RunError
from stoker.rl import ragged
from stoker.rl.advantages import Scale, gae, group_relative, reward_to_go, token_rewards, whiten
from stoker.rl.select import model_mask, reason_to_leave
from stoker.rl.types import Bools, Floats, Group, Objective, Sample, Scored, TrainBatch, TrainRow

__all__ = [
    "NO_PENALTY",
    "KlPenalty",
    "counted_tokens",
    "gae_advantages",
    "group_advantages",
    "mean_sequence_kl",
    "rows_from_groups",
    "skippable",
    "updates",
    "weigh",
    "with_advantages",
    "with_scores",
]

Weighting = Literal["token", "sample", "fixed"]


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
    """The rows with the advantages (and for PPO the returns) that the run file asks for."""
    if algorithm.name == "grpo":
        return group_advantages(rows, groups, algorithm.advantage_scale, penalty)
    rows = gae_advantages(rows, groups, gamma=algorithm.gamma, lam=algorithm.gae_lambda, penalty=penalty)
    return _whitened(rows) if algorithm.whiten_advantages else rows


def group_advantages(
    rows: Sequence[TrainRow], groups: Sequence[Group], scale: Scale = "group", penalty: KlPenalty = NO_PENALTY
) -> list[TrainRow]:
    """Every token gets its sample's group-relative reward.

    A sequence-level penalty is part of that reward. A token-level one is charged to the tokens that could
    still avoid it, as reward-to-go, and not scaled by the group's std: like the KL as a loss.
    """
    by_sequence = penalty.coefficient if penalty.level == "sequence" else 0.0
    by_token = penalty.coefficient if penalty.level == "token" else 0.0

    counted = counted_tokens(rows).tolist()
    charges = (by_sequence * _sequence_kls(rows)).tolist() if by_sequence else [0.0] * len(rows)

    def reward(row: TrainRow, scored: Scored, tokens: int, charge: float) -> float | None:
        if not tokens:
            return None
        if scored.reward is None:
            raise RunError(f"sample {row.sample_id} stays without a reward: bootstrap_truncated needs a critic (ppo)")
        return scored.reward - charge

    def to_go(row: TrainRow) -> NDArray[Any]:
        return reward_to_go(token_rewards(0.0, _log_ratio(row), row.mask, kl_coefficient=by_token), row.mask)

    of_row = iter(zip(counted, charges, strict=True))
    by_group = group_relative(
        [[reward(*pair, *next(of_row)) for pair in group] for group in _paired(rows, groups)], scale
    )
    advantages = np.repeat(ragged.joined(by_group, np.float64), ragged.lengths([row.mask for row in rows]))
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


def updates(
    rows: Sequence[TrainRow],
    *,
    samples_per_update: int,
    epochs: int,
    weighting: Weighting,
    max_new_tokens: int,
    seed: int,
    step: int,
) -> Iterator[TrainBatch]:
    """What each optimizer step of a rollout sees. samples_per_update = 0: all of it.

    The first pass goes through the prompts as they came, later ones in an order drawn from (seed, step,
    epoch). Groups move as wholes, so an update splits one only where samples_per_update makes it.
    """
    size = samples_per_update or max(len(rows), 1)
    for epoch in range(epochs):
        ordered = list(rows) if epoch == 0 else _shuffled(rows, seed, step, epoch)
        for start in range(0, len(ordered), size):
            yield TrainBatch(tuple(weigh(ordered[start : start + size], weighting, max_new_tokens)))


def weigh(rows: Sequence[TrainRow], weighting: Weighting, max_new_tokens: int) -> list[TrainRow]:
    """The rows of one update with the loss weights that share its one denominator.

    token: all counted tokens. sample: samples x own tokens (a mean of means). fixed: samples x
    max_new_tokens (Liu et al. 2025, arXiv 2503.20783). Rows without an advantage count; rows that left don't.
    """
    tokens = counted_tokens(rows)
    samples = max(int((tokens > 0).sum()), 1)
    denominators = {
        "token": np.full(len(rows), max(int(tokens.sum()), 1)),
        "sample": samples * np.maximum(tokens, 1),
        "fixed": np.full(len(rows), samples * max_new_tokens),
    }[weighting]
    lengths = ragged.lengths([row.mask for row in rows])
    masks = ragged.joined([row.mask for row in rows], np.bool_)
    weights: Floats = np.divide(masks, np.repeat(denominators.astype(np.float32), lengths), dtype=np.float32)
    return [replace(row, weights=own) for row, own in zip(rows, ragged.split(weights, lengths), strict=True)]


def skippable(row: TrainRow, objective: Objective) -> bool:
    """True where no gradient can come from the row, so that its forward may be saved."""
    if not row.mask.any():
        return True
    leashed = objective.kl_coefficient != 0 or objective.entropy_coefficient != 0
    return objective.loss == "policy" and not leashed and not row.advantages[row.mask].any()


def _paired(rows: Sequence[TrainRow], groups: Sequence[Group]) -> list[list[tuple[TrainRow, Scored]]]:
    """Each group's rows beside its samples, by name: a dropped or moved row is an error, not a shift."""
    wanted = [scored.sample.id for group in groups for scored in group.scored]
    if wanted != [row.sample_id for row in rows]:
        raise RunError("rows and groups differ in samples: pass all rows of rows_from_groups(groups), in their order")
    rest = iter(rows)
    return [[(next(rest), scored) for scored in group.scored] for group in groups]


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


def _shuffled(rows: Sequence[TrainRow], seed: int, step: int, epoch: int) -> list[TrainRow]:
    groups = [list(members) for _, members in groupby(rows, key=lambda row: row.sample_id.rpartition("/")[0])]
    order = np.random.default_rng([seed % 2**64, step, epoch]).permutation(len(groups))
    return [row for index in order for row in groups[index]]
