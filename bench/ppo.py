"""PPO on the addition example: does its critic explain the returns, and does the policy get there?

Explained variance is 1 - var(return - value) / var(return) over the tokens of a step's first update, which the
critic has not been trained on; the median over the second half of the run counts. `accuracy` is held out and greedy.
"""

import statistics
from pathlib import Path

from bench.common import ROOT, arguments, finish, side_by_side, stoker_train, workspace
from stoker.record.read import Run

RUN_FILE = ROOT / "examples" / "addition_ppo.toml"


def one(seed: int, runs: Path) -> dict[str, float]:
    name = f"seed-{seed}"
    done = stoker_train(RUN_FILE, [f"seed={seed}", f"name={name}", f"runs_dir={runs}"])
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    run = Run.load(runs / name)
    explained = [value for _, value in run.series("critic/explained_variance")]
    accuracy = [value for _, value in run.series("eval/holdout/accuracy")]
    result = {
        "seed": seed,
        "start": accuracy[0],
        "end": accuracy[-1],
        "explained_variance": statistics.median(explained[len(explained) // 2 :]),
    }
    print(result, flush=True)
    return result


def main() -> None:
    args = arguments(__doc__ or "")
    runs = workspace("ppo")
    finish({"seeds": side_by_side(lambda seed: one(seed, runs), range(1 if args.quick else 2))})


if __name__ == "__main__":
    main()
