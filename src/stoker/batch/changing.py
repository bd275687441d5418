"""A batch sampler for torch's DataLoader whose batch changes while it trains, and that resumes anywhere. No torch here.

A loader with workers asks for indices long before the training loop gets their batch, so a sampler that counts what it
gave out would skip what was fetched ahead when it resumes. Here two things are apart: what the loader has drawn, and
what the loop was handed. The loop goes through `ChangingBatches.through(loader)`, which counts each batch as it hands
it over (loaders give batches in the order of their indices), and only that count is saved. What was drawn ahead is
drawn again after a resume: the order of an epoch is a function of (seed, epoch), the size of a batch one of progress.
"""

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from stoker.batch.stages import Progress
from stoker.errors import CheckpointError, ConfigError, RunError

__all__ = ["ChangingBatches", "Granularity", "Last", "Size"]

Size = int | Callable[[Progress], int]
"""Examples per update, over all ranks."""
Granularity = Literal["epoch", "step"]
Last = Literal["keep", "repeat", "drop"]
Batch = TypeVar("Batch")

STATE = ("epoch", "examples", "position", "samples", "seed", "shuffle", "size", "step")


class ChangingBatches:
    """Indices of each update's examples, one rank's share: `DataLoader(data, batch_sampler=batches)`.

    ```python
    batches = ChangingBatches(len(data), Stages((512, 128), (0, 10)))
    loader = DataLoader(data, batch_sampler=batches, num_workers=4)
    while batches.epoch < 30:
        for batch in batches.through(loader):
            ...
    ```

    An epoch has every example exactly once. One that was left early goes on where it was left.
    """

    def __init__(
        self,
        examples: int,
        size: Size,
        *,
        granularity: Granularity = "epoch",
        shuffle: bool = True,
        seed: int = 0,
        last: Last = "keep",
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """`examples`: of the data set. `size`: examples per update over all `ranks`, a multiple of them.

        `granularity`: a callable `size` is asked once, when an epoch begins, or before each "step"; then its answer for
        a progress must stay the same, as it is asked ahead and, after a resume, again (see `controllers.switching`).
        `last`: of an epoch's remainder; "keep" makes a smaller batch of it (`ranks` must divide `examples`), "repeat"
        too, with up to ranks - 1 examples of the epoch's beginning once more, so that ranks hold equally many; "drop"
        leaves it out. ConfigError for what can't be.
        """
        for name, value, known in (("granularity", granularity, Granularity), ("last", last, Last)):
            if value not in get_args(known):
                raise ConfigError(f"{name} = {value!r}: one of {', '.join(get_args(known))}")
        if examples < 1:
            raise ConfigError(f"examples = {examples}: the data set is empty")
        if not 0 <= rank < ranks:
            raise ConfigError(f"rank = {rank} of {ranks} ranks: from 0 to {ranks - 1}")
        if seed < 0:
            raise ConfigError(f"seed = {seed}: 0 or more")
        if last == "keep" and examples % ranks:
            raise ConfigError(
                f"{examples} examples can't be shared out equally among {ranks} ranks: last = 'repeat' takes "
                f"{-examples % ranks} of them twice an epoch, 'drop' leaves the last incomplete batch out"
            )
        self._examples, self._size, self._granularity, self._last = examples, size, granularity, last
        self._shuffle, self._seed, self._rank, self._ranks = shuffle, seed, rank, ranks
        self._total = -(-examples // ranks) * ranks if last == "repeat" else examples
        self._progress = Progress(0, 0, 0)
        self._position = 0
        """Examples of this epoch that the loop was handed, over all ranks."""
        self._epoch_size = 0
        """Of the epoch, where sizes change by epoch; 0: not asked for yet."""
        self._handed = 0
        self._drawn: deque[int] | None = None
        """Examples of each batch that the loader was given and the loop was not."""
        self._owner: object | None = None
        """Of the iteration that goes on: the latest, as one that failed may be kept alive by its traceback."""

    @property
    def progress(self) -> Progress:
        """Counts what the loop was handed, the latest batch included."""
        return self._progress

    @property
    def epoch(self) -> int:
        """The one that goes on, or is next."""
        return self._progress.epoch

    @property
    def samples(self) -> int:
        """Examples that the loop was handed, over all epochs and ranks, the latest batch's included."""
        return self._progress.samples

    @property
    def handed(self) -> int:
        """Examples of the latest batch, over all ranks: what the learning rate follows. 0 before the first."""
        return self._handed

    @property
    def undrawn(self) -> Progress:
        """Where the first update stands that the loader hasn't asked for (the epoch is the one that goes on): what a
        controller decides holds from there.
        """
        ahead, at = self._drawn or (), self._progress
        return Progress(at.epoch, at.step + len(ahead), at.samples + sum(ahead))

    def sizes(self) -> Iterator[int]:
        """Examples per update, over all ranks, of what is left of this epoch."""
        return (taken for _, taken in self._walk())

    def __len__(self) -> int:
        """Batches left in this epoch."""
        return sum(1 for _ in self.sizes())

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, so that nothing happens before its first batch is drawn: a loader with workers makes an iterator
        # that it throws away.
        if self._owner is None:
            raise RunError(
                "the loader is read directly, so that what the loop has had of it isn't known: "
                "`for batch in batches.through(loader)`"
            )
        drawn = self._drawn = deque()
        order = self._order()
        for position, taken in self._walk():
            drawn.append(taken)
            yield order[position : position + taken][self._rank :: self._ranks].tolist()

    def through(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The loader's batches to the end of this epoch, each counted as it is handed over: save after its update.

        RunError where the loader doesn't draw its batches from here, or another loop or a state took this one's place.
        """
        if not getattr(loader, "in_order", True):
            raise ConfigError("DataLoader(in_order=False) gives batches in any order: a resume couldn't tell which")
        owner = self._own()
        mine: deque[int] | None = None
        try:
            for batch in loader:
                mine = self._drawn if mine is None else mine
                if owner is not self._owner:
                    raise RunError(
                        "another iteration over these batches began, or a state was loaded, in the middle of this one: "
                        "one loop at a time, and load before it begins"
                    )
                if not mine:
                    raise RunError(
                        "a batch that these batches didn't ask for: the loader must be a DataLoader(..., "
                        "batch_sampler=batches) of its own"
                    )
                self._hand_over(mine.popleft())
                yield batch
            if owner is self._owner:
                self._settle()
        finally:
            if owner is self._owner:
                self._owner, self._drawn = None, None

    def state_dict(self) -> dict[str, int]:
        """Where the loop is. The same for all ranks, whose number may be another when it is loaded."""
        return {
            "examples": self._examples,
            "seed": self._seed,
            "shuffle": int(self._shuffle),
            "epoch": self._progress.epoch,
            "step": self._progress.step,
            "samples": self._progress.samples,
            "position": self._position,
            "size": self._epoch_size,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on behind the last batch that was handed over; at an epoch's end, with the next epoch.

        CheckpointError where it is of another data set or order, or no such state.
        """
        if tuple(sorted(state)) != STATE:
            raise CheckpointError(f"a state of batches has {', '.join(STATE)}, not {', '.join(sorted(state))}")
        mine = self.state_dict()
        for name in ("examples", "seed", "shuffle"):
            if state[name] != mine[name]:
                raise CheckpointError(
                    f"the state was saved with {name} = {state[name]}, these batches have {mine[name]}: examples "
                    "would be lost or come twice. Make them as they were when it was saved"
                )
        self._owner, self._drawn = None, None
        self._progress = Progress(int(state["epoch"]), int(state["step"]), int(state["samples"]))
        self._position, self._epoch_size, self._handed = int(state["position"]), int(state["size"]), 0
        if self._position < self._total and (self._position % self._ranks or self._epoch_size % self._ranks):
            raise CheckpointError(
                f"the state is {self._position} examples into an epoch of {self._epoch_size or 'changing'} per update, "
                f"which {self._ranks} ranks can't share out equally: load it with as many ranks as it was saved with"
            )
        if self._position:  # else a schedule would be asked before its own state was loaded
            self._settle()

    def _own(self) -> object:
        self._owner, self._drawn = object(), None
        return self._owner

    def _hand_over(self, taken: int) -> None:
        at = self._progress
        self._progress = Progress(at.epoch, at.step + 1, at.samples + taken)
        self._position += taken
        self._handed = taken

    def _settle(self) -> None:
        """From the end of an epoch to the next one's beginning; elsewhere nothing."""
        if self._take(self._progress, self._position) == 0:
            self._progress = Progress(self._progress.epoch + 1, self._progress.step, self._progress.samples)
            self._position = self._epoch_size = 0

    def _walk(self) -> Iterator[tuple[int, int]]:
        """Where in the epoch's order each batch that is left begins, and its examples."""
        at, position = self._progress, self._position
        while taken := self._take(at, position):
            yield position, taken
            at, position = Progress(at.epoch, at.step + 1, at.samples + taken), position + taken

    def _take(self, at: Progress, position: int) -> int:
        """Examples of the next batch; 0: the epoch is over."""
        left = self._total - position
        if left <= 0:
            return 0
        size = self._asked(at)
        if size <= left:
            return size
        if self._last == "drop":
            if position == 0:
                raise ConfigError(
                    f"{size} examples per update of {self._examples} examples, with last = 'drop': an epoch without a "
                    "batch. Take a smaller batch, or last = 'keep'"
                )
            return 0
        return left

    def _asked(self, at: Progress) -> int:
        if self._granularity == "step":
            return self._checked(self._size(at) if callable(self._size) else self._size, at)
        if not self._epoch_size:
            self._epoch_size = self._checked(self._size(at) if callable(self._size) else self._size, at)
        return self._epoch_size

    def _checked(self, size: int, at: Progress) -> int:
        try:
            size = operator.index(size)
        except TypeError:
            raise ConfigError(f"the schedule gives {size!r} examples per update at {at}: a whole number") from None
        if size < 1 or size % self._ranks:
            raise ConfigError(
                f"the schedule gives {size} examples per update at {at}: at least 1, and a multiple of the "
                f"{self._ranks} ranks, such as {max(1, round(size / self._ranks)) * self._ranks}"
            )
        return size

    def _order(self) -> NDArray[np.int64]:
        """Of the epoch, over all ranks; int64."""
        if self._shuffle:
            order = np.random.default_rng((self._seed, self._progress.epoch)).permutation(self._examples)
        else:
            order = np.arange(self._examples)
        return np.resize(order, self._total)  # beyond its end it begins again
