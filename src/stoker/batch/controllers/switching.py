"""What schedules share that are decided while a training runs. No torch here.

A loader with workers asks for the sizes of updates long before they are trained on, and after a resume it asks again.
So a decision holds from a place that no loader has been given yet, and every decision is kept: whoever asks for an
update of before gets the same answer, and the state is the list of decisions.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stoker.batch.stages import Progress
from stoker.errors import CheckpointError, ConfigError

__all__ = ["Switch", "Switching"]


@dataclass(frozen=True)
class Switch:
    """One change of the batch."""

    step: int
    """Of the first update that it holds for."""
    samples: int
    """Trained on before that update."""
    before: int
    now: int
    """Examples per update."""
    why: str

    def __str__(self) -> str:
        return f"step {self.step:,} ({self.samples:,} samples): {self.before:,} -> {self.now:,} per update; {self.why}"

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        return asdict(self)


class Switching:
    """A schedule for `ChangingBatches`, by epoch or by step: `first` examples per update until it is decided otherwise.

    Subclasses observe and decide. `switches` is the log of all decisions, in order.
    """

    def __init__(self, first: int, *, lowest: int, highest: int, multiple: int) -> None:
        for name, value in (("first", first), ("lowest", lowest), ("highest", highest), ("multiple", multiple)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} = {value!r}: a whole number, at least 1")
        if not lowest <= first <= highest:
            raise ConfigError(f"first = {first}: from {lowest} to {highest}, the bounds")
        for name, value in (("first", first), ("lowest", lowest), ("highest", highest)):
            if value % multiple:
                raise ConfigError(f"{name} = {value} is not a multiple of {multiple}")
        self._first, self._lowest, self._highest, self._multiple = first, lowest, highest, multiple
        self.switches: list[Switch] = []
        self._asked = -1
        """The latest step whose size somebody asked for."""

    def __call__(self, progress: Progress) -> int:
        """Examples of the update that begins there; for one place always the same."""
        self._asked = max(self._asked, progress.step)
        return next((each.now for each in reversed(self.switches) if each.step <= progress.step), self._first)

    @property
    def size(self) -> int:
        """Examples per update that the latest decision asks for."""
        return self.switches[-1].now if self.switches else self._first

    @property
    def pending(self) -> bool:
        """The latest decision holds for no update yet, so that it is too early for another."""
        return bool(self.switches) and self._asked < self.switches[-1].step

    def state_dict(self) -> dict[str, Any]:
        """Plain types."""
        return {"first": self._first, "asked": self._asked, "switches": [each.to_json() for each in self.switches]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """CheckpointError where it isn't one of these, or of a schedule that began with another size."""
        mine = self.state_dict()
        if set(state) != set(mine):
            raise CheckpointError(
                f"a state of {type(self).__name__} has {', '.join(sorted(mine))}, not {', '.join(sorted(state))}"
            )
        if state["first"] != self._first:
            raise CheckpointError(
                f"the state was saved with first = {state['first']}, this schedule has {self._first}: updates of "
                "before would get other sizes. Make it as it was when it was saved"
            )
        try:
            self.switches, self._asked = [Switch(**each) for each in state["switches"]], int(state["asked"])
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"a damaged state of {type(self).__name__}: {error}") from None

    def _switch(self, now: int, at: Progress, why: str) -> Switch:
        made = Switch(at.step, at.samples, self.size, now, why)
        self.switches.append(made)
        return made
