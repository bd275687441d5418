"""Short runs on the embedded model, and how two of them are compared."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from stoker.batch.certificate import Fit, Trial
from stoker.config import load as config_load
from stoker.config.schema import RunConfig
from stoker.record.read import Run
from stoker.runner import Result, train

ENDS_LOW = '''
def ends_low(completions, **columns):
    """Share of characters that are digits below 5: a random model can learn it."""
    return [sum(c in "01234" for c in text) / max(len(text), 1) for text in completions]
'''
"""A reward function, for a file of the test's."""


def short_run(folder: Path, *overrides: str, **tables: Any) -> RunConfig:
    """Two small steps with folder/runs as runs_dir; `tables` replace whole tables, `overrides` are as on the command
    line.
    """
    base: dict[str, Any] = {
        "name": "run",
        "runs_dir": str(folder / "runs"),
        "model": {"path": "embedded:tiny", "from_scratch": True},
        "task": {"sources": [{"path": "stoker.embedded.addition:problems", "kwargs": {"digits": 1, "count": 60}}]},
        "validation": {"holdout": 8, "every_samples": 32},
        "sampling": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 4},
        "rewards": [{"function": "exact"}],
        "optimizer": {"learning_rate": 1e-3, "warmup_fraction": 0.0},
        "stop": {"steps": 2},
        "checkpoint": {"every_steps": 1, "keep": 5},
    }
    return config_load.from_dict(base | tables, list(overrides))


def quiet(config: RunConfig, **options: Any) -> Result:
    return train(config, mode="quiet", **options)


def victim(point: str, nth: int, config: RunConfig, folder: Path) -> int:
    """Train in a process that kills itself with SIGKILL at the nth pass of a point; its exit code."""
    run_file = folder / "killed.toml"
    run_file.write_text(config_load.to_toml(config))
    command = [sys.executable, "-m", "bench.victim", point, str(nth), str(run_file)]
    root = Path(__file__).resolve().parent.parent
    return subprocess.run(command, cwd=root, capture_output=True, timeout=150, check=False).returncode


def comparable(folder: Path) -> list[dict[str, Any]]:
    """Every metric that must not depend on when or how often a run was stopped."""
    ignored = ("time/", "memory/")
    return [
        {key: value for key, value in record.items() if key != "attempt" and not key.startswith(ignored)}
        for record in Run.load(folder).metrics
    ]


def final_weights(result: Result) -> dict[str, torch.Tensor]:
    assert result.policy is not None
    return load_file(result.policy / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def found_fit(size: int, **fields: Any) -> Fit:
    """A fit of two trials that gave `size` tokens under 2 GiB."""
    trials = (
        Trial(707, "out of memory", 0, None, None, 2.0, 2**31, "MemoryError: "),
        Trial(size, "ran", 5, 10**9, 0.5, 3.0, 2**31),
    )
    given: dict[str, Any] = {
        "unit": "tokens",
        "size": size,
        "without_headroom": 700,
        "first_failed": 707,
        "bound": "memory",
        "steps": 5,
        "batch": (),
        "limit_bytes": 2**31,
        "headroom": 0.05,
        "device": "cpu",
        "ranks": 1,
        "in_process": False,
        "peak_bytes": 10**9,
        "seconds_per_step": 0.5,
        "trials": trials,
        "parts": (),
        "limiting": None,
        "largest_layer": None,
        "levers": (),
        "environment": {},
    }
    return Fit(**(given | fields))
