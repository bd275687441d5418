"""Runs that train adapters, from file to closed books: recorded, killed, resumed, started from, measured, talked to."""

import json
import signal
import subprocess
import sys
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
from stoker.runner import Result, train
from stoker.trying import open_conversation

REWARDS = '''
def ends_low(completions, **columns):
    """Share of characters that are digits below 5: a random model can learn it."""
    return [sum(c in "01234" for c in text) / max(len(text), 1) for text in completions]
'''


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A small model with random weights, as a folder that transformers can load."""
    source = Model(path="embedded:tiny", from_scratch=True, device="cpu")
    load_model(source, seed=0).save_pretrained(tmp_path / "base")
    load_tokenizer(source).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def make_config(tmp_path: Path, base: Path) -> Callable[..., RunConfig]:
    (tmp_path / "rewards.py").write_text(REWARDS)
    data: dict[str, Any] = {
        "name": "run",
        "runs_dir": str(tmp_path / "runs"),
        "model": {"path": str(base)},
        "lora": {"rank": 4},
        "task": {"sources": [{"path": "stoker.embedded.addition:problems", "kwargs": {"digits": 1, "count": 60}}]},
        "validation": {"holdout": 8, "every_samples": 32},
        "sampling": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 4},
        "rewards": [{"function": f"{tmp_path / 'rewards.py'}:ends_low"}],
        "optimizer": {"learning_rate": 1e-2, "warmup_fraction": 0.0},
        "kl": {"coefficient": 0.05},
        "stop": {"steps": 2},
        "checkpoint": {"every_steps": 1, "keep": 5},
    }
    return lambda *overrides: config_load.from_dict(data, list(overrides))


def quiet(config: RunConfig, **options: Any) -> Result:
    return train(config, mode="quiet", **options)


def comparable(folder: Path) -> list[dict[str, Any]]:
    """Every metric that must not depend on when or how often a run was stopped."""
    ignored = ("time/", "memory/")
    return [
        {key: value for key, value in record.items() if key != "attempt" and not key.startswith(ignored)}
        for record in Run.load(folder).metrics
    ]


def adapters(result: Result) -> dict[str, torch.Tensor]:
    assert result.policy is not None
    return load_file(result.policy.parent / "adapters.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


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
    run_file = tmp_path / "killed.toml"
    run_file.write_text(config_load.to_toml(config))
    command = [sys.executable, "-m", "bench.victim", "save", "2", str(run_file)]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, timeout=150, check=False)
    assert done.returncode == -signal.SIGKILL
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
