"""Alarms: when they are raised, and that the advice points the right way."""

from typing import Any

import pytest

from stoker.config.load import from_dict
from stoker.rl.alarms import raised, warmup_spike
from stoker.rl.kl import KlState
from stoker.rl.state import Evaluation, RunState

SOUND = {"sample/truncated": 0.2, "reward/zero_variance_groups": 0.5, "sample/empty": 0.0, "reward/unparsed": 0.5}


def alarms(record: dict[str, float], state: RunState, **kl: Any) -> dict[str, str]:
    config = from_dict({"name": "run", "task": {"sources": [{"path": "x.jsonl"}]}, "kl": kl, "stop": {"steps": 100}})
    return dict(raised(SOUND | record, state, config))


def state(step: int = 10, baseline: float | None = 1.0, rewards: tuple[float, ...] = ()) -> RunState:
    seen = [Evaluation(samples_seen=0, reward=reward, reward_error=0.05, accuracy=0.0) for reward in rewards]
    return RunState(kl=KlState(0.04, baseline), step=step, evaluations=seen)


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [("sample/truncated", 1.0, "truncated"), ("reward/zero_variance_groups", 0.9, "zero_variance"),
     ("sample/empty", 0.2, "empty"), ("reward/unparsed", 0.95, "unparsed")],
)  # fmt: skip
def test_each_alarm_of_the_samples_is_raised_alone(key: str, value: float, kind: str) -> None:
    assert list(alarms({key: value}, state())) == [kind]


def test_equal_groups_are_no_matter_to_a_critic() -> None:
    config = from_dict({"name": "r", "task": {"sources": [{"path": "x"}]}, "algorithm": {"name": "ppo"}})
    assert list(raised(SOUND | {"reward/zero_variance_groups": 1.0}, state(), config)) == []


def test_a_sound_step_raises_none() -> None:
    assert alarms({"kl/sequence": 3.0}, state()) == {}


def test_a_large_kl_asks_for_a_tighter_leash_or_a_lower_rate() -> None:
    text = alarms({"kl/sequence": 11.5}, state())["kl_high"]
    assert "10.5 nats per sequence" in text
    assert "raise kl.coefficient" in text
    assert "lower optimizer.learning_rate" in text


def test_kl_is_judged_above_its_value_at_the_start() -> None:
    assert alarms({"kl/sequence": 45.0}, state(baseline=40.0)) == {}
    assert alarms({"kl/sequence": 45.0}, state(baseline=None)) == {}


def test_an_adaptive_leash_may_reach_twice_its_target() -> None:
    assert alarms({"kl/sequence": 31.0}, state(), adaptive=True, target=20.0) == {}
    assert "lower kl.target" in alarms({"kl/sequence": 42.0}, state(), adaptive=True, target=20.0)["kl_high"]


def test_a_small_kl_is_worth_a_word_only_late_and_without_a_gain() -> None:
    still = {"kl/sequence": 1.1}
    assert alarms(still, state(step=10, rewards=(0.3, 0.3))) == {}
    assert alarms(still, state(step=60, rewards=(0.3, 0.4))) == {}
    assert alarms(still, state(step=60)) == {}  # nothing held out: nothing known
    text = alarms(still, state(step=60, rewards=(0.3, 0.34)))["kl_low"]
    assert "lower kl.coefficient, or raise optimizer.learning_rate" in text


def test_a_spike_in_the_warm_up_ends_the_run_and_says_by_how_much() -> None:
    past = [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 2.0, 2.0]  # median 2
    assert warmup_spike(10.0, past, 5.0) is None
    assert "11 is 5.5 times its running median 2" in str(warmup_spike(11.0, past, 5.0))
    assert warmup_spike(1000.0, past, 0.0) is None
    assert warmup_spike(1000.0, past[:7], 5.0) is None  # too few to have a median
