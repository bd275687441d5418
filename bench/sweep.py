"""Knee and verdict on devices whose truth is known, and what the sweep says of a real loader.

100 simulated devices of seven kinds (bench.devices). Thresholds were chosen on one set of seeds and are scored on
another. Right is a device of which all of this holds:

- the knee lies within half a doubling of the true one, or both say that there is none within the sweep;
- the verdict is the true one;
- where the device has a loader, the share of a step that waits for it is within 5 points.

Devices whose truth lies at a definition's edge, where either answer would do, aren't drawn: a true knee within half a
doubling of the largest size that runs, a last doubling within 3 % of taking 1.2 times as long, shares near a tenth.
Then real loaders (bench.slow_loader), which need a quiet machine.
"""

import argparse
import math
from collections import defaultdict
from typing import Any

from bench.common import finish
from bench.devices import KINDS, Device, draw, truth, waits
from bench.slow_loader import LOADERS, examine
from stoker.batch.sweeping import sweep

DEVELOPMENT, SCORED = 0, 10_000
"""Where the two sets of seeds begin."""
CASES, QUICK_CASES = 100, 21
HALF_A_DOUBLING, POINTS = 0.5, 0.05


def examine_device(device: Device) -> dict[str, Any]:
    found = sweep(
        device, largest=device.largest, loader=device.options, remedies=False, instruments=device.instruments()
    )
    true = truth(device, found.studied)
    size = found.knee.size if found.knee else None
    if size is None or true.knee is None:
        knee_right = size is true.knee
    else:
        knee_right = abs(math.log2(size / true.knee)) <= HALF_A_DOUBLING
    data = found.at(found.studied).data
    error = abs(data.waited - waits(device, found.studied)) if data else None
    return {
        "kind": device.kind,
        "seed": device.seed,
        "knee": size and round(size, 1),
        "true_knee": true.knee,
        "agree": bool(found.knee and found.knee.agree),
        "verdict": found.verdict.kind,
        "true_verdict": true.verdict,
        "share_error": error,
        "right": knee_right and found.verdict.kind == true.verdict and (error is None or error <= POINTS),
    }


def score(first_seed: int, cases: int) -> dict[str, Any]:
    """Over so many devices, the kinds in turn."""
    results = [examine_device(draw(KINDS[i % len(KINDS)], first_seed + i // len(KINDS))) for i in range(cases)]
    by_kind: dict[str, list[bool]] = defaultdict(list)
    for each in results:
        by_kind[each["kind"]].append(each["right"])
        if not each["right"]:
            print("wrong:", each, flush=True)
    return {
        "cases": cases,
        "right": sum(each["right"] for each in results),
        "by_kind": {kind: [sum(right), len(right)] for kind, right in by_kind.items()},
        "methods_agree": sum(each["agree"] for each in results),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the same, with fewer devices and shorter loops")
    parser.add_argument("--only", choices=("devices", "loaders"), help="one half: loaders need a quiet machine")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    cases = QUICK_CASES if args.quick else CASES
    if args.only != "loaders":
        result |= score(SCORED, cases)
        result["right_development"] = score(DEVELOPMENT, cases)["right"]
        print(result, flush=True)
    if args.only != "devices":
        result["loaders"] = [examine(loader, args.quick) for loader in LOADERS]
    finish(result)


if __name__ == "__main__":
    main()
