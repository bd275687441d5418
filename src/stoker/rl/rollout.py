"""The groups of a step as they are drawn: which stay, which dynamic sampling replaces, what it cost."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from stoker.config import schema
from stoker.rl.advantages import deviations
from stoker.rl.ports import PromptSource
from stoker.rl.select import reason_to_leave
from stoker.rl.types import Group, Prompt, Scored

__all__ = ["Rollout", "overlong_penalty", "set_greedy_apart", "with_spread"]


@dataclass
class Rollout:
    """Fills a step's plan of prompts, in one draw, or in as many as dynamic sampling may take.

    Dynamic sampling (DAPO: Yu et al. 2025, arXiv 2503.14476): a group whose rewards are equal teaches nothing, so
    another prompt takes its place. Rewards are compared before any penalty for length, as in the paper.
    """

    planned: int
    """Prompts."""
    max_new_tokens: int
    algorithm: schema.Algorithm
    groups: list[Group] = field(default_factory=list)
    """Those that train."""
    discarded: list[Group] = field(default_factory=list)
    """Paid for, and not trained on."""
    draws: int = 0

    def draws_from(self, prompts: PromptSource) -> Iterator[list[Prompt]]:
        """Prompts to sample next, until the plan is full, the draws are used up, or no other prompt is left."""
        while self.missing and self.draws < self.algorithm.dynamic_sampling_draws:
            found = prompts.take(self.missing, besides=[group.prompt for group in self.drawn])
            if not found:
                return
            self.draws += 1
            yield found

    def add(self, groups: Sequence[Group]) -> None:
        """The answered prompts of one draw."""
        groups = set_greedy_apart(groups) if self.algorithm.needs_greedy else groups
        dynamic = self.algorithm.dynamic_sampling_draws > 1
        stay = with_spread(groups, self.algorithm) if dynamic else [True] * len(groups)
        if cache := int(self.algorithm.overlong_share * self.max_new_tokens):
            groups = [_shaped(group, cache, self.max_new_tokens) for group in groups]
        self.groups += [group for group, stays in zip(groups, stay, strict=True) if stays]
        self.discarded += [group for group, stays in zip(groups, stay, strict=True) if not stays]

    @property
    def drawn(self) -> list[Group]:
        return [*self.groups, *self.discarded]

    @property
    def missing(self) -> int:
        """Prompts that the plan still lacks."""
        return self.planned - len(self.groups)


def with_spread(groups: Sequence[Group], algorithm: schema.Algorithm) -> list[bool]:
    """Which groups' rewards differ, among the samples that stay."""

    def reward(scored: Scored) -> float:
        leaves = reason_to_leave(scored, mask_truncated=algorithm.mask_truncated)
        return np.nan if leaves or scored.reward is None else scored.reward

    rewards = np.full((len(groups), max((len(group.scored) for group in groups), default=0)), np.nan)
    for line, group in zip(rewards, groups, strict=True):
        line[: len(group.scored)] = [reward(scored) for scored in group.scored]
    return [bool(found > 0) for found in deviations(rewards)]


def set_greedy_apart(groups: Sequence[Group]) -> list[Group]:
    """The groups with their greedy answer, if they have one, out of the samples."""

    def apart(group: Group) -> Group:
        greedy = [one for one in group.scored if one.sample.params.greedy]
        samples = tuple(one for one in group.scored if not one.sample.params.greedy)
        return Group(group.prompt, samples, greedy[0]) if greedy else group

    return [apart(group) for group in groups]


def overlong_penalty(length: int, cache: int, max_new_tokens: int) -> float:
    """0 up to max_new_tokens - cache tokens, then falling linearly to -1 at the limit (arXiv 2503.14476, eq. 13)."""
    return -max(0, length - (max_new_tokens - cache)) / cache if cache else 0.0


def _shaped(group: Group, cache: int, max_new_tokens: int) -> Group:
    """The group with the penalty in its rewards, under the name `overlong`."""

    def shaped(scored: Scored) -> Scored:
        penalty = overlong_penalty(len(scored.sample.token_ids), cache, max_new_tokens)
        if scored.reward is None or not penalty:
            return scored
        return replace(scored, reward=scored.reward + penalty, rewards={**scored.rewards, "overlong": penalty})

    greedy = None if group.greedy is None else shaped(group.greedy)
    return replace(group, scored=tuple(shaped(one) for one in group.scored), greedy=greedy)
