"""The noise of groups, against every group there is of a tiny policy, and by hand."""

import json
import math
from typing import Any

import numpy as np
import pytest

from bench.noise_groups import FEATURES, POLICY, REWARDS, Policy
from stoker.config.load import from_dict
from stoker.errors import ConfigError
from stoker.rl.noise import GroupNoise, baseline_factor, from_groups, parts_of, split, to_metrics
from stoker.rl.types import TrainRow
from stoker.rl.updates import weigh


@pytest.mark.parametrize("samples", [2, 3, 4])
@pytest.mark.parametrize("advantage", ["reward", "group", "leave_one_out"])
def test_unbiased_over_every_group_there_is(advantage: str, samples: int) -> None:
    """Two parts of one group each: sums over all pairs of groups, by what is linear in them."""
    policy = Policy(samples, advantage)
    chances, whole = policy.chances, policy.first + policy.second
    mean = chances @ whole
    square = float(chances @ (whole**2).sum(1))
    own = float(chances @ (policy.first * policy.second).sum(1))
    share = (samples + 1) // 2 / samples / 2
    found = from_groups(
        [[(share, 0.5 - share)]] * 2, [square / 4] * 2, [own / 4] * 2, (square + float(mean @ mean)) / 2, policy.factor
    )
    truth = policy.truth()
    assert found.noise.trace == pytest.approx(truth.trace)
    assert found.noise.signal == pytest.approx(truth.signal)
    assert found.between == pytest.approx(truth.between)


def test_several_groups_in_a_part_change_nothing_in_expectation() -> None:
    """Of parts with 1 and 2 prompts, in expectation: groups are independent, so their products are |G|^2."""
    policy = Policy(4, "leave_one_out")
    truth, third = policy.truth(), 1 / 3
    q = (truth.signal + truth.between) * policy.factor
    square = truth.signal + truth.trace
    squared = [square / 9, (2 * square + 2 * truth.signal) / 9]
    products = [q / 36, (2 * q + 2 * truth.signal) / 36]
    whole = truth.signal + truth.trace / 3
    found = from_groups([[(third / 2,) * 2], [(third / 2,) * 2] * 2], squared, products, whole, policy.factor)
    assert found.noise.trace == pytest.approx(truth.trace)
    assert found.noise.signal == pytest.approx(truth.signal)
    assert found.between == pytest.approx(truth.between)


def test_the_law_of_group_size() -> None:
    """V_between stays; without a baseline the rest is V_within / n, with that of the others c / (n (n - 1)) more."""
    score = (np.eye(3) - POLICY[:, None, :])[..., None] * FEATURES[:, None, None, :]
    score = score.reshape(4, 3, 6)
    centred = REWARDS - (POLICY * REWARDS).sum(1, keepdims=True)
    mean = (POLICY[..., None] * centred[..., None] * score).sum(1)  # (4, 6)
    around = ((centred[..., None] * score - mean[:, None]) ** 2).sum(2)
    within = float((POLICY * around).sum(1).mean())
    variance = (POLICY * centred**2).sum(1)
    c = float((variance * (POLICY * (score**2).sum(2)).sum(1) + (mean**2).sum(1)).mean())
    plain = Policy(1, "reward").truth().within
    for n in (2, 3, 5):
        found = Policy(n, "leave_one_out").truth()
        assert found.within == pytest.approx(within / n + c / (n * (n - 1)))
        assert found.between == pytest.approx(Policy(n, "reward").truth().between)
        assert Policy(n, "reward").truth().within == pytest.approx(plain / n)
        shrunk = Policy(n, "group").truth()  # the group's own mean: the same, times (n - 1) / n
        assert shrunk.trace == pytest.approx(found.trace * ((n - 1) / n) ** 2)


def rows(lengths: list[list[int]], weighting: Any = "token") -> list[TrainRow]:
    """One list of answers' lengths for each prompt; 0: the sample left."""
    made = []
    for prompt, group in enumerate(lengths):
        for index, length in enumerate(group):
            size = max(length, 1)
            nothing = np.zeros(size, np.float32)
            mask = np.full(size, length > 0)
            made.append(
                TrainRow(f"t:{prompt}/{index}", (1, 2), np.ones(size, np.int32), mask, nothing, nothing, nothing)
            )
    return weigh(made, weighting, 16)


