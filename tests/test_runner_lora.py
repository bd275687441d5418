"""Runs that train adapters, from file to closed books: recorded, killed, resumed, started from, measured, talked to."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from stoker.cli import app
from stoker.config import load as config_load
from stoker.config.schema import Model, RunConfig
from stoker.engine.local.load import load_model, load_tokenizer
from stoker.evaluating import evaluate_model
from stoker.record.read import Run
from stoker.runner import Result
from stoker.trying import open_conversation
from tests.runs import ENDS_LOW, comparable, quiet, same, short_run, victim


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A small model with random weights, as a folder that transformers can load."""
    source = Model(path="embedded:tiny", from_scratch=True, device="cpu")
    load_model(source, seed=0).save_pretrained(tmp_path / "base")
    load_tokenizer(source).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def make_config(tmp_path: Path, base: Path) -> Callable[..., RunConfig]:
    rewards = tmp_path / "rewards.py"
    rewards.write_text(ENDS_LOW)
    tables: dict[str, Any] = {
        "model": {"path": str(base)},
        "lora": {"rank": 4},
        "rewards": [{"function": f"{rewards}:ends_low"}],
        "optimizer": {"learning_rate": 1e-2, "warmup_fraction": 0.0},
        "kl": {"coefficient": 0.05},
    }
    return lambda *overrides: short_run(tmp_path, *overrides, **tables)


def adapters(result: Result) -> dict[str, torch.Tensor]:
    assert result.policy is not None
    return load_file(result.policy.parent / "adapters.safetensors")


@pytest.mark.parametrize("warm", [0, 3])
def test_peer_fault_19_the_first_kl_is_exactly_zero_and_the_ratio_one(
    make_config: Callable[..., RunConfig], warm: int
) -> None:
    result = quiet(make_config(f"warm_start.updates={warm}", "warm_start.examples_per_update=16"))
    first, second = Run.load(result.folder).metrics[1:3]
    assert first["kl/mean"] == 0
    assert second["kl/mean"] != 0
    assert first["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert first["policy/mismatch_max"] < 1e-5
    kept = load_file(result.folder / "reference" / "reference.safetensors")
    assert bool(kept) == bool(warm), "a copy of the adapters after a warm start, else none"


@pytest.mark.parametrize("checkpoint", ["adapter", "merged"])
def test_resume_is_the_run_never_stopped_bit_for_bit(make_config: Callable[..., RunConfig], checkpoint: str) -> None:
    more = (f"lora.checkpoint={checkpoint}", "warm_start.updates=3", "warm_start.examples_per_update=16")
    whole = quiet(make_config("name=whole", "stop.steps=4", *more))
    quiet(make_config("name=parts", "stop.steps=2", *more))
    parts = quiet(make_config("name=parts", "stop.steps=4", *more), resume=True)
    expected, found = comparable(whole.folder), comparable(parts.folder)
    del found[2:], expected[2:]  # step 2 was the first part's last, so it evaluated there
    assert found == expected
    assert same(adapters(whole), adapters(parts))


def test_failure_01_killed_while_saving_adapters(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    whole = quiet(make_config("name=whole", "stop.steps=3"))
    config = make_config("stop.steps=3")
    assert victim("save", 2, config, tmp_path) == -signal.SIGKILL
    result = quiet(config, resume=True)
    assert comparable(result.folder) == comparable(whole.folder)
    assert same(adapters(result), adapters(whole))


def test_what_a_checkpoint_holds_may_change_on_resume(make_config: Callable[..., RunConfig]) -> None:
    first = quiet(make_config())
    assert first.policy is not None
    assert (first.policy / "adapter_config.json").is_file()
    second = quiet(make_config("lora.checkpoint=merged", "stop.steps=3"), resume=True)
    assert second.policy is not None
    assert AutoModelForCausalLM.from_pretrained(second.policy).num_parameters() > 100_000


def test_adapters_are_started_from_measured_and_talked_to(make_config: Callable[..., RunConfig]) -> None:
    config = make_config("lora.rank=2", "lora.target_modules=['q_proj', 'v_proj']")
    first = quiet(config)
    last = Run.load(first.folder).metrics[-1]
    found = evaluate_model(str(first.folder), config, 1)["holdout"]
    assert found["reward"] == last["eval/holdout/reward"]
    assert len(open_conversation(first.folder, samples=2, temperature=1.0, max_new_tokens=4)("1+1=")) == 2

    start = ("lora.rank=2", "lora.target_modules=['q_proj', 'v_proj']", "optimizer.learning_rate=1e-30")
    second = quiet(make_config("name=second", f'start_from="{first.folder}"', *start))
    assert same(adapters(second), adapters(first))
    assert Run.load(second.folder).metrics[1]["kl/mean"] == 0, "the reference has the adapters too"


def test_dry_run_counts_what_is_trained(make_config: Callable[..., RunConfig], tmp_path: Path, base: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(config_load.to_toml(make_config("lora.target_modules=['q_proj', 'down_proj']")))
    sizes = json.loads((base / "config.json").read_text())
    hidden, inner, layers = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_hidden_layers"]
    expected = layers * 4 * (2 * hidden + hidden + inner)
    done = CliRunner().invoke(app, ["train", str(run_file), "--dry-run", "--json"])
    plan = json.loads(done.output)["batch_plan"]
    total = sum(tensor.numel() for tensor in load_file(base / "model.safetensors").values())
    assert (plan["trained_parameters"], plan["parameters"]) == (expected, total)
    done = CliRunner().invoke(app, ["train", str(run_file), "--dry-run"])
    assert f"{expected:,}" in done.output
    done = CliRunner().invoke(app, ["train", str(run_file), "--dry-run", "model.path=/no/such/folder"])
    assert done.exit_code == 0
    assert "trained parameters: not known yet: model.path = '/no/such/folder'" in done.output
