"""A run's engine from its run file."""

from pathlib import Path

import pytest

from stoker.engine.local.assembly import assemble, policy_source
from stoker.engine.local.load import load_tokenizer
from stoker.errors import CheckpointError, ConfigError
from tests.runs import short_run


def test_sampler_and_learner_share_the_model_and_the_plan_knows_its_size(tmp_path: Path) -> None:
    config = short_run(tmp_path, "lora.rank=4", "lora.checkpoint=merged")
    engine = assemble(config, load_tokenizer(policy_source(config)))
    assert engine.learner._model is engine.model is engine.sampler._model
    assert engine.plan.parameters == sum(
        p.numel() for name, p in engine.model.named_parameters() if "lora_" not in name
    )
    assert engine.plan.trained_parameters == sum(p.numel() for p in engine.model.parameters() if p.requires_grad)


def test_a_micro_batch_that_is_not_decided_is_refused(tmp_path: Path) -> None:
    config = short_run(tmp_path, "update.tokens_per_microbatch=auto")
    with pytest.raises(ConfigError, match="here give one"):
        assemble(config, load_tokenizer(policy_source(config)))


def test_the_policy_comes_from_start_from_where_there_is_one(tmp_path: Path) -> None:
    assert policy_source(short_run(tmp_path)).path == "embedded:tiny"
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    source = policy_source(short_run(tmp_path, f'start_from="{tmp_path / "policy"}"'))
    assert (source.path, source.from_scratch) == (str(tmp_path / "policy"), False)
    with pytest.raises(CheckpointError):
        policy_source(short_run(tmp_path, f'start_from="{tmp_path / "absent"}"'))
