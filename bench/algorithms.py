"""Every algorithm on the addition example: held-out accuracy before and after RL, over seeds.

The run file is the demo's, leash and learning rate included; only `algorithm.name` changes (and SETTINGS, where it
must), so recipes are compared under one budget of steps, not each at its best. An algorithm passes where every seed
ends at 0.85 or more. `--quick`: one seed.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from bench.common import ROOT, finish, side_by_side, stoker_train, workspace
from bench.demo_seeds import accuracies
from stoker.config.algorithm import RECIPES
from stoker.record.read import Run

RUN_FILE = ROOT / "examples" / "addition.toml"
BAR = 0.85
SETTINGS: dict[str, list[str]] = {
    "ppo": ["algorithm.value_clip=0", "critic.optimizer.learning_rate=1e-3"],  # the critic starts from zero
}
"""What an algorithm can't do without on this task, beside its recipe."""


def one(name: str, seed: int, runs: Path, steps: int | None) -> dict[str, Any]:
    run_name = f"{name}-{seed}"
    overrides = [f"algorithm.name={name}", f"seed={seed}", f"name={run_name}", f"runs_dir={runs}"]
    overrides += [*SETTINGS.get(name, []), *([f"stop.steps={steps}"] if steps else [])]
    started = time.monotonic()
    done = stoker_train(RUN_FILE, overrides)
    if done.returncode:
        raise SystemExit(f"{run_name} failed:\n{done.stdout}{done.stderr}")
    accuracy, run = accuracies(runs / run_name), Run.load(runs / run_name)
    rewards = [value for _, value in run.series("reward/mean")]
    tail = max(1, min(10, len(rewards) // 3))
    result = {
        "algorithm": name,
        "seed": seed,
        "start": accuracy[0],
        "end": accuracy[-1],
        "reward_first": sum(rewards[:tail]) / tail,
        "reward_last": sum(rewards[-tail:]) / tail,
        "samples_drawn": sum(value for _, value in run.series("sample/count")),
        "seconds": time.monotonic() - started,
    }
    print(
        f"{run_name:<34} held-out {result['start']:.3f} -> {result['end']:.3f}, reward "
        f"{result['reward_first']:.3f} -> {result['reward_last']:.3f}, {result['samples_drawn']:,.0f} samples drawn, "
        f"{result['seconds']:.0f} s",
        flush=True,
    )
    return result


def table(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By algorithm: the seeds' accuracies, and whether each reaches the bar."""
    rows = []
    for name in dict.fromkeys(result["algorithm"] for result in results):
        ends = [result["end"] for result in results if result["algorithm"] == name]
        starts = [result["start"] for result in results if result["algorithm"] == name]
        rows.append({"algorithm": name, "start": starts, "end": ends, "pass": min(ends) >= BAR})
    width = max(len(row["algorithm"]) for row in rows)
    print(f"{'':<{width}}  start             end               worst >= {BAR}")
    for row in rows:
        cells = ("  ".join(f"{value:.2f}" for value in row[key]) for key in ("start", "end"))
        print(f"{row['algorithm']:<{width}}  " + "  ".join(f"{cell:<16}" for cell in cells) + f"  {row['pass']}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--seeds", type=int, help="how many; 3 without --quick")
    parser.add_argument("--steps", type=int, help="RL steps instead of the example's")
    parser.add_argument("--only", nargs="+", choices=list(RECIPES), help="these algorithms instead of all")
    args = parser.parse_args()
    runs = workspace("algorithms")
    seeds = range(args.seeds or (1 if args.quick else 3))
    jobs = [(name, seed) for name in args.only or RECIPES for seed in seeds]
    results = side_by_side(lambda job: one(*job, runs, args.steps), jobs)
    rows = table(results)
    finish({"algorithms": rows, "passed": sum(row["pass"] for row in rows), "of": len(rows), "runs": results})


if __name__ == "__main__":
    main()
