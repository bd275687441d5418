"""Batch control for any PyTorch training: what fits, where speed saturates, where the bytes go, exact accumulation.

```python
from stoker.batch import Target, fit

def make_target():
    return Target(model, optimizer, make_batch, loss)  # loss(model, make_batch(size)) gives the scalar

print(fit("train.py:make_target"))
```
"""

from typing import TYPE_CHECKING

from stoker.lazy import lazy

if TYPE_CHECKING:
    from stoker.batch.accumulation import Accumulated, accumulate, windows
    from stoker.batch.certificate import Fit
    from stoker.batch.changing import ChangingBatches
    from stoker.batch.controllers.by_noise import ByNoise
    from stoker.batch.controllers.by_plateau import ByPlateau
    from stoker.batch.controllers.switching import Switch
    from stoker.batch.critical.branched import Branched
    from stoker.batch.critical.branching import branched
    from stoker.batch.critical.measured import Critical
    from stoker.batch.critical.measuring import critical_batch
    from stoker.batch.critical.reached import Reached
    from stoker.batch.critical.reaching import measure_tradeoff
    from stoker.batch.explaining.explained import Explained
    from stoker.batch.explaining.procedure import explain
    from stoker.batch.fitting import fit
    from stoker.batch.horizons import Horizon
    from stoker.batch.loading import LoaderOptions
    from stoker.batch.noise import NoiseEstimate, NoiseSample, NoiseScale, from_parts, from_two_sizes
    from stoker.batch.predicting import predicted
    from stoker.batch.proof import Proof
    from stoker.batch.proving import prove
    from stoker.batch.rates import RateFollower
    from stoker.batch.reading.curve import Curve
    from stoker.batch.reading.found import Finding, Reading
    from stoker.batch.reading.raising import read_raise
    from stoker.batch.reading.reader import read_curve
    from stoker.batch.scaling import Rescaled, rescale
    from stoker.batch.scanning.rate_scan import RateScan
    from stoker.batch.scanning.rates import scan_rates
    from stoker.batch.scanning.scanned import Scan
    from stoker.batch.scanning.sizes import scan
    from stoker.batch.searching.searched import Searched
    from stoker.batch.searching.space import Space
    from stoker.batch.stages import Progress, Ramp, Stages
    from stoker.batch.sweeping import sweep
    from stoker.batch.swept import Sweep
    from stoker.batch.target import Maker, Target, Workload
    from stoker.batch.tracing import Trace, trace
    from stoker.batch.tradeoff import Doubling, Tradeoff, doubling, fit_tradeoff
    from stoker.batch.trainings.history import History
    from stoker.batch.trainings.setting import Setting
    from stoker.batch.trainings.training import Plan
    from stoker.batch.trainings.trap import judge_trap
    from stoker.batch.warmup import WarmupWatch

__all__ = [
    "Accumulated",
    "Branched",
    "ByNoise",
    "ByPlateau",
    "ChangingBatches",
    "Critical",
    "Curve",
    "Doubling",
    "Explained",
    "Finding",
    "Fit",
    "History",
    "Horizon",
    "LoaderOptions",
    "Maker",
    "NoiseEstimate",
    "NoiseSample",
    "NoiseScale",
    "Plan",
    "Progress",
    "Proof",
    "Ramp",
    "RateFollower",
    "RateScan",
    "Reached",
    "Reading",
    "Rescaled",
    "Scan",
    "Searched",
    "Setting",
    "Space",
    "Stages",
    "Sweep",
    "Switch",
    "Target",
    "Trace",
    "Tradeoff",
    "WarmupWatch",
    "Workload",
    "accumulate",
    "branched",
    "critical_batch",
    "doubling",
    "explain",
    "fit",
    "fit_tradeoff",
    "from_parts",
    "from_two_sizes",
    "judge_trap",
    "measure_tradeoff",
    "predicted",
    "prove",
    "read_curve",
    "read_raise",
    "rescale",
    "scan",
    "scan_rates",
    "sweep",
    "trace",
    "windows",
]

if not TYPE_CHECKING:
    # Batch plans must work, and start fast, without torch.
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "Accumulated": "accumulation",
            "ByNoise": "controllers.by_noise",
            "ByPlateau": "controllers.by_plateau",
            "Branched": "critical.branched",
            "ChangingBatches": "changing",
            "Critical": "critical.measured",
            "Doubling": "tradeoff",
            "Explained": "explaining.explained",
            "Curve": "reading.curve",
            "Finding": "reading.found",
            "Fit": "certificate",
            "History": "trainings.history",
            "Horizon": "horizons",
            "LoaderOptions": "loading",
            "Maker": "target",
            "NoiseEstimate": "noise",
            "NoiseSample": "noise",
            "NoiseScale": "noise",
            "Plan": "trainings.training",
            "Progress": "stages",
            "Proof": "proof",
            "Ramp": "stages",
            "RateFollower": "rates",
            "RateScan": "scanning.rate_scan",
            "Reached": "critical.reached",
            "Reading": "reading.found",
            "Rescaled": "scaling",
            "Scan": "scanning.scanned",
            "Searched": "searching.searched",
            "Setting": "trainings.setting",
            "Space": "searching.space",
            "Stages": "stages",
            "Sweep": "swept",
            "Switch": "controllers.switching",
            "Target": "target",
            "Trace": "tracing",
            "Tradeoff": "tradeoff",
            "WarmupWatch": "warmup",
            "Workload": "target",
            "accumulate": "accumulation",
            "branched": "critical.branching",
            "critical_batch": "critical.measuring",
            "doubling": "tradeoff",
            "explain": "explaining.procedure",
            "fit": "fitting",
            "fit_tradeoff": "tradeoff",
            "from_parts": "noise",
            "from_two_sizes": "noise",
            "judge_trap": "trainings.trap",
            "measure_tradeoff": "critical.reaching",
            "predicted": "predicting",
            "prove": "proving",
            "read_curve": "reading.reader",
            "read_raise": "reading.raising",
            "rescale": "scaling",
            "scan": "scanning.sizes",
            "scan_rates": "scanning.rates",
            "sweep": "sweeping",
            "trace": "tracing",
            "windows": "accumulation",
        },
    )
