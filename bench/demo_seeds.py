"""The main job over seeds: held-out accuracy of the addition example before and after RL, and a control.

The control is the same run with rewards shuffled over the samples of a step. It must not learn.
"""

import time
from pathlib import Path

from bench.common import ROOT, arguments, finish, side_by_side, stoker_train, workspace
from stoker.config import load as config_load
from stoker.record.read import Run
from stoker.rl.tasks import read_rows

RUN_FILE = ROOT / "examples" / "addition.toml"


def accuracies(folder: Path) -> list[float]:
    """Held-out greedy accuracy, from the warm-started policy to the last."""
    run = Run.load(folder)
    return [accuracy for _, accuracy in run.series("eval/holdout/accuracy")]


def one(seed: int, runs: Path, *, shuffled: bool) -> dict[str, float]:
    name = f"{'control' if shuffled else 'seed'}-{seed}"
    overrides = [f"seed={seed}", f"name={name}", f"runs_dir={runs}"]
    if shuffled:
        overrides += ['rewards.0.function="bench/shuffled_reward.py:shuffled"', "rewards.0.range=[-1.0,1.0]"]
        overrides += ["validation.early_stop_after=0"]
    started = time.monotonic()
    done = stoker_train(RUN_FILE, overrides)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout}{done.stderr}")
    found = accuracies(runs / name)
    result = {"seed": seed, "start": found[0], "end": found[-1], "seconds": time.monotonic() - started}
    print(f"{name}: held-out accuracy {found[0]:.3f} -> {found[-1]:.3f} in {result['seconds']:.0f} s", flush=True)
    return result


def disjoint(seed: int) -> bool:
    """No held-out prompt is among those that warm start and RL draw from."""
    rows = read_rows(config_load.load(RUN_FILE, [f"seed={seed}"]))
    train = {str(row.content) for found in rows.train.values() for row in found}
    held_out = {str(row.content) for found in rows.validation.values() for row in found}
    return bool(held_out) and not train & held_out


def main() -> None:
    args = arguments(__doc__ or "")
    seeds = range(2 if args.quick else 5)
    runs = workspace("demo-seeds")
    jobs = [(seed, False) for seed in seeds] + [(seed, True) for seed in range(1 if args.quick else 2)]
    found = side_by_side(lambda job: one(job[0], runs, shuffled=job[1]), jobs)
    results, controls = found[: len(seeds)], found[len(seeds) :]
    change = max(abs(control["end"] - control["start"]) for control in controls)
    finish(
        {
            "seeds": results,
            "control_change": change,
            "controls": controls,
            "held_out_disjoint": all(disjoint(seed) for seed in seeds),
            "passed": sum(one["start"] <= 0.6 and one["end"] >= 0.9 for one in results),
        }
    )


if __name__ == "__main__":
    main()
