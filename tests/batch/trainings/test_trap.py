"""The trap's verdicts, on losses made by hand."""

import json
import math

import pytest

from stoker.batch.scope import Scope
from stoker.batch.trainings.trap import Measured, Trap, judge_trap
from stoker.errors import ConfigError

SMALL, LARGE = Scope(64, 2, 2), Scope(64, 4, 2)


def judged(small: tuple[float, ...], large: tuple[float, ...], *others: Measured) -> Trap:
    return judge_trap(Measured(SMALL, small), Measured(LARGE, large), others, samples=1000, base_examples=64)


def test_the_difference_is_paired_with_students_interval() -> None:
    found = judged((1.0, 2.0, 3.0), (1.2, 2.3, 3.4))
    assert found.state == "holds" and found.worse is not None
    assert found.worse.mean == pytest.approx(0.3)
    wide = 4.302652729696142 * 0.1 / math.sqrt(3)  # t of two degrees of freedom, deviation 0.1
    assert (found.worse.low, found.worse.high) == (pytest.approx(0.3 - wide), pytest.approx(0.3 + wide))


@pytest.mark.parametrize(
    ("small", "large", "state"),
    [
        ((1.0, 1.0, 1.0), (1.001, 1.002, 0.999), "doesn't hold"),  # surely less than 2 %
        ((1.0, 1.0, 1.0), (0.9, 0.91, 0.89), "doesn't hold"),  # better
        ((1.0, 1.0, 1.0), (1.5, 0.7, 1.2), "not enough evidence"),
        ((1.0,), (9.0,), "not enough evidence"),  # one seed has no interval
        ((1.0, 1.0), (math.inf, math.inf), "holds"),
        ((1.0, 1.0), (math.inf, 1.0), "not enough evidence"),
        ((1.0, math.inf), (math.inf, math.inf), "not enough evidence"),
        ((1.0, 1.0, 1.0), (1.01, 1.0101, 1.0099), "doesn't hold"),  # surely worse, by less than counts
    ],
)
def test_states(small: tuple[float, ...], large: tuple[float, ...], state: str) -> None:
    found = judged(small, large)
    assert found.state == state
    assert state in str(found)
    assert bool(found.proposals) == (state == "holds")


def test_accumulation_at_the_same_global_batch_is_told_from_cures() -> None:
    accumulated = Measured(Scope(64, 8, 1), (1.20001, 2.3, 3.4))
    faster = Measured(LARGE, (1.1, 2.1, 3.1), 8.0)
    found = judged((1.0, 2.0, 3.0), (1.2, 2.3, 3.4), accumulated, faster)
    assert [(one, apart) for one, apart in found.same] == [(accumulated, pytest.approx(0.00001 / 1.2))]
    ((cure, better, share),) = found.cures
    assert cure is faster and better is not None and better.mean == pytest.approx(0.2)
    assert share == pytest.approx(0.2 / 0.3)
    assert "cures nothing" in str(found) and "67% of what was lost" in str(found)


def test_proposals_name_the_rate_the_schedule_and_the_smaller_batch_but_no_accumulation() -> None:
    told = " ".join(judged((1.0, 1.0, 1.1), (2.0, 2.0, 2.1)).proposals)
    assert "x 8" in told and "base_examples=64" in told  # 512 from 64, linearly
    assert "Stages((256, 512), (0, 500), by='samples')" in told
    assert "2 ranks x 128 = 256" in told
    assert "accumul" not in told


def test_the_adam_rule_is_the_root() -> None:
    found = judge_trap(Measured(SMALL, (1.0, 1.0, 1.1)), Measured(LARGE, (2.0, 2.0, 2.1)), samples=1000, rule="sqrt")
    assert "x 1.41" in found.proposals[0]


def test_json_is_plain() -> None:
    told = json.loads(json.dumps(judged((1.0, 2.0), (1.2, 2.3)).to_json()))
    assert told["larger"]["scope"]["examples_per_update"] == 512
    assert told["worse"]["mean"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("small", "large", "others", "named"),
    [
        (Measured(LARGE, (1.0,)), Measured(SMALL, (1.0,)), (), "larger global batch"),
        (Measured(Scope(32, 2, 2), (1.0,)), Measured(LARGE, (1.0,)), (), "one micro-batch"),
        (Measured(SMALL, (1.0,), 2.0), Measured(LARGE, (1.0,)), (), "one learning rate"),
        (Measured(SMALL, (1.0,)), Measured(LARGE, (1.0, 2.0)), (), "same seeds"),
        (Measured(SMALL, (1.0,)), Measured(LARGE, (1.0,)), (Measured(SMALL, (1.0,)),), "512 examples"),
    ],
)
def test_what_cant_be_compared_is_refused(
    small: Measured, large: Measured, others: tuple[Measured, ...], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        judge_trap(small, large, others, samples=10)
