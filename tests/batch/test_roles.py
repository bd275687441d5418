"""Counted by hand from the run file."""

from pathlib import Path
from typing import Any

import pytest

from stoker.batch.footprint import of_run
from stoker.batch.roles import roles_of
from stoker.config.schema import RunConfig
from stoker.errors import ConfigError
from tests.runs import short_run

OVERRIDES = ("task.max_prompt_tokens=10", "sampling.max_new_tokens=6", "update.tokens_per_microbatch=70")


def config(folder: Path, *overrides: str, **tables: Any) -> RunConfig:
    return short_run(folder, *OVERRIDES, "kl.coefficient=0.1", "sampling.concurrent_samples=3", *overrides, **tables)


def test_a_policy_and_its_reference(tmp_path: Path) -> None:
    roles = roles_of(config(tmp_path, "model.dtype=float32"))
    assert list(roles) == ["policy", "reference"]
    shape, setup = roles["policy"]
    assert (setup.tokens, setup.examples) == (16, 4)  # 10 + 6; 70 // 16
    assert (setup.cache_tokens, setup.cache_bytes) == (1 * 10 + 3 * 6, 4)  # a group of 4
    found = of_run(config(tmp_path, "model.dtype=float32"), capacity=1e9)
    parameters = shape.parameters
    assert found.breakdown.row("policy: weights") == 4 * parameters
    assert found.breakdown.row("policy: optimizer states") == 8 * parameters
    assert found.breakdown.row("reference: weights") == 4 * parameters
    assert found.breakdown.row("reference: gradients") == 0
    assert found.most_examples > 0
    assert "policy: key-value cache" in str(found)


def test_sixteen_bits_a_critic_and_no_leash(tmp_path: Path) -> None:
    ppo = config(tmp_path, "model.dtype=bfloat16", "algorithm.name=ppo", "kl.coefficient=0")
    assert list(roles_of(ppo)) == ["policy", "critic"]
    shape, _ = roles_of(ppo)["policy"]
    found = of_run(ppo).breakdown
    for role in ("policy", "critic"):  # 16-bit weights, fp32 gradients, masters and two moments
        assert found.row(f"{role}: weights") == 2 * shape.parameters
        assert found.row(f"{role}: gradients") == 4 * shape.parameters
        assert found.row(f"{role}: optimizer states") == 12 * shape.parameters


def test_adapters_need_no_reference(tmp_path: Path) -> None:
    assert list(roles_of(config(tmp_path, "lora.rank=4", "lora.checkpoint=merged"))) == ["policy"]


@pytest.mark.parametrize(
    ("override", "says"), [("model.dtype=auto", "bfloat16"), ("update.tokens_per_microbatch=auto", "8192")]
)
def test_what_a_run_decides_when_it_starts_must_be_said(tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        roles_of(config(tmp_path, override))


def test_a_model_that_is_not_here_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="someone/model: no such folder"):
        roles_of(config(tmp_path, model={"path": "someone/model"}))
