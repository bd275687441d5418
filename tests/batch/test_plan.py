"""The batch plan: numbers by hand, identities, warnings."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.batch import plan
from stoker.batch.advice import learning_rate_range
from stoker.config.load import from_dict
from stoker.config.schema import RunConfig
from stoker.errors import ConfigError


def run(*overrides: str) -> RunConfig:
    return from_dict({"name": "a", "task": {"sources": [{"path": "x"}]}}, overrides)


def warnings(*overrides: str, parameters: int | None = None) -> str:
    return "\n".join(plan.make(run(*overrides), parameters).warnings)


def test_numbers_by_hand() -> None:
    made = plan.make(
        run(
            "sampling.prompts_per_step=32",
            "sampling.samples_per_prompt=8",
            "sampling.max_new_tokens=100",
            "update.samples_per_update=64",
            "update.epochs_per_step=2",
            "stop.steps=50",
            "optimizer.warmup_fraction=0.05",
            "optimizer.learning_rate=2e-6",
        ),
        parameters=7_000_000_000,
    )
    assert made.samples_per_step == 256
    assert made.updates_per_step == 8  # 2 x 256 / 64
    assert made.prompts_per_update == 8
    assert made.sampled_tokens_per_step == 25_600
    assert made.total_samples == 12_800
    assert made.total_updates == 400
    assert made.warmup_samples == 640  # 5 % of 12,800: 2.5 steps of 8 updates
    assert made.warmup_updates == 20
    assert made.learning_rate == 2e-6
    assert made.warnings == ()


def test_a_well_known_size_of_step() -> None:
    """512 prompts x 8 samples x 512 tokens are 2,097,152 tokens."""
    made = plan.make(run("sampling.prompts_per_step=512", "sampling.max_new_tokens=512"))
    assert made.sampled_tokens_per_step == 2_097_152


def test_zero_samples_per_update_is_the_whole_step() -> None:
    made = plan.make(run())
    assert (made.samples_per_update, made.updates_per_step, made.prompts_per_update) == (128, 1, 16)


@given(
    prompts=st.integers(1, 64),
    samples=st.integers(2, 16),
    parts=st.integers(1, 8),
    epochs=st.integers(1, 4),
    steps=st.integers(1, 500),
    warmup=st.floats(0, 1),
)
def test_identities_hold_for_any_config_and_json_round_trips(
    prompts: int, samples: int, parts: int, epochs: int, steps: int, warmup: float
) -> None:
    made = plan.make(
        from_dict(
            {
                "name": "a",
                "task": {"sources": [{"path": "x"}]},
                "sampling": {"prompts_per_step": prompts * parts, "samples_per_prompt": samples},
                "update": {"samples_per_update": prompts * samples, "epochs_per_step": epochs},
                "stop": {"steps": steps},
                "optimizer": {"warmup_fraction": warmup},
            }
        )
    )
    assert made.updates_per_step == parts * epochs
    assert plan.from_json(made.to_json()) == made


def test_a_tampered_plan_names_the_identity() -> None:
    data = json.loads(plan.make(run()).to_json())
    with pytest.raises(ConfigError, match=r"samples_per_step = prompts_per_step x samples_per_prompt does not hold"):
        plan.from_json(json.dumps(data | {"samples_per_step": 127}))
    with pytest.raises(
        ConfigError,
        match=r"total_updates = steps x updates_per_step, over the stages does not hold.*'total_updates': 99",
    ):
        plan.from_json(json.dumps(data | {"total_updates": 99}))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '"x"',
        '{"schema_version": 1}',
        '{"schema_version": 1, "prompts_per_step": 4}',
        '{"schema_version": 1, "steps": "x"}',
    ],
)
def test_a_damaged_plan_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="batch plan"):
        plan.from_json(text)


def test_a_plan_with_numbers_of_the_wrong_kind_is_a_config_error() -> None:
    data = json.loads(plan.make(run()).to_json())
    with pytest.raises(ConfigError, match="batch plan"):
        plan.from_json(json.dumps(data | {"steps": "many"}))


def test_every_number_of_the_table_has_unit_and_scope() -> None:
    for row in plan.make(run()).rows():
        assert row.scope
        assert row.unit or row.name == "learning rate"


def test_render_is_a_plain_table_with_warnings_below() -> None:
    lines = str(plan.make(run("sampling.prompts_per_step=4"))).splitlines()
    assert lines[1].split() == ["prompts", "per", "step", "4", "prompts", "global", "sampling.prompts_per_step"]
    assert lines[3].split() == ["samples", "per", "step", "32", "samples", "global", "4", "x", "8"]
    assert lines[-1].startswith("warning: sampling.prompts_per_step = 4")
    starts = {line.index(word) for line, word in zip(lines[1:3], ("prompts   ", "samples   "), strict=True)}
    assert len(starts) <= 2
    assert all(not line.endswith(" ") for line in lines)


def test_few_prompts_warn_and_very_few_warn_strongly() -> None:
    assert "few distinct prompts" not in warnings("sampling.prompts_per_step=16")
    assert "= 15: few distinct prompts" in warnings("sampling.prompts_per_step=15")
    assert "= 8: few distinct prompts" in warnings("sampling.prompts_per_step=8")
    assert "= 7: far too few distinct prompts" in warnings("sampling.prompts_per_step=7")


def test_few_samples_warn_where_they_make_the_baseline() -> None:
    assert "samples_per_prompt = 3" in warnings("sampling.samples_per_prompt=3")
    assert "samples_per_prompt" not in warnings("sampling.samples_per_prompt=4")
    assert "samples_per_prompt" not in warnings("sampling.samples_per_prompt=1", "algorithm.name=ppo")


def test_many_epochs_and_split_groups_warn() -> None:
    assert "epochs_per_step" not in warnings("update.epochs_per_step=4")
    assert "epochs_per_step = 5" in warnings("update.epochs_per_step=5")
    assert "splits groups of 8" in warnings("update.samples_per_update=4")
    assert "splits groups" not in warnings("update.samples_per_update=16")


def test_a_sample_that_can_not_fit_a_microbatch_warns() -> None:
    assert "1280 tokens (1024 of prompt + 256 new)" in warnings("update.tokens_per_microbatch=1279")
    assert "tokens_per_microbatch" not in warnings("update.tokens_per_microbatch=1280")


def test_a_microbatch_left_to_the_fit_is_no_number_yet() -> None:
    made = plan.make(run("update.tokens_per_microbatch=auto"))
    (row,) = [row for row in made.rows() if row.name == "tokens per micro-batch"]
    assert (row.value, row.how) == ("auto", "update.tokens_per_microbatch = 'auto': decided at the start by the fit")
    assert "tokens_per_microbatch" not in "".join(made.warnings)
    assert plan.from_json(made.to_json()) == made
    assert made.tokens_per_microbatch is None


@pytest.mark.parametrize(
    ("fraction", "warns"), [(0.0, True), (0.019, True), (0.02, False), (0.05, False), (0.06, True)]
)
def test_warmup_outside_two_to_five_percent_warns(fraction: float, warns: bool) -> None:
    assert ("warmup_fraction" in warnings(f"optimizer.warmup_fraction={fraction}")) is warns


def test_learning_rate_range_is_the_usual_one_at_7b_and_widens_away_from_it() -> None:
    assert learning_rate_range(7_000_000_000) == pytest.approx((1e-6, 5e-6))
    # an eighth of the size: x 8^(1/3) = 2 below, x sqrt(8) above
    assert learning_rate_range(875_000_000) == pytest.approx((2e-6, 5e-6 * 8**0.5))
    # eight times the size
    assert learning_rate_range(56_000_000_000) == pytest.approx((1e-6 / 8**0.5, 2.5e-6))
    assert learning_rate_range(10) == learning_rate_range(1_000_000)


def test_learning_rate_outside_the_range_of_the_size_warns() -> None:
    seven = 7_000_000_000
    assert "under the 1e-06 to 5e-06" in warnings("optimizer.learning_rate=9e-7", parameters=seven)
    assert "over the 1e-06 to 5e-06 usual in RL for a model of 7B" in warnings(
        "optimizer.learning_rate=6e-6", parameters=seven
    )
    assert "learning_rate" not in warnings("optimizer.learning_rate=3e-6", parameters=seven)
    assert "learning_rate" not in warnings("optimizer.learning_rate=3e-4", parameters=900_000)
    assert "a model of 900k" in warnings("optimizer.learning_rate=1e-6", parameters=900_000)
    assert "learning_rate" not in warnings("optimizer.learning_rate=3e-4")
    assert "any model" in warnings("optimizer.learning_rate=1e-2")
    assert "learning_rate" not in warnings("optimizer.learning_rate=1e-2", "optimizer.name=sgd", parameters=seven)


def test_adapters_stand_ten_times_the_rate_of_all_weights() -> None:
    seven = 7_000_000_000
    assert "under the 1e-05 to 5e-05 usual in RL for adapters (10 times that of all weights)" in warnings(
        "lora.rank=16", "optimizer.learning_rate=5e-6", parameters=seven
    )
    assert "learning_rate" not in warnings("lora.rank=16", "optimizer.learning_rate=2e-5", parameters=seven)
    assert "over the" in warnings("lora.rank=16", "optimizer.learning_rate=6e-5", parameters=seven)


def test_trained_parameters_are_stated_where_known() -> None:
    assert "trained parameters" not in str(plan.make(run()))
    assert "1,000" in str(plan.make(run(), 1000, 1000))
    adapted = str(plan.make(run("lora.rank=2"), 1000, 20))
    assert "20" in adapted
    assert "adapters (lora.rank) beside 1,000 frozen ones" in adapted


def test_warm_start_examples_far_outside_fine_tuning_warn() -> None:
    assert "warm_start" not in warnings("warm_start.updates=5", "warm_start.examples_per_update=128")
    assert "warm_start.examples_per_update = 129" in warnings(
        "warm_start.updates=5", "warm_start.examples_per_update=129"
    )
    assert "warm_start.examples_per_update = 3" in warnings("warm_start.updates=5", "warm_start.examples_per_update=3")
    assert "warm_start" not in warnings("warm_start.examples_per_update=512")
    assert "warm_start" not in warnings(
        "warm_start.updates=5", "warm_start.examples_per_update=512", "model.from_scratch=true"
    )


def test_gamma_per_token_and_low_lambda_warn_for_ppo_only() -> None:
    gamma = ("algorithm.gamma=0.99", "sampling.max_new_tokens=512")
    assert "over 512 tokens 0.6% of an end reward" in warnings("algorithm.name=ppo", *gamma)
    assert "gae_lambda = 0.8" in warnings("algorithm.name=ppo", "algorithm.gae_lambda=0.8")
    assert "gae_lambda" not in warnings("algorithm.name=ppo", "algorithm.gae_lambda=0.9")


def test_dynamic_sampling_and_greedy_answers_are_in_the_plan() -> None:
    sizes = ("sampling.prompts_per_step=16", "sampling.samples_per_prompt=4", "sampling.max_new_tokens=10")
    dapo = plan.make(run("algorithm.name=dapo", *sizes))
    assert (dapo.draws_per_step, dapo.sampled_tokens_per_step) == (10, 10 * 64 * 10)
    remax = plan.make(run("algorithm.name=remax", *sizes))
    assert (remax.greedy_samples_per_step, remax.sampled_tokens_per_step) == (16, (64 + 16) * 10)
    assert remax.total_samples == 64 * 100  # greedy answers don't train
    assert "draws per step" in str(dapo) and "10 x 64 x 10 " in str(dapo)
    assert "greedy answers per step" in str(remax) and "80 x 10 " in str(remax)
    assert "draws per step" not in str(plan.make(run(*sizes)))


def test_an_unclipped_loss_warns_where_the_policy_moves_within_a_step() -> None:
    assert "doesn't clip" in warnings("algorithm.name=rloo", "update.epochs_per_step=2")
    assert "doesn't clip" in warnings("algorithm.name=rloo", "update.samples_per_update=64")
    assert "doesn't clip" not in warnings("algorithm.name=rloo")
    assert "doesn't clip" not in warnings("update.epochs_per_step=2")


def test_a_name_whose_keys_are_all_anothers_warns() -> None:
    """As when a resolved run file gets another name on the command line."""
    dr_grpo = ("algorithm.advantage_scale=none", "algorithm.loss_weighting=fixed")
    assert "so this run is dr_grpo" in warnings(*dr_grpo)
    assert "so this run is" not in warnings("algorithm.name=dr_grpo")
    assert "so this run is" not in warnings("algorithm.name=dr_grpo", "algorithm.clip_high=0.25")
