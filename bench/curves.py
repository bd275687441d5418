"""What `read_curve` finds in real trainings with planted faults, and how often it alarms on healthy ones.

Thresholds were frozen on one family, classifiers of scikit-learn's digits, with seeds below 1000 (`FROZEN`). Six more
(`SEEN`) were looked at while the rules were made: mistakes of method, and a few thresholds, were mended on them. Five
that nobody had looked at (`LATER`) were then scored in three steps, with seeds from 5000 on and mistakes of method
mended after each of the first two. At first sight that gave

    arm, tumours     59 of 64 found (92 %)   4 alarms of 60 healthy
    ratings, codes   52 of 71 found (73 %)   5 alarms of 33 healthy
    shapes           28 of 33 found (85 %)   0 alarms of 27 healthy

so the bar wasn't met on families never looked at. What runs here are new seeds of all.

Wanted: the planted cause in the first two findings in at least 90 % of the faulty trainings of `LATER`, and findings of
any kind in at most 5 % of at least 100 healthy trainings of them.

- Every family's base rate is the best of a grid (rates by factors of two, two seeds, two batches: `curve_grids`).
- Healthy is decided by outcome, never by the reader: trainings at random settings (batch, learning rate, schedule,
  warm-up, clipping, seed) around the best of the grid, whose final held-out loss is within 3 % of the fall from the
  untrained loss to the grid's best.
- A planted fault counts where the final held-out loss is more than 6 % of that fall above the grid's best, and a
  plateau where held-out losses of the second half stay at the end's; the others are listed as harmless.
- Planted: learning rate x 30 and / 30; batch 1 at the usual batch's rate; a batch of a sixteenth of all samples
  with its rate by the root rule; a bad share of the data (30 % wrong answers, 10 % rows of numbers 20 times as large, a
  stretch of 20 % wrong answers in unshuffled epochs); a plateau (the rate falls to nothing after a sixth of the
  training, or units that give nothing).

The same is scored for readings without the agreement of neighbouring gradients, and without held-out losses.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.common import arguments, finish
from bench.curve_families import SEEN as OLD
from bench.curve_grids import HEALTHY, Grid, gridded
from bench.curve_later import LATER
from bench.curve_tasks import Family, Spoil, target
from stoker.batch.reading.curve import Curve
from stoker.batch.reading.found import Cause
from stoker.batch.reading.reader import read_curve
from stoker.batch.trainings.history import History
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Plan, train_anew

FROZEN = {name: family for name, family in OLD.items() if name.startswith("digits")}
SEEN = {name: family for name, family in OLD.items() if name not in FROZEN}
BLIND = ("agreements", "held_out")
RECALL, ALARMS, LEAST_HEALTHY = 0.90, 0.05, 100
FIRST_SEED = 7_000
QUICK = ("arm", "codes")

KINDS: dict[str, Cause] = {
    "rate x 30": "rate too high",
    "rate / 30": "rate too low",
    "batch 1": "batch too small",
    "few updates": "batch too large",
    "bad data": "bad data",
    "plateau": "plateau",
}
SPOILED: tuple[tuple[Spoil, float], ...] = (("labels", 0.3), ("rows", 0.1), ("shard", 0.2))


@dataclass(frozen=True)
class Run:
    """One training, and what was planted in it."""

    family: str
    kind: str
    """Empty: nothing planted."""
    variant: str
    history: History


def settings(family: Family, seed: int, kind: str) -> tuple[Setting, str]:
    """What a training is given, and the variant of its fault."""
    draw = random.Random(f"{family.name} {kind} {seed}")
    base, samples = family.examples, family.samples
    common: dict[str, Any] = {
        "decay": draw.choice(["constant", "linear", "cosine"]),
        "warmup_samples": draw.choice([0, samples // 20]),
        "seed": seed,
    }
    size = base * draw.choice([1, 2])
    if kind == "":
        size = max(2, round(base * draw.choice([0.25, 0.5, 1, 2, 4])))
        factor = draw.choice([0.5, 0.7, 1, 1.4, 2])
        clip = draw.choice([None, 5.0])
        return Setting(size, base, rate_factor=factor, clip_norm=clip, **common), ""
    if kind.startswith("rate"):
        return Setting(size, base, rate_factor=30 if kind == "rate x 30" else 1 / 30, **common), ""
    if kind == "batch 1":
        return Setting(1, **common), ""
    if kind == "few updates":
        return Setting(min(samples // 16, len(family.data()[0])), base, rule="sqrt", **common), ""
    if kind == "bad data":
        return Setting(size, base, **common), SPOILED[seed % 3][0]
    variant = ("fade", "dead")[seed % 2]
    return Setting(size, base, **common | ({"decay": "constant"} if variant == "fade" else {})), variant


def trained(family: Family, seed: int, kind: str) -> Run:
    setting, variant = settings(family, seed, kind)
    samples = min(family.samples, 1_500) if kind == "batch 1" else family.samples
    told: dict[str, Any] = {}
    if kind == "bad data":
        told = {"spoil": variant, "share": dict(SPOILED)[variant]}  # type: ignore[index]
    elif kind == "plateau":
        told = {"dead": True} if variant == "dead" else {"fade": samples // setting.examples_per_update // 6}
    if kind == "few updates":
        samples = 16 * setting.examples_per_update
    plan = Plan(samples, kind=family.optimizer, agreement=True)
    return Run(family.name, kind, variant, train_anew(lambda: target(family, **told), setting, plan))


def runs(family: Family, healthy: int, faulty: int) -> Iterator[Run]:
    for kind in ("", *KINDS):
        for seed in range(FIRST_SEED, FIRST_SEED + (faulty if kind else healthy)):
            yield trained(family, seed, kind)


def harmed(run: Run, grid: Grid) -> bool:
    """By what was planted; a plateau that isn't one, as what still lives goes on learning, doesn't count."""
    if run.kind == "plateau":
        second = [each.loss for each in run.history.evaluations[len(run.history.evaluations) // 2 :]]
        if any(loss - run.history.final_loss > HEALTHY * (grid.untrained - grid.best) for loss in second):
            return False
    return grid.harmed(run.history)


def score(done: Sequence[Run], grids: Mapping[str, Grid], *, blind: str = "") -> dict[str, Any]:
    """Of readings; `blind`: without "agreements", or without "held_out"."""
    planted: Counter[tuple[str, str]] = Counter()
    found: Counter[tuple[str, str]] = Counter()
    harmless: Counter[str] = Counter()
    healthy: Counter[str] = Counter()
    alarms: Counter[str] = Counter()
    wrong = []
    for run in done:
        grid = grids[run.family]
        curve = Curve.of(run.history)
        reading = read_curve(replace(curve, **{blind: ()}) if blind else curve)  # type: ignore[arg-type]
        if not run.kind:
            if grid.healthy(run.history):
                healthy[run.family] += 1
                alarms[run.family] += bool(reading.findings)
                wrong += [row(run, grid, reading.causes)] if reading.findings else []
        elif not harmed(run, grid):
            harmless[run.kind] += 1
        else:
            planted[run.kind, run.family] += 1
            if KINDS[run.kind] in reading.causes[:2]:
                found[run.kind, run.family] += 1
            else:
                wrong.append(row(run, grid, reading.causes))

    def share(place: int, name: str) -> dict[str, Any]:
        keys = [key for key in planted if key[place] == name]
        all_of_it = sum(planted[key] for key in keys)
        return {"planted": all_of_it, "found": sum(found[key] for key in keys)}

    by_kind = {kind: share(0, kind) | {"harmless": harmless[kind]} for kind in KINDS}
    shares = {kind: each["found"] / each["planted"] for kind, each in by_kind.items() if each["planted"]}
    worst = min(shares, key=lambda kind: shares[kind])
    names = list(dict.fromkeys(run.family for run in done))
    return {
        "recall_top2": sum(found.values()) / max(1, sum(planted.values())),
        "worst_kind": {"kind": worst, "recall": shares[worst]},
        "false_alarm": sum(alarms.values()) / max(1, sum(healthy.values())),
        "healthy_runs": sum(healthy.values()),
        "by_kind": by_kind,
        "by_family": {name: share(1, name) | {"healthy": healthy[name], "alarms": alarms[name]} for name in names},
        "cells": {f"{kind} / {name}": [found[kind, name], planted[kind, name]] for kind, name in planted},
        "wrong": wrong,
    }


def row(run: Run, grid: Grid, causes: Sequence[Cause]) -> dict[str, Any]:
    regret = grid.regret(run.history)
    setting = run.history.setting
    return {
        "family": run.family, "planted": run.kind, "variant": run.variant, "seed": setting.seed,
        "examples": setting.examples_per_update, "rate_factor": setting.rate_factor,
        "regret": round(regret, 3) if math.isfinite(regret) else None, "read": list(causes),
    }  # fmt: skip


def table(scored: dict[str, Any]) -> str:
    names = list(scored["by_family"])
    lines = ["".join([f"{'found in the first two':24}", *(f"{name:>16}" for name in names), f"{'all':>12}  harmless"])]
    for kind, each in scored["by_kind"].items():
        cells = [scored["cells"].get(f"{kind} / {name}", [0, 0]) for name in names]
        shown = "".join(f"{f'{found}/{planted}':>16}" for found, planted in cells)
        lines.append(f"{kind:24}{shown}{each['found']:>8}/{each['planted']:<3}  {each['harmless']}")
    counts = [f"{each['alarms']}/{each['healthy']}" for each in scored["by_family"].values()]
    lines.append("".join([f"{'alarms of healthy':24}", *(f"{each:>16}" for each in counts)]))
    alarms = f"{scored['false_alarm']:.1%} of {scored['healthy_runs']} healthy"
    lines.append(f"recall {scored['recall_top2']:.1%}; false alarms {alarms}")
    return "\n".join(lines)


def scored(title: str, families: Iterable[Family], healthy: int, faulty: int) -> dict[str, Any]:
    """Of `healthy` trainings meant to be so in each family, and `faulty` of each kind."""
    done: list[Run] = []
    grids = {}
    print(f"{title}\n")
    for family in families:
        grids[family.name] = grid = gridded(family)
        print(grid, flush=True)
        done += runs(grid.family, healthy, faulty)
    found = score(done, grids)
    print(f"\n{table(found)}")
    for name in BLIND:
        each = found[f"without_{name}"] = score(done, grids, blind=name)
        print(f"without {name}: recall {each['recall_top2']:.1%}, false alarms {each['false_alarm']:.1%}")
    print(flush=True)
    return found


def main() -> None:
    torch.set_num_threads(1)
    quick = arguments(__doc__ or "").quick
    few = [family for name, family in LATER.items() if name in QUICK]
    later = scored("later families, new seeds", few if quick else LATER.values(), *((4, 1) if quick else (40, 6)))
    others = {} if quick else {
        "seen": scored("families that rules were mended on, new seeds", SEEN.values(), 6, 1),
        "frozen": scored("the family frozen on, new seeds", FROZEN.values(), 6, 1),
    }  # fmt: skip
    recall, alarms, healthy = later["recall_top2"], later["false_alarm"], later["healthy_runs"]
    passed = recall >= RECALL and alarms <= ALARMS and healthy >= LEAST_HEALTHY
    finish(later | others | {"passed": None if quick else passed})


if __name__ == "__main__":
    main()
