"""Trainings on two real ranks are the training of one process on the same examples."""

from dataclasses import replace
from pathlib import Path

import pytest

from stoker.batch import Maker
from stoker.batch.trainings.on_ranks import train_on_ranks
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Plan, train_anew
from stoker.errors import ConfigError
from tests.batch.trainings_targets import regression

MAKER = Maker(f"{Path(__file__).parents[1] / 'trainings_targets.py'}:regression")
SETTING = Setting(32, base_examples=16, rule="linear", examples_per_microbatch=8, warmup_samples=128, seed=3)
PLAN = Plan(512, evaluations=4)


def test_ranks_are_one_process_and_accumulation_is_no_other_training() -> None:
    """The global batch alone decides: 8 x 2 micro-batches x 2 ranks are 8 x 4 on one, and 16 x 1 x 2."""
    fewer = replace(SETTING, examples_per_microbatch=16)
    legs = [(SETTING, Plan(256, 1)), (replace(SETTING, examples_per_update=64), Plan(256, 1))]
    (two,), (large,), (first, second) = train_on_ranks(MAKER, [[(SETTING, PLAN)], [(fewer, PLAN)], legs], 2)
    one = train_anew(regression, SETTING, PLAN)
    for found in (two, large):
        assert found.samples == one.samples
        assert found.learning_rate == pytest.approx(one.learning_rate)
        assert found.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-5)
        assert [e.loss for e in found.evaluations] == pytest.approx([e.loss for e in one.evaluations], rel=1e-5)
        assert [e.samples for e in found.evaluations] == [128, 256, 384, 512]
    assert two.setting == SETTING
    assert first.samples[-1] == second.samples[-1] == 256
    assert second.final_loss < first.final_loss  # it went on with what the first leg had trained


def test_what_ranks_dont_divide_is_refused_before_they_start() -> None:
    with pytest.raises(ConfigError, match="examples_per_update = 33 is not a multiple of 2 ranks"):
        train_on_ranks(MAKER, [[(Setting(33), PLAN)]], 2)
    with pytest.raises(ConfigError, match="base_examples = 3 is not a multiple"):
        train_on_ranks(MAKER, [[(Setting(4, base_examples=3), PLAN)]], 2)
    with pytest.raises(ConfigError, match="ranks = 0: at least 1"):
        train_on_ranks(MAKER, [[(Setting(4), PLAN)]], 0)
