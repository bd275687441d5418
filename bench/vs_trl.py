"""Steps of stoker beside steps of TRL's GRPOTrainer: the same model, rows, reward and settings, one after the other.

SmolLM2-135M; 64 samples a step (8 prompts x 8), up to 64 tokens, KL leash 0.04 by k3, temperature 1, loss `grpo`.
Both compute in the dtype this machine is fastest in; TRL with its own generation and no gradient checkpointing, fp32
weights, under autocast where that dtype is bfloat16. Each side is one process, and the two take turns, step by step,
the other one stopped. Left out are the first step of a process and evaluations. Other cases: prompts of 512 tokens,
answers of up to 512, and LoRA of rank 16. Ratios are stoker over TRL; memory is the process's peak; `reward` is held
out, after equal steps. `--quick`: the first case, smaller. `--case` picks one.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.common import ROOT, finish, median_and_spread, workspace
from bench.vs_trl_sides import MODEL, Case, steps_done

CASES = {
    "standard": Case(prompts=8, samples=8, new_tokens=64, steps=4),
    "lora": Case(prompts=8, samples=8, new_tokens=64, steps=3, lora=True),
    "long_prompts": Case(prompts=1, samples=8, new_tokens=64, steps=3, source="bench/long_tasks.py:long_prompts"),
    "long_answers": Case(prompts=1, samples=8, new_tokens=512, steps=3, source="bench/long_tasks.py:stories"),
}
QUICK = Case(prompts=2, samples=8, new_tokens=32, steps=2, held_out=8)
STEP_SECONDS, END_SECONDS, POLL_SECONDS = 1800, 1800, 0.01


class Side:
    """One trainer in its own process, which runs only while it is its turn."""

    def __init__(self, name: str, case: Case, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._name = name
        self._folder = folder
        self._log = folder / "log"
        self._done = 0
        given = json.dumps({"case": asdict(case), "folder": str(folder)})
        with self._log.open("w") as log:
            command = [sys.executable, "-m", "bench.vs_trl_sides", name, given]
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        self._process.send_signal(signal.SIGSTOP)

    def turn(self) -> float:
        """Seconds of its next step."""
        started = time.monotonic()
        self._process.send_signal(signal.SIGCONT)
        while (done := steps_done(self._name, self._folder)) == self._done:
            if self._process.poll() is not None or time.monotonic() - started > STEP_SECONDS:
                raise self._failed("gave no step")
            time.sleep(POLL_SECONDS)
        seconds = time.monotonic() - started
        self._process.send_signal(signal.SIGSTOP)
        self._done = done
        return seconds

    def end(self) -> dict[str, Any]:
        """What it found."""
        self._process.send_signal(signal.SIGCONT)
        if self._process.wait(timeout=END_SECONDS):
            raise self._failed(f"ended with {self._process.returncode}")
        found: dict[str, Any] = json.loads(self._log.read_text().strip().splitlines()[-1])
        return found

    def kill(self) -> None:
        """If it still runs."""
        self._process.kill()
        self._process.wait()

    def _failed(self, how: str) -> SystemExit:
        return SystemExit(f"{self._name} {how}:\n{self._log.read_text()[-3000:]}")


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Ratios of one case, ours over theirs."""
    sides = {name: Side(name, case, folder / name) for name in ("ours", "theirs")}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    try:
        for step in range(case.steps):
            for name, side in sides.items():
                seconds[name].append(side.turn())
            note = " (with start-up, left out)" if step == 0 else ""
            print(", ".join(f"{name} {found[-1]:.1f} s" for name, found in seconds.items()) + note, flush=True)
        found = {name: side.end() for name, side in sides.items()}
    finally:
        for side in sides.values():
            side.kill()
    for name, side_found in found.items():
        assert len(side_found["tokens"]) == case.steps, f"{name} recorded {len(side_found['tokens'])} steps"
        seconds[name] = [a - b for a, b in zip(seconds[name], side_found["evaluating"], strict=True)]
    ours, theirs = (seconds[name][1:] for name in ("ours", "theirs"))
    speed = [b / a for a, b in zip(ours, theirs, strict=True)]
    tokens = {name: sum(found[name]["tokens"][1:]) / sum(seconds[name][1:]) for name in sides}
    return {
        "steps_per_s_ratio": median_and_spread(speed)["median"],
        "tokens_per_s_ratio": tokens["ours"] / tokens["theirs"],
        "peak_memory_ratio": found["ours"]["peak"] / found["theirs"]["peak"],
        "reward_ours": found["ours"]["end"],
        "reward_theirs": found["theirs"]["end"],
        "reward_start": found["ours"]["start"],
        "spread": median_and_spread(speed),
        "seconds": seconds,
        "peak_bytes": {name: found[name]["peak"] for name in sides},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the first case alone, with smaller and fewer steps")
    parser.add_argument("--case", choices=tuple(CASES), help="this case alone")
    args = parser.parse_args()
    if not MODEL.is_dir():
        raise SystemExit(f"{MODEL} is missing: `make smollm2` makes it")
    folder = workspace("vs-trl")
    if args.quick:
        finish(measure(QUICK, folder / "quick"))
        return
    found = {}
    for name in [args.case] if args.case else CASES:
        print(f"{name}:", flush=True)
        found[name] = measure(CASES[name], folder / name)
        print(json.dumps(found[name]), flush=True)
    first, *_ = found.values()
    finish({**first, "cases": found})


if __name__ == "__main__":
    main()
