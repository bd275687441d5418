"""How much a training makes its process grow: the measurement that the memory benches share."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable

import psutil

from bench.common import ROOT
from stoker.record.memory import peak_resident_bytes

__all__ = ["TINY", "grown", "in_a_process"]

TINY = {"vocab_size": 64, "num_hidden_layers": 1, "n_layer": 1}
"""Of a model whose step loads and starts all that a training's does, and takes next to nothing itself."""
MAPPED = 2**20
"""Bytes from which on a tensor is mapped on its own."""


def grown(tiny: Callable[[], object], make: Callable[[], Callable[[], object]]) -> tuple[int, int]:
    """Bytes resident after a `tiny` model's step, and how far above that the peak of two steps of what `make` makes is;
    in this process.
    """
    import torch

    torch.manual_seed(0)
    tiny()
    gc.collect()
    baseline: int = psutil.Process().memory_info().rss
    step = make()
    for _ in range(2):
        step()
    return baseline, peak_resident_bytes() - baseline


def in_a_process(module: str, *words: str, mapped: bool, seconds: float) -> str:
    """The last line that `python -m module words...` prints. `mapped`: without the holes of glibc's heap."""
    setting = {"MALLOC_MMAP_THRESHOLD_": str(MAPPED)} if mapped else {}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *words], cwd=ROOT, capture_output=True, text=True,
        timeout=seconds, check=False, env={**os.environ, **setting},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{module} {' '.join(words)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout.strip().splitlines()[-1]
