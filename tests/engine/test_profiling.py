"""A profiled run is the run, and its profile adds up."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.config.schema import RunConfig
from stoker.engine.local.compiler import Library, load_library
from stoker.engine.profiling import torch_profiler
from stoker.errors import ConfigError, RewardError
from stoker.record.read import Run
from stoker.runner import Result, train
from tests.runs import comparable, final_weights, same, short_run


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., RunConfig]:
    def make(name: str, *overrides: str) -> RunConfig:
        tables = {"kl": {"coefficient": 0.1}, "stop": {"steps": 4}, "checkpoint": {"every_steps": 2}}
        return short_run(tmp_path, *overrides, name=name, **tables)

    return make


def profile_of(result: Result) -> dict[str, Any]:
    found = json.loads((result.folder / "profile.json").read_text())
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_profiling_leaves_every_bit_of_the_run_as_it_was(algorithm: str, make_config: Callable[..., RunConfig]) -> None:
    plain = train(make_config("plain", f"algorithm.name={algorithm}"), mode="quiet")
    profiled = train(make_config("profiled", f"algorithm.name={algorithm}"), mode="quiet", profile_steps=2)
    assert comparable(plain.folder) == comparable(profiled.folder)
    assert same(final_weights(plain), final_weights(profiled))


def test_the_profile_adds_up_and_the_trace_opens(make_config: Callable[..., RunConfig]) -> None:
    # compiled functions leave no events of their products
    result = train(make_config("run", "sampling.compiled=false"), mode="quiet", profile_steps=2)
    found = profile_of(result)
    assert found["steps"] == [2, 3]
    assert found["matmul_peak_flops"] > 0
    phases = found["phases"]
    assert {"sample", "reward", "score", "update", "evaluate", "checkpoint", "other"} == phases.keys()
    assert sum(phase["seconds"] for phase in phases.values()) == pytest.approx(found["seconds"])
    drawn = {record["step"]: record["sample/tokens"] for record in Run.load(result.folder).metrics if record["step"]}
    assert phases["sample"]["tokens"] == drawn[2] + drawn[3]
    for name in ("sample", "score", "update"):
        phase = phases[name]
        assert 0.9 < phase["executed_flops"] / phase["algorithmic_flops"] < 3
        assert phase["hfu"] / phase["mfu"] == pytest.approx(phase["executed_flops"] / phase["algorithmic_flops"])
        assert any(operator["name"] == "aten::mm" for operator in phase["operators"])
        assert 0 < phase["in_operators"] < phase["seconds"]
    assert phases["reward"]["mfu"] is None
    with gzip.open(result.folder / "trace.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"stoker/sample", "stoker/update", "aten::mm"} <= names
    assert not (result.folder / "trace.json").exists()


def test_work_that_compiled_functions_hide_is_not_called_small(make_config: Callable[..., RunConfig]) -> None:
    library = load_library()
    if not isinstance(library, Library) or not library.dots:
        pytest.skip("products are PyTorch's operators here")
    sampling = profile_of(train(make_config("run"), mode="quiet", profile_steps=1))["phases"]["sample"]
    assert sampling["executed_flops"] < sampling["algorithmic_flops"] / 2
    assert sampling["mfu"] > 0
    assert sampling["hfu"] is None


def test_a_run_too_short_to_profile_is_told_before_it_starts(make_config: Callable[..., RunConfig]) -> None:
    config = make_config("short")
    with pytest.raises(ConfigError, match=r"stop\.steps = 5"):
        train(config, mode="quiet", profile_steps=4)
    assert not (Path(config.runs_dir) / "short").exists()


def test_a_run_that_ends_early_profiles_what_there_is(
    make_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of its four steps were done before; of the other two the first is never profiled."""
    config = make_config("resumed")
    train(config.model_copy(update={"stop": config.stop.model_copy(update={"steps": 2})}), mode="quiet")
    result = train(config, resume=True, allow_changes=True, mode="quiet", profile_steps=3)
    assert profile_of(result)["steps"] == [4]
    assert "after 1 of the 3 steps" in capsys.readouterr().out
    longer = config.model_copy(update={"stop": config.stop.model_copy(update={"steps": 5})})
    again = train(longer, resume=True, allow_changes=True, mode="quiet", profile_steps=3)
    assert not (again.folder / "profile.json").exists()  # and not the earlier one's
    assert "nothing was profiled" in capsys.readouterr().out


def test_an_error_in_a_profiled_step_stays_the_error(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    reward = tmp_path / "breaks.py"
    reward.write_text(
        "calls = 0\n"
        "def breaks(completions, **columns):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    return [0.0 if calls < 3 else 1 / 0 for _ in completions]\n"
    )
    config = make_config("broken", f'rewards.0.function="{reward}:breaks"', "validation.holdout=0")
    with pytest.raises(RewardError, match="division by zero"):
        train(config, mode="quiet", profile_steps=2)
    assert not (tmp_path / "runs" / "broken" / "profile.json").exists()
    with torch_profiler():  # the run left none behind, or this would be refused
        pass
