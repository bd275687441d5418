"""Runs killed with SIGKILL, each resumed until it ends: are they the run that was never killed, bit for bit?

Compared: every metric of every step except time and memory, and the bytes of the final weights and optimizer
state. Some kills come from inside (`bench.victim`), provably within a save, a rollout, an update, or a line
of the record; the others from outside, at times drawn from a fixed seed.
"""

import hashlib
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.common import ROOT, arguments, finish, stoker_train, workspace
from stoker.record.read import Run

RUN_FILE = ROOT / "examples" / "addition.toml"
SMALLER = (
    "stop.steps=8",
    "checkpoint.every_steps=2",
    "warm_start.updates=20",
    "validation.holdout=32",
    "validation.every_samples=256",
    "sampling.prompts_per_step=16",
    "sampling.samples_per_prompt=8",
    "kl.coefficient=0.02",
    "kl.adaptive=true",
    "update.samples_per_update=64",
    "update.tokens_per_microbatch=512",
)
INSIDE = (
    *(("save", nth) for nth in (1, 2, 3, 4, 5)),
    ("rename", 2),
    ("rename", 3),
    *(("sample", nth) for nth in (12, 25, 33)),
    *(("update", nth) for nth in (25, 32, 40)),
    ("step", 24),
    ("step", 31),
    ("record", 3),
)
FROM_OUTSIDE = 4
START_SECONDS = 600
QUICK = (("save", 2), ("sample", 20), ("update", 30))


def fingerprint(folder: Path) -> dict[str, Any]:
    """What must not depend on having been killed."""
    run = Run.load(folder)
    ignored = ("time/", "memory/")
    metrics = [
        {key: value for key, value in record.items() if not key.startswith(ignored) and key != "attempt"}
        for record in run.metrics
    ]
    last = max(folder.glob("checkpoints/step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    weights = {
        str(path.relative_to(last)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(last.rglob("*.safetensors"))
    }
    return {"metrics": metrics, "weights": weights, "step": last.name}


def overrides(runs: Path, name: str) -> list[str]:
    return [*SMALLER, f"runs_dir={runs}", f"name={name}"]


def killed_inside(runs: Path, name: str, point: str, nth: int) -> bool:
    """Start a run that kills itself; True if it did."""
    command = [sys.executable, "-m", "bench.victim", point, str(nth), str(RUN_FILE), *overrides(runs, name)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != -9:
        print(f"{name}: not killed at {point} {nth}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.returncode == -9


def killed_outside(runs: Path, name: str, after: float) -> bool:
    """Start a run and kill it `after` seconds from its first sign of training; True if it was still running."""
    command = [sys.executable, "-m", "stoker.cli", "train", str(RUN_FILE), *overrides(runs, name), "--quiet"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    clock = runs / name / "clock.jsonl"
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and not (clock.exists() and '"step":1' in clock.read_text()):
        if time.monotonic() > deadline:
            process.kill()
            raise SystemExit(f"{name} did not begin to train in {START_SECONDS} s")
        time.sleep(0.01)
    time.sleep(after)
    process.kill()
    return process.wait() == -9


def leftovers(runs: Path, name: str) -> bool:
    """A half-made checkpoint folder: the kill came inside a save."""
    return any((runs / name / "checkpoints").glob(".step_*.tmp-*"))


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Where two runs differ, in words."""
    lines = [f"weights of {name}" for name, value in expected["weights"].items() if found["weights"].get(name) != value]
    if len(expected["metrics"]) != len(found["metrics"]):
        lines.append(f"{len(found['metrics'])} steps instead of {len(expected['metrics'])}")
    for before, after in zip(expected["metrics"], found["metrics"], strict=False):
        keys = [key for key in {*before, *after} if json.dumps(before.get(key)) != json.dumps(after.get(key))]
        lines += [f"step {before['step']} {key}: {before.get(key)} != {after.get(key)}" for key in sorted(keys)]
    return lines


def main() -> None:
    args = arguments(__doc__ or "")
    runs = workspace("kill-resume")
    done = stoker_train(RUN_FILE, overrides(runs, "never-killed"))
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    expected = fingerprint(runs / "never-killed")
    pauses = random.Random(0)
    plan = [(f"{point}-{nth}", point, nth) for point, nth in (QUICK if args.quick else INSIDE)]
    plan += [(f"outside-{i}", "outside", i) for i in range(0 if args.quick else FROM_OUTSIDE)]
    identical, counts, failures = 0, dict.fromkeys(("save", "sample", "update", "other"), 0), []
    for name, point, nth in plan:
        killed = (
            killed_outside(runs, name, pauses.uniform(0.05, 2.0))
            if point == "outside"
            else killed_inside(runs, name, point, nth)
        )
        in_save = leftovers(runs, name)
        resumed = stoker_train(RUN_FILE, overrides(runs, name), resume=True)
        lines = [resumed.stdout + resumed.stderr] if resumed.returncode else []
        lines = lines or differences(expected, fingerprint(runs / name))
        identical += killed and not lines
        counts["save" if in_save else point if point in counts else "other"] += killed
        if lines or not killed:
            failures.append({"run": name, "killed": killed, "differences": lines[:5]})
        print(f"{name}: killed {killed}, in a save {in_save}, identical {not lines}", *lines[:3], flush=True)
    finish(
        {
            "runs": len(plan),
            "identical": identical,
            "inside_save": counts["save"],
            "inside_sampling": counts["sample"],
            "inside_update": counts["update"],
            "elsewhere": counts["other"],
            "metrics_compared": sum(len(record) for record in expected["metrics"]),
            "failures": failures,
        }
    )


if __name__ == "__main__":
    main()
