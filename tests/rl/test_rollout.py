"""Drawing a step's groups: refill to plan, its bounds, and the penalty for long answers."""

from dataclasses import replace

import numpy as np
import pytest

from stoker.config.schema import Algorithm
from stoker.rl.rollout import Rollout, overlong_penalty, set_greedy_apart, with_spread
from stoker.rl.tasks import PromptStream
from stoker.rl.types import Group, Prompt, Sample, SamplingParams, Scored

DYNAMIC = Algorithm(dynamic_sampling_draws=3)


def stream(rows: int) -> PromptStream:
    return PromptStream({"a": [Prompt(f"a:{i}", (i,), "", None) for i in range(rows)]}, {"a": 1.0}, seed=0)


def scored(prompt: Prompt, index: int, reward: float | None, length: int = 2, **more) -> Scored:
    params = more.pop("params", SamplingParams())
    zeros = np.zeros(length, dtype=np.float32)
    sample = Sample(prompt, index, params, 0, np.arange(length, dtype=np.int32), zeros, "", more.get("finish", "stop"))
    return Scored(sample, {"exact": reward}, reward)


def group(prompt: Prompt, *rewards: float | None, **more) -> Group:
    return Group(prompt, tuple(scored(prompt, index, reward, **more) for index, reward in enumerate(rewards)))


def fill(rollout: Rollout, prompts: PromptStream, teaches) -> list[list[str]]:
    """Draw until it ends; `teaches(prompt id)` says whose answers differ. Ids by draw."""
    draws = []
    for found in rollout.draws_from(prompts):
        draws.append([prompt.id for prompt in found])
        rollout.add([group(one, 1.0, 0.0 if teaches(one.id) else 1.0) for one in found])
    return draws


def test_one_draw_keeps_every_group() -> None:
    rollout = Rollout(4, 8, Algorithm())
    assert len(fill(rollout, stream(9), lambda _: False)) == 1
    assert (len(rollout.groups), rollout.discarded, rollout.missing) == (4, [], 0)


def test_groups_without_spread_are_replaced_until_the_plan_is_full() -> None:
    prompts = stream(50)
    flat = {one.id for one in stream(50).take(4)[1:3]}
    rollout = Rollout(4, 8, DYNAMIC)
    draws = fill(rollout, prompts, lambda name: name not in flat)
    assert [len(draw) for draw in draws] == [4, 2]
    assert len({name for draw in draws for name in draw}) == 6
    assert {one.prompt.id for one in rollout.discarded} == flat
    assert (len(rollout.groups), rollout.missing, rollout.draws) == (4, 0, 2)


def test_draws_are_bounded_and_the_rest_is_missing() -> None:
    rollout, good = Rollout(4, 8, DYNAMIC), stream(50).take(1)[0].id
    draws = fill(rollout, stream(50), lambda name: name == good)
    assert [len(draw) for draw in draws] == [4, 3, 3]
    assert ([one.prompt.id for one in rollout.groups], rollout.missing) == ([good], 3)


def test_it_ends_where_no_other_prompt_is_left() -> None:
    rollout = Rollout(4, 8, DYNAMIC.model_copy(update={"dynamic_sampling_draws": 9}))
    draws = fill(rollout, stream(6), lambda _: False)
    assert [len(draw) for draw in draws] == [4, 2]
    assert (rollout.groups, rollout.missing, rollout.draws) == ([], 4, 2)


def test_the_place_in_the_data_moves_with_every_draw() -> None:
    prompts = stream(50)
    rollout = Rollout(4, 8, DYNAMIC)
    drawn = [name for draw in fill(rollout, prompts, lambda _: False) for name in draw]
    assert drawn == [one.id for one in stream(50).take(12)]
    assert not {one.id for one in prompts.take(4)} & set(drawn)


@pytest.mark.parametrize(
    ("rewards", "spread"),
    [((1, 0), True), ((1, 1), False), ((0.3, 0.1 + 0.2), False), ((1, None), False), ((None, None), False), ((), False),
     ((1, None, 0), True)],
)  # fmt: skip
def test_spread_is_of_the_samples_that_stay(rewards, spread) -> None:
    assert with_spread([group(Prompt("a:0", (1,), "", None), *rewards)], DYNAMIC) == [spread]


def test_a_cut_sample_under_mask_truncated_makes_no_spread() -> None:
    prompt = Prompt("a:0", (1,), "", None)
    mixed = Group(prompt, (scored(prompt, 0, 1.0), scored(prompt, 1, 0.0, finish="length"), scored(prompt, 2, 1.0)))
    assert with_spread([mixed], DYNAMIC) == [True]
    assert with_spread([mixed], DYNAMIC.model_copy(update={"mask_truncated": True})) == [False]


@pytest.mark.parametrize(("length", "penalty"), [(0, 0), (80, 0), (85, -0.25), (90, -0.5), (100, -1)])
def test_overlong_penalty_by_hand(length, penalty) -> None:
    assert overlong_penalty(length, 20, 100) == penalty
    assert overlong_penalty(length, 0, 100) == 0


def test_long_answers_are_penalised_after_spread_was_judged() -> None:
    prompt, algorithm = Prompt("a:0", (1,), "", None), Algorithm(overlong_share=0.5, dynamic_sampling_draws=2)
    right = Group(prompt, (scored(prompt, 0, 1.0, 4), scored(prompt, 1, 1.0, 8)))
    rollout = Rollout(1, 8, algorithm)
    rollout.add([right])
    assert rollout.groups == [] and rollout.discarded[0].scored[1].reward == 0.0  # equal rewards, whatever the length
    mixed = Group(prompt, (scored(prompt, 0, 1.0, 4), scored(prompt, 1, 0.0, 6), scored(prompt, 2, None, 8)))
    rollout.add([mixed])
    (found,) = rollout.groups
    assert [one.reward for one in found.scored] == [1.0, -0.5, None]
    assert [one.rewards for one in found.scored] == [{"exact": 1.0}, {"exact": 0.0, "overlong": -0.5}, {"exact": None}]


def test_a_limit_too_short_for_a_cache_penalises_nothing() -> None:
    prompt = Prompt("a:0", (1,), "", None)
    rollout = Rollout(1, 4, Algorithm(overlong_share=0.2))  # 0.8 of a token
    rollout.add([group(prompt, 1.0, 0.0, length=4)])
    assert [one.reward for one in rollout.groups[0].scored] == [1.0, 0.0]


def test_the_greedy_answer_leaves_the_samples_and_is_penalised_like_them() -> None:
    prompt = Prompt("a:0", (1,), "", None)
    greedy = scored(prompt, 2, 1.0, 8, params=SamplingParams(temperature=0.0))
    drawn = replace(group(prompt, 0.0, 1.0), scored=(*group(prompt, 0.0, 1.0).scored, greedy))
    (apart,) = set_greedy_apart([drawn])
    assert (apart.greedy, len(apart.scored)) == (greedy, 2)
    rollout = Rollout(1, 8, Algorithm(name="remax", overlong_share=0.5))
    rollout.add([drawn])
    assert rollout.groups[0].greedy is not None and rollout.groups[0].greedy.reward == 0.0