@pytest.mark.parametrize("weighting", ["token", "sample", "prompt", "fixed"])
def test_shares_are_those_of_the_updates_denominator(weighting: str) -> None:
    """Prompts of 3 + 1 and 2 + (left) + 2 tokens."""
    first, second = parts_of(rows([[3, 1], [2, 0, 2]], weighting), weighting)
    expected = {
        "token": [(3 / 8, 1 / 8), (2 / 8, 2 / 8)],
        "sample": [(1 / 4, 1 / 4), (1 / 4, 1 / 4)],
        "fixed": [(1 / 4, 1 / 4), (1 / 4, 1 / 4)],
        "prompt": [(3 / 8, 1 / 8), (1 / 4, 1 / 4)],
    }[weighting]
    for part, shares in zip((first, second), expected, strict=True):
        assert part.shares == (pytest.approx(shares),)
    assert [[row.sample_id for row in half] for half in second.halves] == [["t:1/0"], ["t:1/2"]]


def test_parts_are_whole_groups_in_their_order() -> None:
    found = parts_of(rows([[2, 2]] * 11), "token", most=4)
    assert [len(part.shares) for part in found] == [2, 3, 3, 3]
    assert math.fsum(part.share for part in found) == pytest.approx(1)
    ids = [row.sample_id for part in found for row in part.halves[0]]
    assert ids == [f"t:{prompt}/0" for prompt in range(11)]
    assert len(parts_of(rows([[1], [0]]), "token")) == 1
    assert parts_of([], "token") == []


def test_a_group_without_a_second_sample_tells_nothing_of_the_split() -> None:
    found = from_groups([[(0.5, 0.0)], [(0.5, 0.0)]], [1.0, 1.0], [0.0, 0.0], 2.0, 1.0)
    assert found.between is None and found.noise.signal == 0.0


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [("grpo", 1 + 1 / 9), ("rloo", 1 + 1 / 9), ("remax", 1.0), ("reinforce_plus_plus", 1.0), ("ppo", 1.0)],
)
def test_the_factor_of_a_shared_baseline(algorithm: str, expected: float) -> None:
    run = {"name": "r", "task": {"sources": [{"path": "x"}]}, "sampling": {"samples_per_prompt": 4}}
    assert baseline_factor(from_dict(run | {"algorithm": {"name": algorithm}})) == pytest.approx(expected)


def looked(trace: float, signal: float, between: float) -> dict[str, float]:
    return {"noise/trace": trace, "noise/signal": signal, "noise/between": between}


def test_the_meter_in_metrics_and_words() -> None:
    meter = GroupNoise()
    assert meter.metrics() == {} and meter.between is None
    meter.add(to_metrics(None))
    assert meter.summary(16) == ["noise scale undetermined: no update with two parts or more has been seen, 1 skipped"]
    for jitter in (-0.1, 0.0, 0.1):
        meter.add(looked(32 + jitter, 2 + jitter, 8 - jitter))
    found = meter.metrics()
    assert found["batch/noise_trace"] == pytest.approx(32, abs=0.1)
    assert found["batch/noise_between"] + found["batch/noise_within"] == pytest.approx(found["batch/noise_trace"])
    assert found["batch/noise_scale_low"] < found["batch/noise_scale"] < found["batch/noise_scale_high"]
    scale, doubled, split_up = meter.summary(16)
    assert scale.startswith("noise scale 15.9") and "prompts; tr(Sigma)" in scale
    assert doubled.startswith("prompts per update 16 to 32: costs 50.") and "more prompts, saves 25." in doubled
    assert "between prompts and" in split_up


def test_a_resumed_meter_goes_on_to_the_bit() -> None:
    draws = np.random.default_rng(0).normal(2, 1, (9, 3)).tolist()
    straight, broken, resumed = GroupNoise(), GroupNoise(), GroupNoise()
    for draw in draws:
        straight.add(looked(*draw))
    for draw in draws[:4]:
        broken.add(looked(*draw))
    resumed.load_state_dict(json.loads(json.dumps(broken.state_dict())))
    for draw in draws[4:]:
        resumed.add(looked(*draw))
    assert resumed.metrics() == straight.metrics()
    assert resumed.state_dict() == straight.state_dict()
    with pytest.raises(ConfigError, match="missing or unknown keys"):
        resumed.load_state_dict({"scale": {}})


def test_what_is_measured_is_kept_apart_from_what_is_recorded() -> None:
    assert split({"optim/loss": 1.0, **looked(1, 2, 3)}) == (looked(1, 2, 3), {"optim/loss": 1.0})
