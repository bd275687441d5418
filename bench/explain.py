"""`stoker batch explain` on real trainings, each verdict held against trainings both ways.

The present batch, and the recommended one (for "stay": half and double of it), are trained at equal samples, in turns,
from seeds that the explanation hasn't seen. Confirmed is

- larger: it takes at least a tenth less time, and isn't plainly worse;
- smaller: the present one is plainly worse;
- stay: the double saves less than a tenth of the time or is plainly worse, and the present one isn't plainly worse than
  the half.

Plainly worse: a higher held-out loss with every seed, by more than one standard deviation over seeds, and by more than
chance makes of so many (`tell_apart`, 95 %).
"""

import statistics
from dataclasses import dataclass, replace
from typing import Any

from bench.common import arguments, finish
from stoker.batch.curve import SPENT
from stoker.batch.explaining.explained import Explained
from stoker.batch.explaining.procedure import explain
from stoker.batch.explaining.verdict import worse
from stoker.batch.scanning.arms import tell_apart
from stoker.batch.target import Maker
from stoker.batch.trainings.training import Plan, train_anew

FRESH = (100, 101, 102, 103, 104)
"""Seeds."""


@dataclass(frozen=True)
class Case:
    """A training as it is."""

    name: str
    maker: Maker
    present: int
    way: str
    """That the training was chosen for."""
    samples: int | None = None


CLICKS = Maker("examples/batch_ctr.py:make_target", ("4",))
DIGITS = Maker("examples/batch_digits.py:make_target", ("8",))
CASES = (
    Case("clicks, a batch that leaves the machine idle", CLICKS, 128, "larger"),
    Case("clicks, throughput spent", CLICKS, 4096, "stay"),
    Case("digits, few updates", DIGITS, 512, "smaller"),
)
SEEDS = 4
"""Of an explanation."""


@dataclass(frozen=True)
class Arm:
    """What trainings at one batch came to."""

    losses: tuple[float, ...]
    seconds: float
    """Of a training, the median over seeds."""


def both_ways(case: Case, found: Explained, sizes: tuple[int, ...]) -> dict[int, Arm]:
    """Fresh trainings at each size, in turns."""
    plan = Plan(found.scan.equal.samples, evaluations=4)
    losses: dict[int, list[float]] = {size: [] for size in sizes}
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for turn, seed in enumerate(FRESH):
        for size in sizes if turn % 2 == 0 else reversed(sizes):
            history = train_anew(case.maker, replace(found.scan.tuned(size).setting, seed=seed), plan)
            losses[size].append(history.final_loss)
            seconds[size].append(sum(history.seconds))
    return {size: Arm(tuple(losses[size]), statistics.median(seconds[size])) for size in sizes}


def plainly(losses: tuple[float, ...], reference: tuple[float, ...]) -> bool:
    """Worse, and told apart."""
    apart = tell_apart([losses, reference])
    return worse(losses, reference, (apart and apart.half_width) or 0.0)


def confirmed(way: str, present: Arm, other: dict[str, Arm]) -> bool:
    def faster(arm: Arm) -> bool:
        return arm.seconds <= present.seconds / (1 + SPENT)

    if way == "larger":
        return faster(other["recommended"]) and not plainly(other["recommended"].losses, present.losses)
    if way == "smaller":
        return plainly(present.losses, other["recommended"].losses)
    not_up = "double" not in other or not faster(other["double"]) or plainly(other["double"].losses, present.losses)
    return not_up and ("half" not in other or not plainly(present.losses, other["half"].losses))


def examine(case: Case) -> dict[str, Any]:
    found = explain(case.maker, case.present, samples=case.samples, seeds=SEEDS)
    verdict = found.verdict
    print(f"== {case.name}\n{found}\n", flush=True)
    trained = [arm.setting.examples_per_update for arm in found.scan.arms]
    named = {"recommended": verdict.recommended}
    if verdict.way == "stay":
        named = {"half": case.present // 2, "double": case.present * 2}
    named = {name: size for name, size in named.items() if size in trained}
    arms = both_ways(case, found, (case.present, *named.values()))
    here = arms[case.present]
    right = confirmed(verdict.way, here, {name: arms[size] for name, size in named.items()})
    for size, arm in arms.items():
        mean, spread = statistics.fmean(arm.losses), statistics.stdev(arm.losses)
        print(
            f"   {size:>6,} per update: loss {mean:.4g} +- {spread:.2g}, {arm.seconds / here.seconds:.2f} of the time"
        )
    print(f"   {verdict.way}: {'confirmed' if right else 'NOT CONFIRMED'}\n", flush=True)
    return {
        "case": case.name,
        "present": case.present,
        "way": verdict.way,
        "wanted": case.way,
        "recommended": verdict.recommended,
        "confirmed": right,
        "losses": {size: list(arm.losses) for size, arm in arms.items()},
        "time": {size: arm.seconds / here.seconds for size, arm in arms.items()},
    }


def main() -> None:
    cases = CASES[2:] if arguments(__doc__ or "").quick else CASES
    rows = [examine(case) for case in cases]
    finish(
        {
            "cases": len(rows),
            "ways": [row["way"] for row in rows],
            "as_wanted": sum(row["way"] == row["wanted"] for row in rows),
            "confirmed": sum(row["confirmed"] for row in rows),
            "rows": rows,
        }
    )


if __name__ == "__main__":
    main()
