"""A run from its file to its closed books, on the real engine with a tiny model: what is learned, recorded, resumed."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stoker import runner, wiring
from stoker.config import load as config_load
from stoker.config.schema import RunConfig
from stoker.engine.local import assembly
from stoker.engine.local.critic import start_critic
from stoker.engine.local.learner import LocalLearner
from stoker.engine.local.load import load_model
from stoker.errors import CheckpointError, ConfigError, DataError, ModelError, RunError
from stoker.record.metrics import undescribed
from stoker.record.read import Run, read_samples
from stoker.rl.types import Objective, TrainBatch
from stoker.runner import train
from tests.runs import ENDS_LOW, comparable, final_weights, found_fit, quiet, same, short_run, victim

REWARDS = f"""
{ENDS_LOW}
def constant(completions, **columns):
    return [0.5] * len(completions)
"""


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """make_config("a.b=c", ..., table={...}): a run of two small steps that rewards low digits."""
    (tmp_path / "rewards.py").write_text(REWARDS)

    def make(*overrides: str, **tables: Any) -> RunConfig:
        base = {"rewards": [{"function": f"{tmp_path / 'rewards.py'}:ends_low"}], "kl": {"coefficient": 0.0}}
        return short_run(tmp_path, *overrides, **(base | tables))

    return make


# -- what a run leaves behind --------------------------------------------------------------------


def test_a_run_records_every_step_and_its_policy_loads_in_transformers(make_config: Callable[..., RunConfig]) -> None:
    result = quiet(make_config())
    assert (result.step, result.exit_code, result.ending) == (2, 0, "finished its 2 steps")
    run = Run.load(result.folder)
    assert [record["step"] for record in run.metrics] == [0, 1, 2]
    assert all(undescribed(record) == [] for record in run.metrics)
    assert result.policy is not None
    assert AutoModelForCausalLM.from_pretrained(result.policy).num_parameters() > 100_000
    for name in ("config.toml", "batch_plan.json", "environment.json", "metrics.jsonl", "clock.jsonl", "events.jsonl"):
        assert (result.folder / name).stat().st_size > 0
    assert len(read_samples(result.folder / "samples" / "step_1.jsonl.gz")) == 16


def test_every_device_second_is_in_one_phase(make_config: Callable[..., RunConfig]) -> None:
    run = Run.load(quiet(make_config()).folder)
    spans = sorted(run.spans, key=lambda span: span.start_ns)
    assert spans[0].start_ns == 0
    assert all(before.end_ns == after.start_ns for before, after in pairwise(spans))
    for record in run.metrics[1:]:
        phases = sum(value for key, value in record.items() if key.startswith("time/") and key != "time/step")
        phases -= record["time/tokens_per_second"]
        assert phases == pytest.approx(record["time/step"], abs=0.02)


def test_the_reward_is_learned(make_config: Callable[..., RunConfig]) -> None:
    config = make_config("stop.steps=25", "validation.every_samples=0", "checkpoint.every_steps=100")
    rewards = [value for _, value in Run.load(quiet(config).folder).series("reward/mean")]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_on_policy_updates_see_a_ratio_of_one(make_config: Callable[..., RunConfig], algorithm: str) -> None:
    config = make_config(
        f"algorithm.name={algorithm}", "kl.coefficient=0.05", "sampling.temperature=0.7", "sampling.top_p=0.9"
    )
    first = Run.load(quiet(config).folder).metrics[1]
    assert first["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert first["policy/mismatch_max"] < 1e-4
    assert first["kl/sequence"] == pytest.approx(0.0, abs=1e-4)  # the reference is the initial policy


def test_the_noise_of_measured_steps_is_in_the_record_and_in_the_end(
    make_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    """In the first of a step's updates, of every second step: no gradient is another for it."""
    more = ("stop.steps=4", "update.epochs_per_step=2", "update.samples_per_update=8", "validation.every_samples=0")
    measured = train(make_config("name=a", "record.noise_every_steps=2", *more), mode="table")
    said = capsys.readouterr()
    assert "noise scale" in said.out + said.err and "within their groups" in said.out + said.err
    plain = quiet(make_config("name=b", "record.noise_every_steps=0", *more))
    records = Run.load(measured.folder).metrics[1:]
    assert ["batch/noise_trace" in record for record in records] == [False, True, False, True]
    found, expected = comparable(measured.folder)[2], comparable(plain.folder)[2]
    assert found["reward/mean"] == expected["reward/mean"]
    assert found["optim/grad_norm"] == pytest.approx(expected["optim/grad_norm"], rel=1e-3)


