"""Which samples stay in a step, and why the others leave."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from stoker.rl.types import Bools, Group, Sample, Scored

__all__ = ["Reason", "departures", "model_mask", "reason_to_leave"]

Reason = Literal["abstained", "truncated", "empty"]


def model_mask(sample: Sample) -> Bools:
    """(T,): tokens that the model wrote, its stop token included."""
    return np.ones(len(sample.token_ids), dtype=np.bool_) if sample.model_mask is None else sample.model_mask


def reason_to_leave(
    scored: Scored, *, mask_truncated: bool = False, bootstrap_truncated: bool = False
) -> Reason | None:
    """None for a sample that stays; one that leaves is in no statistic, no loss and no denominator.

    It leaves if the model wrote nothing, if it was cut off and `mask_truncated`, or if all rewards
    abstained; but a cut answer without a reward stays under `bootstrap_truncated`: the critic speaks for
    the missing rest.
    """
    written = scored.sample.model_mask
    if not (len(scored.sample.token_ids) if written is None else written.any()):
        return "empty"
    if mask_truncated and scored.sample.truncated:
        return "truncated"
    if scored.reward is None and not (bootstrap_truncated and scored.sample.truncated):
        return "abstained"
    return None


def departures(
    groups: Sequence[Group], *, mask_truncated: bool = False, bootstrap_truncated: bool = False
) -> dict[Reason, int]:
    """Samples of the step that leave, counted by reason."""
    counts: dict[Reason, int] = {"abstained": 0, "truncated": 0, "empty": 0}
    for group in groups:
        for scored in group.scored:
            reason = reason_to_leave(scored, mask_truncated=mask_truncated, bootstrap_truncated=bootstrap_truncated)
            if reason:
                counts[reason] += 1
    return counts
