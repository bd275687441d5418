"""What `read_curve` finds in real trainings with planted faults, and how often it alarms on healthy ones.

Thresholds were chosen on one family, small image classifiers on scikit-learn's digits with seeds below 100. Three more
(`CORRECTED_ON`) showed mistakes of method, which were mended. The last three (`UNSEEN`) were never looked at before the
final score: they are what counts. Seeds of all are new.

Wanted: the planted cause in the first two findings in at least 90 % of the faulty trainings of the unseen families, and
findings of any kind in at most 5 % of at least 100 healthy trainings of all but the first.

- Healthy is decided by outcome, never by the reader: trainings at random settings (batch, learning rate, schedule,
  warm-up, clipping, seed) around the best known, whose final held-out loss is within 3 % of the fall from the untrained
  loss to the family's best.
- A planted fault counts where it did harm by the same measure, and a plateau where held-out losses of the second half
  stay within that of the end; the others are listed as harmless.
- Planted: learning rate x 30 and / 30; batch 1 at the usual batch's rate; a batch of a sixteenth of all samples
  with its rate by the root rule; a bad share of the data (30 % wrong answers, 10 % rows of numbers 20 times as large, a
  stretch of 20 % wrong answers in unshuffled epochs); a plateau (the rate falls to nothing after a sixth of the
  training, or units that give nothing).

The same is scored for readings without the agreement of neighbouring gradients, and without held-out losses.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.common import arguments, finish
from bench.curve_tasks import FAMILIES, Family, Spoil, target
from stoker.batch.reading.curve import Curve
from stoker.batch.reading.found import Cause
from stoker.batch.reading.reader import read_curve
from stoker.batch.trainings.history import History
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Plan, train_anew

FROZEN_ON = ("digits", "digits, conv")
CORRECTED_ON = ("clicks", "photograph", "patches")
UNSEEN = ("bytes", "topic", "texture")
HEALTHY = 0.03
"""Of the fall from the untrained held-out loss to the family's best."""
BLIND = ("agreements", "held_out")
RECALL, ALARMS, LEAST_HEALTHY = 0.90, 0.05, 100
FIRST_SEED = 5_000

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
        size = max(2, round(base * draw.choice([0.125, 0.25, 0.5, 1, 2, 4])))
        factor = draw.choice([1 / 3, 1 / 2, 1, 2, 3])
        clip = draw.choice([None, 5.0])
        return Setting(size, base, rate_factor=factor, clip_norm=clip, **common), ""
    if kind.startswith("rate"):
        return Setting(size, base, rate_factor=30 if kind == "rate x 30" else 1 / 30, **common), ""
    if kind == "batch 1":
        return Setting(1, **common), ""
    if kind == "few updates":
        return Setting(samples // 16, base, rule="sqrt", **common), ""
    if kind == "bad data":
        return Setting(size, base, **common), SPOILED[seed % 3][0]
    variant = ("fade", "dead")[seed % 2]
    return Setting(size, base, **common | ({"decay": "constant"} if variant == "fade" else {})), variant


def trained(family: Family, seed: int, kind: str) -> Run:
    setting, variant = settings(family, seed, kind)
    samples = min(family.samples, 3_000) if kind == "batch 1" else family.samples
    told: dict[str, Any] = {}
    if kind == "bad data":
        told = {"spoil": variant, "share": dict(SPOILED)[variant]}  # type: ignore[index]
    elif kind == "plateau":
        told = {"dead": True} if variant == "dead" else {"fade": samples // setting.examples_per_update // 6}
    plan = Plan(samples, kind=family.optimizer, agreement=True)
    return Run(family.name, kind, variant, train_anew(lambda: target(family, **told), setting, plan))


def runs(names: Sequence[str], healthy: int, faulty: int) -> Iterator[Run]:
    for name in names:
        for kind in ("", *KINDS):
            for seed in range(FIRST_SEED, FIRST_SEED + (faulty if kind else healthy)):
                yield trained(FAMILIES[name], seed, kind)


def untrained(name: str) -> float:
    """Held-out loss, mean of three first weights."""
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        made = target(FAMILIES[name])
        assert made.validate is not None
        with torch.no_grad():
            found.append(float(made.validate(made.model)))  # type: ignore[arg-type]
    return sum(found) / 3


class Outcomes:
    """How much worse than its family's best a training ended."""

    def __init__(self, done: Sequence[Run]) -> None:
        names = {run.family for run in done}
        self._first = {name: untrained(name) for name in names}
        self._best = {
            name: min(run.history.final_loss for run in done if run.family == name and not run.kind) for name in names
        }

    def regret(self, run: Run) -> float:
        """Of the fall to the best; infinite where it diverged."""
        best = self._best[run.family]
        return (run.history.final_loss - best) / (self._first[run.family] - best)

    def healthy(self, run: Run) -> bool:
        return self.regret(run) <= HEALTHY

    def harmed(self, run: Run) -> bool:
        """By what was planted; a plateau that isn't one, as what still lives goes on learning, doesn't count."""
        if run.kind == "plateau":
            fall = self._first[run.family] - self._best[run.family]
            second = [each.loss for each in run.history.evaluations[len(run.history.evaluations) // 2 :]]
            if any(loss - run.history.final_loss > HEALTHY * fall for loss in second):
                return False
        return not self.healthy(run)


def score(done: Sequence[Run], outcomes: Outcomes, *, blind: str = "") -> dict[str, Any]:
    """Of readings; `blind`: without "agreements", or without "held_out"."""
    planted: Counter[tuple[str, str]] = Counter()
    found: Counter[tuple[str, str]] = Counter()
    harmless: Counter[str] = Counter()
    healthy = alarms = 0
    wrong = []
    for run in done:
        curve = Curve.of(run.history)
        reading = read_curve(replace(curve, **{blind: ()}) if blind else curve)  # type: ignore[arg-type]
        if not run.kind:
            healthy += outcomes.healthy(run)
            if outcomes.healthy(run) and reading.findings:
                alarms += 1
                wrong.append(row(run, outcomes, reading.causes))
        elif not outcomes.harmed(run):
            harmless[run.kind] += 1
        else:
            planted[run.kind, run.family] += 1
            if KINDS[run.kind] in reading.causes[:2]:
                found[run.kind, run.family] += 1
            else:
                wrong.append(row(run, outcomes, reading.causes))

    def share(place: int, name: str) -> dict[str, Any]:
        keys = [key for key in planted if key[place] == name]
        all_of_it = sum(planted[key] for key in keys)
        return {"planted": all_of_it, "found": sum(found[key] for key in keys)}

    by_kind = {kind: share(0, kind) | {"harmless": harmless[kind]} for kind in KINDS}
    shares = {kind: each["found"] / each["planted"] for kind, each in by_kind.items() if each["planted"]}
    worst = min(shares, key=lambda kind: shares[kind])
    return {
        "recall_top2": sum(found.values()) / max(1, sum(planted.values())),
        "worst_kind": {"kind": worst, "recall": shares[worst]},
        "false_alarm": alarms / max(1, healthy),
        "healthy_runs": healthy,
        "by_kind": by_kind,
        "by_family": {name: share(1, name) for name in sorted({run.family for run in done})},
        "cells": {f"{kind} / {name}": [found[kind, name], planted[kind, name]] for kind, name in planted},
        "wrong": wrong,
    }


def row(run: Run, outcomes: Outcomes, causes: Sequence[Cause]) -> dict[str, Any]:
    regret = outcomes.regret(run)
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
    alarms = f"{scored['false_alarm']:.1%} of {scored['healthy_runs']} healthy"
    lines.append(f"recall {scored['recall_top2']:.1%}; false alarms {alarms}")
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)
    quick = arguments(__doc__ or "").quick
    scored, everything = {}, []
    for title, names, sizes in (
        ("unseen", UNSEEN, (4, 1) if quick else (44, 6)),
        ("corrected_on", CORRECTED_ON, (3, 1) if quick else (44, 6)),
        ("frozen_on", FROZEN_ON, (3, 1) if quick else (8, 2)),
    ):
        done = list(runs(names, *sizes))
        outcomes = Outcomes(done)
        scored[title] = score(done, outcomes)
        print(f"{title.replace('_', ' ')}\n{table(scored[title])}", flush=True)
        for name in BLIND:
            each = scored[title][f"without_{name}"] = score(done, outcomes, blind=name)
            print(f"without {name}: recall {each['recall_top2']:.1%}, false alarms {each['false_alarm']:.1%}")
        print(flush=True)
        everything += done if title != "frozen_on" else []
    whole = score(everything, Outcomes(everything))
    recall, alarms, healthy = scored["unseen"]["recall_top2"], whole["false_alarm"], whole["healthy_runs"]
    print(f"false alarms over all families but the one frozen on: {alarms:.1%} of {healthy} healthy")
    finish(
        {
            "recall_top2": recall,
            "worst_kind": scored["unseen"]["worst_kind"],
            "false_alarm": alarms,
            "healthy_runs": healthy,
            "recall_of_all": whole["recall_top2"],
            "passed": None if quick else recall >= RECALL and alarms <= ALARMS and healthy >= LEAST_HEALTHY,
            **scored,
        }
    )


if __name__ == "__main__":
    main()
