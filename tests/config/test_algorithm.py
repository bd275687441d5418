"""Recipes: published values, keys that win over them, combinations that make no sense."""

import tomllib
from typing import Any

import pytest

from stoker.config.algorithm import ADVANTAGES, LOSSES, RECIPES, Algorithm, describe
from stoker.config.load import from_dict, to_toml
from stoker.config.schema import RunConfig
from stoker.errors import ConfigError
from stoker.rl.advantages import ESTIMATORS
from stoker.rl.losses import SURROGATES


def run(*overrides: str) -> RunConfig:
    return from_dict({"name": "a", "task": {"sources": [{"path": "x"}]}}, overrides)


PUBLISHED: dict[str, tuple[Any, ...]] = {
    # advantage, scale, loss, ratio, clip_low, clip_high, loss_weighting
    "grpo": ("group", "group", "clip", "token", 0.2, 0.2, "token"),
    "dr_grpo": ("group", "none", "clip", "token", 0.2, 0.2, "fixed"),
    "dapo": ("group", "group", "clip", "token", 0.2, 0.28, "token"),
    "rloo": ("leave_one_out", "none", "reinforce", "token", 0.2, 0.2, "fixed"),
    "reinforce_plus_plus": ("reward", "whiten", "clip", "token", 0.2, 0.2, "token"),
    "reinforce_plus_plus_baseline": ("group", "whiten", "clip", "token", 0.2, 0.2, "token"),
    "remax": ("greedy", "none", "reinforce", "token", 0.2, 0.2, "fixed"),
    "gspo": ("group", "group", "clip", "sequence", 3e-4, 4e-4, "sample"),
    "cispo": ("group", "group", "cispo", "token", 1.0, 4.0, "token"),
    "sapo": ("group", "group", "sapo", "token", 0.2, 0.2, "sample"),
    "ppo": ("gae", "whiten", "clip", "token", 0.2, 0.2, "token"),
}
LEASHES = {"dr_grpo": 0, "dapo": 0, "gspo": 0, "cispo": 0, "sapo": 0}
IN_REWARD = {"rloo", "remax", "reinforce_plus_plus", "ppo"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_name_sets_what_its_paper_has(name: str) -> None:
    config = run(f"algorithm.name={name}")
    a = config.algorithm
    found = (a.advantage, a.advantage_scale, a.loss, a.ratio, a.clip_low, a.clip_high, a.loss_weighting)
    assert found == PUBLISHED[name]
    assert config.kl.coefficient == LEASHES.get(name, 0.04)
    assert config.kl_placement == ("reward" if name in IN_REWARD else "loss")
    assert (a.dynamic_sampling_draws, a.overlong_share) == ((10, 0.2) if name == "dapo" else (1, 0.0))
    assert from_dict(tomllib.loads(to_toml(config))) == config


def test_every_name_that_the_run_file_knows_has_a_recipe_and_every_piece_a_function() -> None:
    names = Algorithm.model_fields["name"].annotation.__args__  # type: ignore[union-attr]
    assert set(names) == set(RECIPES) == set(PUBLISHED)
    assert {*ESTIMATORS, "gae"} == set(ADVANTAGES)
    assert set(SURROGATES) == set(LOSSES)


def test_a_key_beside_the_name_wins_and_is_shown() -> None:
    config = run("algorithm.name=dapo", "algorithm.clip_high=0.3", "algorithm.overlong_share=0", "kl.coefficient=0.01")
    assert (config.algorithm.clip_high, config.algorithm.clip_low, config.kl.coefficient) == (0.3, 0.2, 0.01)
    shown = describe(config.algorithm).splitlines()
    assert "dapo (Decoupled clip and dynamic sampling, arXiv 2503.14476)" in shown[0]
    assert "loss clip" in shown[0]
    assert shown[1:] == [
        "  algorithm.clip_high = 0.3 (the recipe: 0.28)", "  algorithm.overlong_share = 0.0 (the recipe: 0.2)",
    ]  # fmt: skip
    assert len(describe(run("algorithm.name=dapo").algorithm).splitlines()) == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["name=rloo", "samples=1"], r"algorithm.name = 'rloo' compares the samples .*samples_per_prompt >= 2"),
        (["name=grpo", "samples=1"], r"samples_per_prompt >= 2"),
        (["name=remax", "advantage_scale=group", "samples=1"], r"advantage_scale = 'group'.*samples_per_prompt >= 2"),
        (["gae_lambda=0.9"], r"gae_lambda = 0.9 does nothing with advantage = 'group': drop it, .*'gae'"),
        (["gamma=0.9"], r"gamma = 0.9 does nothing"),
        (["value_clip=0.1"], r"value_clip = 0.1 does nothing"),
        (["value_coefficient=2"], r"value_coefficient = 2.0 does nothing"),
        (["bootstrap_truncated=true"], r"bootstrap_truncated = True does nothing"),
        (["name=sapo", "clip_high=0.3"], r"clip_high = 0.3 does nothing with loss = 'sapo'.*'clip' or 'cispo'"),
        (["name=rloo", "clip_low=0.3"], r"clip_low = 0.3 does nothing with loss = 'reinforce'"),
        (["gate_positive=2"], r"gate_positive = 2.0 does nothing with loss = 'clip'"),
        (["gate_negative=2"], r"gate_negative = 2.0 does nothing with loss = 'clip'"),
        (["name=cispo", "dual_clip=9"], r"dual_clip = 9.0 does nothing with loss = 'cispo'"),
        (["dual_clip=1.1"], r"dual_clip = 1.1 must be above 1 \+ clip_high = 1.2"),
        (["name=ppo", "advantage_scale=group"], r"'gae' doesn't compare: use 'whiten' or 'none'"),
        (["name=ppo", "ratio=sequence"], r"ratio = 'sequence' needs one advantage .*ratio = 'token'"),
        (["name=ppo", "dynamic_sampling_draws=2"], r"dynamic_sampling_draws = 2 .*use 1, or advantage = 'group'"),
        (["name=remax", "dynamic_sampling_draws=2"], r"dynamic_sampling_draws = 2"),
        (["loss=clipp"], r"loss = 'clipp' is not one of .*did you mean 'clip'"),
        (["advantage=grou"], r"advantage = 'grou' is not one of .*did you mean 'group'"),
        (["name=dapoo"], r"did you mean 'dapo'"),
        (["ratio=sequence", "kl.placement=reward"], r"ratio = 'sequence' needs one .*kl.level = 'sequence'"),
    ],
)
def test_combinations_that_make_no_sense_are_refused_with_the_fix(overrides: list[str], message: str) -> None:
    long = {"samples": "sampling.samples_per_prompt"}
    given = []
    for override in overrides:
        key, _, value = override.partition("=")
        given.append(f"{long.get(key, key if '.' in key else f'algorithm.{key}')}={value}")
    with pytest.raises(ConfigError, match=message):
        run(*given)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "remax", "ppo"])
def test_one_sample_a_prompt_is_enough_where_the_group_is_no_baseline(name: str) -> None:
    assert run(f"algorithm.name={name}", "sampling.samples_per_prompt=1").algorithm.name == name


def test_a_users_loss_may_read_any_key() -> None:
    assert run("algorithm.loss=mine.py:loss", "algorithm.dual_clip=5", "algorithm.gate_positive=2").algorithm.dual_clip
