"""A reward on several processes, each handed one group at a time, while other groups are still being drawn.

Who waits for whom: as many threads as processes take groups off one queue, in the order in which they were
handed over; a thread waits for its own process, never past that one's deadline. The run's thread waits for
the threads, in `__call__` alone (`close` ends the processes first). Which process answers, and when, is
chance: it can't matter, because answers are put together in the samples' order and each process is asked
the same way.
"""

import operator
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from stoker.rl.rewards.outcome import Answered, Outcome, Score
from stoker.rl.types import Sample

__all__ = ["OwnProcess", "Workers"]


class OwnProcess(Score, Protocol):
    """A reward that keeps a process for what takes time."""

    def kill(self) -> None:
        """End that process for good, from any thread: whoever waits for it gets an error."""
        ...


class _Begun(NamedTuple):
    samples: Sequence[Sample]
    answered: Future[Answered]


class Workers:
    """`count` copies of a reward. What each answers, raises and waits for is as it is for one alone."""

    def __init__(self, make: Callable[[], OwnProcess], count: int) -> None:
        """Raises what `make` raises, with nothing left running."""
        self._threads = ThreadPoolExecutor(count, "stoker-reward")
        self._begun: dict[str, _Begun] = {}
        starts = [self._threads.submit(make) for _ in range(count)]  # together: a user's imports can take seconds
        errors = [start.exception() for start in starts]
        self._scores = [start.result() for start, error in zip(starts, errors, strict=True) if error is None]
        if error := next(filter(None, errors), None):
            self.close()
            raise error
        self._free: SimpleQueue[OwnProcess] = SimpleQueue()
        for score in self._scores:
            self._free.put(score)
        self.range, self.rule = self._scores[0].range, self._scores[0].rule

    def begin(self, samples: Sequence[Sample], step: int) -> None:
        """Hand over all samples of one prompt; returns at once. Their outcomes are for the call that brings them."""
        self._begun[samples[0].prompt.id] = _Begun(samples, self._threads.submit(self._answer, samples, step))

    def _answer(self, samples: Sequence[Sample], step: int) -> Answered:
        score = self._free.get_nowait()  # there are as many as threads
        try:
            return score(samples, step)
        finally:
            self._free.put(score)

    def __call__(self, samples: Sequence[Sample], step: int) -> Answered:
        """One outcome a sample. Of several groups that raise RewardError, the first in order is heard."""
        places: dict[str, list[int]] = {}
        for place, sample in enumerate(samples):
            places.setdefault(sample.prompt.id, []).append(place)
        for prompt_id, found in places.items():
            group = [samples[place] for place in found]
            if not self._has_begun(prompt_id, group):
                self.begin(group, step)
        outcomes: dict[int, Outcome] = {}
        metrics: dict[str, list[float]] = {}
        for prompt_id, found in places.items():
            answered = self._begun.pop(prompt_id).answered.result()
            outcomes.update(zip(found, answered.outcomes, strict=True))
            for name, numbers in answered.metrics.items():
                metrics.setdefault(name, []).extend(numbers)
        return Answered([outcomes[place] for place in range(len(samples))], metrics)

    def _has_begun(self, prompt_id: str, group: Sequence[Sample]) -> bool:
        """The very same samples: those of an abandoned draw of the prompt are no answer to this one."""
        begun = self._begun.get(prompt_id)
        return begun is not None and len(begun.samples) == len(group) and all(map(operator.is_, begun.samples, group))

    def close(self) -> None:
        for score in self._scores:
            score.kill()  # so that no thread waits for a deadline
        self._threads.shutdown(cancel_futures=True)
        for score in self._scores:
            score.close()