def test_ppo_over_several_epochs_and_updates(make_config: Callable[..., RunConfig]) -> None:
    config = make_config("algorithm.name=ppo", "update.epochs_per_step=2", "update.samples_per_update=8")
    metrics = Run.load(quiet(config).folder).metrics
    assert [record["optim/updates"] for record in metrics[1:]] == [4.0, 4.0]
    assert metrics[2]["policy/weight_version"] == 8.0
    assert "critic/explained_variance" in metrics[1]


def test_the_critic_alone_moves_while_it_warms_up(make_config: Callable[..., RunConfig]) -> None:
    config = make_config("algorithm.name=ppo", "critic.warmup_steps=2", "stop.steps=2")
    result = quiet(config)
    before = load_model(config.model, config.seed).state_dict()
    after = final_weights(result)
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())


def test_an_adaptive_leash_follows_the_measured_kl(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(
        "kl.coefficient=0.1", "kl.adaptive=true", "kl.target=50.0", "stop.steps=3", "kl.horizon_samples=160"
    )
    used = [value for _, value in Run.load(quiet(config).folder).series("kl/coefficient")]
    # The first measurement is the baseline; far below the target the coefficient then falls by 0.2 n / horizon.
    assert used == pytest.approx([0.1, 0.1, 0.1 * (1 - 0.2 * 16 / 160)])


# -- going on ------------------------------------------------------------------------------------


def test_resume_is_the_run_never_stopped_bit_for_bit(make_config: Callable[..., RunConfig]) -> None:
    more = (
        "kl.coefficient=0.05",
        "kl.adaptive=true",
        "kl.horizon_samples=160",
        "warm_start.updates=3",
        "warm_start.examples_per_update=16",
        "record.noise_every_steps=1",
    )
    whole = quiet(make_config("name=whole", "stop.steps=4", *more))
    quiet(make_config("name=parts", "stop.steps=2", *more))
    parts = quiet(make_config("name=parts", "stop.steps=4", *more), resume=True)
    expected = comparable(whole.folder)
    found = comparable(parts.folder)
    del found[2:], expected[2:]  # step 2 was the first part's last, so it evaluated there
    assert found == expected
    assert "batch/noise_between" in expected[-1] and "batch/noise_trace" in expected[-1]
    assert same(final_weights(whole), final_weights(parts))


def test_peer_fault_21_resume_at_an_epochs_end_repeats_and_skips_nothing(make_config: Callable[..., RunConfig]) -> None:
    """52 training rows in steps of 4: the epoch ends with step 13; every cut gives the same prompts and losses."""

    def prompts(folder: Path) -> list[list[str]]:
        steps = range(1, 16)
        return [[one["id"] for one in read_samples(folder / "samples" / f"step_{n}.jsonl.gz")] for n in steps]

    every = ("sampling.samples_per_prompt=2", "validation.every_samples=0", "checkpoint.keep=100")
    whole = quiet(make_config("name=whole", "stop.steps=15", *every))
    names = prompts(whole.folder)
    epoch = {name.split("/")[0] for step in names[:13] for name in step}
    assert len(epoch) == 52
    for cut in (12, 13, 14):
        quiet(make_config(f"name=cut{cut}", f"stop.steps={cut}", *every))
        resumed = quiet(make_config(f"name=cut{cut}", "stop.steps=15", *every), resume=True)
        assert prompts(resumed.folder) == names
        losses = [Run.load(r.folder).series("optim/loss") for r in (whole, resumed)]
        assert losses[0] == losses[1]


def test_a_finished_run_can_be_extended(make_config: Callable[..., RunConfig]) -> None:
    quiet(make_config())
    result = quiet(make_config("stop.steps=3"), resume=True)
    assert result.step == 3
    assert [record["step"] for record in Run.load(result.folder).metrics] == [0, 1, 2, 3]


def test_a_changed_leash_takes_effect_on_resume(make_config: Callable[..., RunConfig]) -> None:
    quiet(make_config("kl.coefficient=0.05"))
    resumed = quiet(make_config("kl.coefficient=0.2", "stop.steps=3"), resume=True, allow_changes=True)
    assert [value for _, value in Run.load(resumed.folder).series("kl/coefficient")] == [0.05, 0.05, 0.2]


def test_a_new_run_starts_from_any_checkpoint(make_config: Callable[..., RunConfig]) -> None:
    first = quiet(make_config("algorithm.name=ppo"))
    start = first.folder / "checkpoints" / "step_1"
    config = make_config("name=second", f'start_from="{start}"', "algorithm.name=ppo", "optimizer.learning_rate=1e-30")
    second = quiet(config)
    assert same(load_file(start / "policy" / "model.safetensors"), final_weights(second))
    critic = load_file(first.folder / "checkpoints" / "step_2" / "critic.safetensors")
    for place in (first.folder, first.folder / "checkpoints" / "step_2"):  # a run stands for its newest checkpoint
        started = start_critic(make_config(f'start_from="{place}"'), load_model(config.model, seed=1))
        assert torch.equal(started.head.weight, critic["head.weight"])


# -- failures: what the user sees, and what is never lost ------------------------------------------


def test_failure_01_killed_while_saving(
    make_config: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = quiet(make_config("name=whole", "stop.steps=3"))
    config = make_config("stop.steps=3")
    assert victim("save", 2, config, tmp_path) == -signal.SIGKILL
    result = train(config, resume=True, mode="table")
    assert "step 2 incomplete, resuming 1" in capsys.readouterr().out
    assert comparable(result.folder) == comparable(whole.folder)
    assert same(final_weights(result), final_weights(whole))


def test_failure_02_killed_elsewhere_keeps_the_redone_time_on_the_books(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    whole = quiet(make_config("name=whole", "stop.steps=4", "checkpoint.every_steps=2"))
    config = make_config("stop.steps=4", "checkpoint.every_steps=2")
    assert victim("update", 4, config, tmp_path) == -signal.SIGKILL
    result = quiet(config, resume=True)
    run = Run.load(result.folder)
    assert comparable(result.folder) == comparable(whole.folder)
    assert run.redone_steps() == [3]
    assert run.redone_seconds() > 0
    assert any(event["kind"] == "resume" and event["step"] == 2 for event in run.events)


def start_process(config: RunConfig, tmp_path: Path) -> subprocess.Popen[str]:
    """`stoker train` in a process, once its first step is under way."""
    run_file = tmp_path / "run.toml"
    run_file.write_text(config_load.to_toml(config))
    command = [sys.executable, "-m", "stoker.cli", "train", str(run_file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
    metrics = Path(config.runs_dir) / config.name / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while process.poll() is None and not (metrics.exists() and '"step":1' in metrics.read_text()):
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.02)
    return process


def end_of(process: subprocess.Popen[str]) -> str:
    """What it printed; it is gone in any case."""
    try:
        return process.communicate(timeout=30)[0]
    finally:
        process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_failure_03_a_signal_saves_and_says_how_to_go_on(
    make_config: Callable[..., RunConfig], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    config = make_config("stop.steps=5000", "checkpoint.every_steps=100000", "validation.every_samples=0")
    process = start_process(config, tmp_path)
    process.send_signal(number)
    output = end_of(process)
    assert process.returncode == code
    assert f"stopped by {number.name}" in output
    assert "--resume" in output
    folder = Path(config.runs_dir) / config.name
    step = Run.load(folder).metrics[-1]["step"]
    assert (folder / "checkpoints" / f"step_{step}" / "manifest.json").exists()
    resumed = quiet(
        make_config(f"stop.steps={step + 1}", "checkpoint.every_steps=100000", "validation.every_samples=0"),
        resume=True,
    )
    assert resumed.step == step + 1


@pytest.mark.parametrize("holdout", [0, 8])
def test_failure_03_a_signal_does_not_wait_for_a_reward_that_hangs(
    make_config: Callable[..., RunConfig], tmp_path: Path, holdout: int
) -> None:
    hanging = tmp_path / "hanging.py"
    hanging.write_text(
        "import os, signal, time\n"
        "def hang(completions, **columns):\n"
        "    os.kill(os.getppid(), signal.SIGTERM)\n"
        "    time.sleep(600)\n"
    )
    rewards = [{"function": f"{hanging}:hang", "timeout_s": 60}]
    started = time.monotonic()
    result = quiet(make_config(f"validation.holdout={holdout}", rewards=rewards))
    assert result.exit_code == 143
    assert time.monotonic() - started < 30
    for state in result.folder.glob("checkpoints/step_0/run_state.json"):  # the abandoned step's answers left no trace
        assert json.loads(state.read_text())["sampler"]["answer_lengths"] == {}


def test_failure_03_a_signal_in_the_warm_start_says_how_to_go_on(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(config: Any, learner: Any, prompts: Any, encode: Any, progress: Callable[..., None]) -> None:
        signal.raise_signal(signal.SIGTERM)
        progress(1, 2, 0.0)

    monkeypatch.setattr("stoker.runner.warm_start", stopped)
    result = quiet(make_config("warm_start.updates=2", "warm_start.examples_per_update=4"))
    assert (result.exit_code, result.step, result.policy) == (143, 0, None)
    said = capsys.readouterr().out
    assert "stopped by SIGTERM before its first step" in said
    assert "--resume" in said


def test_a_run_that_failed_in_setup_is_not_sent_to_a_resume(make_config: Callable[..., RunConfig]) -> None:
    with pytest.raises(ModelError) as error:
        quiet(make_config("model.path=/no/such/folder"))
    assert "start the run again" in "\n".join(error.value.__notes__)
    assert "--resume" not in "\n".join(error.value.__notes__)


def test_a_second_model_that_can_not_be_loaded_is_named_by_its_role(make_config: Callable[..., RunConfig]) -> None:
    with pytest.raises(ModelError, match=r"reference model: .*'/no/such/folder': no such folder"):
        quiet(make_config("reference.path=/no/such/folder", "kl.coefficient=0.1"))


def test_a_lost_reference_is_named_with_what_to_do(make_config: Callable[..., RunConfig]) -> None:
    result = quiet(make_config("kl.coefficient=0.1"))
    (result.folder / "reference" / "reference.safetensors").unlink()
    with pytest.raises(CheckpointError, match="reference model can't be restored .* from a copy"):
        quiet(make_config("kl.coefficient=0.1", "stop.steps=3"), resume=True)


def test_failure_05_an_unwritable_run_folder_fails_before_the_model_loads(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "load_model", lambda *_: pytest.fail("the model was loaded"))
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="can't be written"):
        quiet(make_config(f'runs_dir="{tmp_path / "file"}"'))


def poison(monkeypatch: pytest.MonkeyPatch, updates: set[int]) -> None:
    """NaN in the gradient of these updates, counted from 1."""
    original, count = LocalLearner.forward_backward, [0]

    def forward_backward(self: LocalLearner, batch: TrainBatch, objective: Objective) -> dict[str, float]:
        metrics = original(self, batch, objective)
        count[0] += 1
        if count[0] in updates:
            next(self._model.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]
        return metrics

    monkeypatch.setattr(LocalLearner, "forward_backward", forward_backward)


def test_failure_07_nan_gradient_makes_no_update_and_keeps_the_batch(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(monkeypatch, {2})
    result = quiet(make_config("stop.steps=3"))
    output = capsys.readouterr().out
    assert "step 2: NaN or infinity in loss or gradient" in output
    run = Run.load(result.folder)
    assert [record["policy/weight_version"] for record in run.metrics[1:]] == [1.0, 1.0, 2.0]
    assert len(read_samples(result.folder / "samples" / "bad_step_2.jsonl.gz")) == 16
    assert all(torch.isfinite(tensor).all() for tensor in final_weights(result).values())


def test_failure_07_stops_after_several_in_a_row(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {2, 3, 4})
    with pytest.raises(RunError, match="3 updates in a row had a NaN or infinite") as caught:
        quiet(make_config("stop.steps=9"))
    notes = "\n".join(caught.value.__notes__)
    assert "last good step: 3" in notes
    assert "--resume" in notes


def test_failure_08_a_gradient_spike_is_skipped_and_its_prompts_named(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original, count = LocalLearner.forward_backward, [0]

    def forward_backward(self: LocalLearner, batch: TrainBatch, objective: Objective) -> dict[str, float]:
        metrics = original(self, batch, objective)
        count[0] += 1
        if count[0] == 10:
            for parameter in self._model.parameters():
                parameter.grad.mul_(1000)  # type: ignore[union-attr]
        return metrics

    monkeypatch.setattr(LocalLearner, "forward_backward", forward_backward)
    result = quiet(make_config("stop.steps=10", "optimizer.skip_grad_norm_ratio=20.0", "validation.every_samples=0"))
    assert "step 10: gradient spike" in capsys.readouterr().out
    event = next(event for event in Run.load(result.folder).events if event["kind"] == "skipped_update")
    assert len(event["samples"]) == 16
    assert all(name.startswith("problems:") for name in event["samples"])


def test_failure_15_groups_without_variance_are_shown_with_advice(
    make_config: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = quiet(make_config(f'rewards.0.function="{tmp_path / "rewards.py"}:constant"'))
    assert Run.load(result.folder).metrics[1]["reward/zero_variance_groups"] == 1.0
    output = capsys.readouterr().out
    assert "100% of the groups have equal rewards" in output
    assert "samples_per_prompt" in output


def test_failure_23_everything_truncated_alarms_with_length_advice(
    make_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    quiet(make_config("sampling.max_new_tokens=1", "sampling.temperature=0.01"))
    output = capsys.readouterr().out
    assert "every answer was cut at max_new_tokens = 1" in output
    assert "Raise sampling.max_new_tokens" in output


def test_failure_25_too_few_rows_are_found_before_the_model_loads(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "load_model", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(DataError, match=r"52 training rows .*prompts_per_step = 64"):
        quiet(make_config("sampling.prompts_per_step=64"))


def test_failure_30_a_changed_run_file_is_shown_and_needs_a_flag(make_config: Callable[..., RunConfig]) -> None:
    quiet(make_config())
    changed = make_config("stop.steps=3", "sampling.temperature=0.5")
    with pytest.raises(ConfigError, match=r"sampling\.temperature: 1\.0 -> 0\.5") as caught:
        quiet(changed, resume=True)
    assert "--allow-changes" in str(caught.value)
    result = quiet(changed, resume=True, allow_changes=True)
    events = [event for event in Run.load(result.folder).events if event["kind"] == "config_change"]
    assert any("sampling.temperature" in event["message"] and event["breaks"] for event in events)


def test_failure_31_another_number_of_processes_is_refused(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RunError, match=r"WORLD_SIZE = 2.*one process"):
        quiet(make_config())


def test_failure_31_state_of_more_processes_is_refused(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    from stoker.engine.resume import read_state

    result = quiet(make_config())
    state = result.folder / "checkpoints" / "step_2" / "run_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"processes": 4}))
    with pytest.raises(CheckpointError, match=r"written by 4 processes.*start_from"):
        read_state(state.parent)


def test_failure_43_two_runs_in_one_folder(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = make_config("stop.steps=5000", "validation.every_samples=0")
    process = start_process(config, tmp_path)
    try:
        with pytest.raises(RunError, match=rf"in use by pid {process.pid} on host"):
            quiet(config, resume=True)
    finally:
        process.kill()
        process.communicate(timeout=30)


def test_a_fresh_run_does_not_overwrite_an_old_one(make_config: Callable[..., RunConfig]) -> None:
    quiet(make_config())
    with pytest.raises(RunError, match="already has results"):
        quiet(make_config())


def test_a_run_in_another_process_gives_the_same_bits(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    here = quiet(make_config("name=here"))
    run_file = tmp_path / "there.toml"
    run_file.write_text(config_load.to_toml(make_config("name=there")))
    command = [sys.executable, "-m", "stoker.cli", "train", str(run_file), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["step"] for line in lines if "reward/mean" in line] == [1, 2]
    there = here.folder.parent / "there"
    generators = [load_file(folder / "checkpoints" / "step_2" / "rng.safetensors") for folder in (here.folder, there)]
    assert same(*generators)  # a model whose own code draws repeats too
    assert comparable(there) == comparable(here.folder)


def test_auto_dtype_is_chosen_once_and_stays_the_runs_own(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that finds another dtype fastest goes on in the run's."""
    monkeypatch.setattr(runner, "fastest_dtype", lambda device: "bfloat16")
    folder = quiet(make_config("model.dtype=auto")).folder
    assert config_load.load(folder / "config.toml").model.dtype == "bfloat16"
    monkeypatch.setattr(runner, "fastest_dtype", lambda device: "float32")
    assert quiet(make_config("model.dtype=auto", "stop.steps=3"), resume=True).step == 3
    assert config_load.load(folder / "config.toml").model.dtype == "bfloat16"
    saved = load_file(folder / "checkpoints" / "step_3" / "policy" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}


def test_an_automatic_micro_batch_is_found_once_and_stays_the_runs_own(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit: the resumed run cuts its updates as it did, whatever a fit would find now."""
    asked: list[int] = []

    def fit(config: RunConfig, prompt_tokens: int, on_trial: Callable[..., None]) -> Any:
        asked.append(prompt_tokens)
        found = found_fit(40)
        for left, trial in zip((3, None), found.trials, strict=True):
            on_trial(trial, left)
        return found

    monkeypatch.setattr(wiring, "fit_microbatch", fit)
    automatic = ("update.tokens_per_microbatch=auto", "kl.coefficient=0.05")
    whole = quiet(make_config("name=whole", "stop.steps=4", *automatic))
    train(make_config("name=parts", "stop.steps=2", *automatic))
    said = capsys.readouterr().out
    assert "update.tokens_per_microbatch = 40: 700 tokens ran under 2 GiB, 707 ran out of memory" in said
    assert "707 tokens: out of memory (2.0 s); about 3 more, ETA 0:00:06" in said
    monkeypatch.setattr(wiring, "fit_microbatch", lambda *_: pytest.fail("the fit was made again"))
    parts = quiet(make_config("name=parts", "stop.steps=4", *automatic), resume=True)
    expected, found = comparable(whole.folder), comparable(parts.folder)
    del found[2:], expected[2:]
    assert found == expected
    assert same(final_weights(whole), final_weights(parts))
    assert asked == [4, 4], "the task's longest prompt, 'a+b='"
    folder = parts.folder
    assert config_load.load(folder / "config.toml").update.tokens_per_microbatch == 40
    assert json.loads((folder / "batch_plan.json").read_text())["tokens_per_microbatch"] == 40
    assert json.loads((folder / "fit.json").read_text())["size"] == 40
    assert [event["tokens_per_microbatch"] for event in Run.load(folder).events if event["kind"] == "fit"] == [40]
    assert Run.load(folder).metrics[-1]["batch/tokens_per_microbatch"] == 40
    changed = quiet(
        make_config("name=parts", "stop.steps=5", "update.tokens_per_microbatch=50"), resume=True, allow_changes=True
    )
    assert Run.load(changed.folder).metrics[-1]["batch/tokens_per_microbatch"] == 50, "a number of one's own counts"


def test_a_signal_ends_a_fit_at_once(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit(*_: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("it went on")

    monkeypatch.setattr(wiring, "fit_microbatch", fit)
    result = quiet(make_config("update.tokens_per_microbatch=auto"))
    assert (result.exit_code, result.step) == (143, 0)
    assert "start the run again" in capsys.readouterr().out


@pytest.mark.slow
def test_an_automatic_micro_batch_by_real_trials(make_config: Callable[..., RunConfig]) -> None:
    tiny = (
        "sampling.prompts_per_step=1",
        "sampling.samples_per_prompt=2",
        "stop.steps=1",
        "validation.every_samples=0",
    )
    result = quiet(make_config("update.tokens_per_microbatch=auto", "model.device=cpu", *tiny))
    found = json.loads((result.folder / "fit.json").read_text())
    # 2 samples of a prompt of 4 tokens and an answer of 4, its last one left out
    assert (found["size"], found["bound"], found["unit"]) == (14, "data", "tokens")
    assert {trial["end"] for trial in found["trials"]} == {"ran"}
    assert config_load.load(result.folder / "config.toml").update.tokens_per_microbatch == 14
