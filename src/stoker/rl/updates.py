"""From a step's rows to what each of its optimizer steps sees, loss weights included."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal

import numpy as np

from stoker.config.algorithm import LOSSES as BUILT_IN_LOSSES
from stoker.rl import ragged
from stoker.rl.batches import counted_tokens
from stoker.rl.types import Objective, TrainBatch, TrainRow

__all__ = ["Weighting", "skippable", "updates", "weigh"]

Weighting = Literal["token", "sample", "prompt", "fixed"]


def updates(
    rows: Sequence[TrainRow],
    *,
    samples_per_update: int,
    epochs: int,
    weighting: Weighting,
    max_new_tokens: int,
    seed: int,
    step: int,
    measure: int | None = None,
) -> Iterator[TrainBatch]:
    """What each optimizer step of a rollout sees. samples_per_update = 0: all of it.

    The first pass goes through the prompts as they came, later ones in an order drawn from (seed, step,
    epoch). Groups move as wholes, so an update splits one only where samples_per_update makes it. The first update
    alone is of the policy that sampled: the gradient's noise is measured there (`measure`, see `TrainBatch`).
    """
    size = samples_per_update or max(len(rows), 1)
    for epoch in range(epochs):
        ordered = list(rows) if epoch == 0 else _shuffled(rows, seed, step, epoch)
        for start in range(0, len(ordered), size):
            weighed = tuple(weigh(ordered[start : start + size], weighting, max_new_tokens))
            yield TrainBatch(weighed, measure if epoch == start == 0 else None)


def weigh(rows: Sequence[TrainRow], weighting: Weighting, max_new_tokens: int) -> list[TrainRow]:
    """The rows of one update with the loss weights that share its one denominator.

    token: all counted tokens. sample: samples x own tokens (a mean of means). prompt: prompts x tokens of the
    prompt's samples. fixed: samples x max_new_tokens (Liu et al. 2025, arXiv 2503.20783). Rows without an
    advantage count; rows that left don't.
    """
    tokens = counted_tokens(rows)
    samples = np.count_nonzero(tokens)
    if weighting == "prompt":
        _, prompt_of = np.unique([_prompt_id(row) for row in rows], return_inverse=True)
        of_prompt = np.bincount(prompt_of, weights=tokens)
        denominators = np.count_nonzero(of_prompt) * of_prompt[prompt_of]
    else:
        denominators = {
            "token": np.full(len(rows), tokens.sum()),
            "sample": samples * tokens,
            "fixed": np.full(len(rows), samples * max_new_tokens),
        }[weighting]
    lengths = ragged.lengths([row.mask for row in rows])
    masks = ragged.joined([row.mask for row in rows], np.bool_)
    weights = masks.astype(np.float32) / np.repeat(np.maximum(denominators, 1).astype(np.float32), lengths)
    return [replace(row, weights=own) for row, own in zip(rows, ragged.split(weights, lengths), strict=True)]


def skippable(row: TrainRow, objective: Objective) -> bool:
    """True where no gradient can come from the row, so that its forward may be saved."""
    if not row.mask.any():
        return True
    if objective.loss != "policy" or objective.surrogate not in BUILT_IN_LOSSES:  # a user's may do as it likes
        return False
    leashed = objective.kl_coefficient != 0 or objective.entropy_coefficient != 0
    return not leashed and not row.advantages[row.mask].any()


def _shuffled(rows: Sequence[TrainRow], seed: int, step: int, epoch: int) -> list[TrainRow]:
    groups = [list(members) for _, members in groupby(rows, key=_prompt_id)]
    order = np.random.default_rng([seed % 2**64, step, epoch]).permutation(len(groups))
    return [row for index in order for row in groups[index]]


def _prompt_id(row: TrainRow) -> str:
    return row.sample_id.rpartition("/")[0]
