"""The largest batch under a real memory limit: stoker's fit, Lightning's BatchSizeFinder and accelerate's finder.

Each works in processes of its own under the same limit (on the CPU's address space) with the same allocator settings.
An answer is right where it runs its steps 5 of 5 times in a new process, and 5 % more (one more, at least) fails at
least once in 5. `trials_ratio`: stoker's trials over those of the cheapest peer that is right, the median of models.
"""

import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from bench.common import ROOT, arguments, finish
from bench.fit_models import MODELS, OUT_OF_MEMORY, maker
from stoker.batch.fitting import fit
from stoker.batch.trials import least_memory

MIB = 2**20
HEADROOM = 0.01
"""What the same steps take varies by a few parts in a thousand from process to process; of a small limit Python's
arenas, of which a process had a MiB more or less before, are as much.
"""
RUNS, STEPS = 5, 5
SECONDS = 900


def installed() -> None:
    """A peer that isn't there is no peer that is wrong."""
    missing = [name for name in ("lightning", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"pip install {' '.join(missing)}: the finders to compare with")


def child(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env={**os.environ, **least_memory()}, text=True,
        capture_output=True, timeout=SECONDS, check=False,
    )  # fmt: skip


def runs(name: str, size: int, limit: int) -> bool:
    """Do all steps run in a new process?"""
    done = child("bench.fit_models", name, str(size), str(limit), str(STEPS))
    if done.returncode not in (0, OUT_OF_MEMORY) and done.returncode > 0:
        raise SystemExit(f"{name} at {size} fails for another reason than memory:\n{done.stderr}")
    return done.returncode == 0


def judged(name: str, size: int, limit: int) -> dict[str, Any]:
    """Is it an answer? Counts stop where the verdict is clear."""
    ran = 0
    while ran < RUNS and size and runs(name, size, limit):
        ran += 1
    more = max(size + 1, math.ceil(size * 1.05))
    failed = ran == RUNS and any(not runs(name, more, limit) for _ in range(RUNS))
    return {"size": size, "ran": ran, "more": more, "more_failed": failed, "right": failed}


def stoker(name: str, limit: int) -> dict[str, Any]:
    start = time.monotonic()
    found = fit(maker(name), limit_bytes=limit, headroom=HEADROOM, deadline_seconds=SECONDS)
    print(found, flush=True)
    # Each trial, the look at the target before them, and those that settled a doubtful ending.
    settled = sum("without the limit it runs" in trial.reason for trial in found.trials)
    return {"trials": len(found.trials) + 1 + settled, "seconds": time.monotonic() - start} | judged(
        name, found.size, limit
    )


def peer(which: str, name: str, limit: int) -> dict[str, Any]:
    start = time.monotonic()
    done = child("bench.fit_peers", which, name, str(limit))
    seconds = time.monotonic() - start
    try:
        told = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        told = {"size": 0, "trials": [], "error": f"exit {done.returncode}: {done.stderr.strip()[-200:]}"}
    return {"trials": len(told["trials"]), "seconds": seconds, "error": told["error"]} | judged(
        name, told["size"], limit
    )


def main() -> None:
    args = arguments(__doc__ or "")
    installed()
    names = ["clicks"] if args.quick else list(MODELS)
    cases: dict[str, Any] = {}
    for name in names:
        limit = MODELS[name] * MIB
        case = cases[name] = {"limit_mib": MODELS[name], "stoker": stoker(name, limit)}
        if name != "run":  # neither peer knows what a run is
            case |= {which: peer(which, name, limit) for which in ("lightning", "accelerate")}
        print(json.dumps({name: case}), flush=True)

    def right(which: str) -> int:
        return sum(case[which]["right"] for case in cases.values() if which in case)

    ratios = [
        case["stoker"]["trials"] / min(peers)
        for case in cases.values()
        if (peers := [case[w]["trials"] for w in ("lightning", "accelerate") if w in case and case[w]["right"]])
    ]
    finish(
        {
            "cases": len(cases),
            "stoker_right": right("stoker"),
            "lightning_right": right("lightning"),
            "accelerate_right": right("accelerate"),
            "trials_ratio": statistics.median(ratios) if ratios else None,
            "trials": {w: total(cases, w, "trials") for w in ("stoker", "lightning", "accelerate")},
            "seconds": {w: total(cases, w, "seconds") for w in ("stoker", "lightning", "accelerate")},
            "models": cases,
        }
    )


def total(cases: dict[str, Any], which: str, key: str) -> float:
    """Over the models that all of them know."""
    return sum(case[which][key] for case in cases.values() if "lightning" in case)


if __name__ == "__main__":
    main()
