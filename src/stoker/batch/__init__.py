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
    from stoker.batch.fitting import fit
    from stoker.batch.horizons import Horizon
    from stoker.batch.loading import LoaderOptions
    from stoker.batch.predicting import predicted
    from stoker.batch.proof import Proof
    from stoker.batch.proving import prove
    from stoker.batch.rates import RateFollower
    from stoker.batch.scaling import Rescaled, rescale
    from stoker.batch.stages import Progress, Ramp, Stages
    from stoker.batch.sweeping import sweep
    from stoker.batch.swept import Sweep
    from stoker.batch.target import Maker, Target, Workload
    from stoker.batch.tracing import Trace, trace
    from stoker.batch.warmup import WarmupWatch

__all__ = [
    "Accumulated",
    "ChangingBatches",
    "Fit",
    "Horizon",
    "LoaderOptions",
    "Maker",
    "Progress",
    "Proof",
    "Ramp",
    "RateFollower",
    "Rescaled",
    "Stages",
    "Sweep",
    "Target",
    "Trace",
    "WarmupWatch",
    "Workload",
    "accumulate",
    "fit",
    "predicted",
    "prove",
    "rescale",
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
            "ChangingBatches": "changing",
            "Fit": "certificate",
            "Horizon": "horizons",
            "LoaderOptions": "loading",
            "Maker": "target",
            "Progress": "stages",
            "Proof": "proof",
            "Ramp": "stages",
            "RateFollower": "rates",
            "Rescaled": "scaling",
            "Stages": "stages",
            "Sweep": "swept",
            "Target": "target",
            "Trace": "tracing",
            "WarmupWatch": "warmup",
            "Workload": "target",
            "accumulate": "accumulation",
            "fit": "fitting",
            "predicted": "predicting",
            "prove": "proving",
            "rescale": "scaling",
            "sweep": "sweeping",
            "trace": "tracing",
            "windows": "accumulation",
        },
    )
