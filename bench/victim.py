"""A training process that kills itself with SIGKILL at a stated point: provably inside it, unlike a kill from outside.

    python -m bench.victim POINT NTH RUN_FILE [a.b=c ...] [--resume]

POINT: `save` (files written, manifest not), `rename` (manifest written, not in place yet), `sample` (a token of
every row drawn), `update` (a micro-batch's gradient added), `step` (the optimizer moved the weights), `record` (a
metrics line half written). NTH: the how many-th time the point is reached.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from stoker.config import load as config_load
from stoker.engine import checkpoint
from stoker.engine.local.drawing import Drawing
from stoker.engine.local.learner import LocalLearner
from stoker.engine.local.optim import MasterOptimizer
from stoker.record.write import Lines
from stoker.rl.types import Sample
from stoker.runner import train


def die_at(nth: int) -> Callable[[], None]:
    """A function whose nth call doesn't return."""
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    return call


def in_sampling(die: Callable[[], None]) -> None:
    """Die where every row has drawn a token."""
    original = Drawing.advance

    def advance(self: Drawing, limit: int) -> list[Sample]:
        ended = original(self, limit)
        die()
        return ended

    Drawing.advance = advance  # type: ignore[method-assign]


def in_update(die: Callable[[], None]) -> None:
    """Die between the forward and the backward pass of a micro-batch."""
    original = LocalLearner._terms

    def terms(self: LocalLearner, *args: Any) -> Any:
        result = original(self, *args)
        die()
        return result

    LocalLearner._terms = terms  # type: ignore[method-assign]


def after_step(die: Callable[[], None]) -> None:
    """Die when the optimizer has moved the weights."""
    original = MasterOptimizer.step

    def step(self: MasterOptimizer, rate: float, norm: float) -> None:
        original(self, rate, norm)
        die()

    MasterOptimizer.step = step  # type: ignore[method-assign]


def in_record(die: Callable[[], None]) -> None:
    """Die when half of a step's line is on the disk."""
    original = Lines._write

    def write(self: Lines, line: bytes) -> None:
        if b'"optim/loss"' in line:
            half = os.write(self._file, line[: len(line) // 2])
            die()
            os.ftruncate(self._file, os.fstat(self._file).st_size - half)
        original(self, line)

    Lines._write = write  # type: ignore[method-assign]


POINTS: dict[str, Callable[[Callable[[], None]], None]] = {
    "save": lambda die: before(checkpoint, "_seal", die),
    "rename": lambda die: before(checkpoint, "_put_in_place", die),
    "sample": in_sampling,
    "update": in_update,
    "step": after_step,
    "record": in_record,
}


def before(module: Any, name: str, die: Callable[[], None]) -> None:
    original = getattr(module, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        die()
        return original(*args, **kwargs)

    setattr(module, name, wrapped)


def main() -> None:
    point, nth, run_file, *rest = sys.argv[1:]
    resume = "--resume" in rest
    POINTS[point](die_at(int(nth)))
    train(config_load.load(run_file, [one for one in rest if one != "--resume"]), resume=resume, mode="quiet")


if __name__ == "__main__":
    main()
