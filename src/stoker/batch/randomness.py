"""The random numbers of Python, numpy and torch: kept as they are, or begun anew from a seed."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["begin", "kept", "snapshot"]


def snapshot() -> Callable[[], None]:
    """A function that puts all generators back to where they are now."""
    python, array, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    # before a device is used its generator has no state, and asking for one would claim memory on it
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_rng_state(cpu)
        if devices:
            torch.cuda.set_rng_state_all(devices)

    return restore


@contextmanager
def kept() -> Iterator[None]:
    """Whatever is drawn inside, afterwards all generators are where they were."""
    restore = snapshot()
    try:
        yield
    finally:
        restore()


def begin(*seed: int) -> None:
    """All generators from a seed of several numbers (a training's, an epoch's), mixed so that near ones don't agree."""
    mixed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)
