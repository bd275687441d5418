"""A batch that changes where the loss no longer falls. No torch here."""

import math
from collections.abc import Mapping
from typing import Any

from stoker.batch.controllers.switching import Switch, Switching
from stoker.batch.stages import Progress
from stoker.errors import CheckpointError, ConfigError, RunError

__all__ = ["ByPlateau"]


class ByPlateau(Switching):
    """On each plateau of the loss the batch goes a step from `first` towards `last`.

    Growing, at a rate that stays (`RateFollower(..., rule="keep")`), does for the noise of the updates what lowering
    the rate does, with fewer updates (Smith et al. 2018, arXiv 1711.00489). At a rate that follows the batch it only
    makes fewer updates. Shrinking adds noise.

    ```python
    sizes = ByPlateau(64, 1024)
    batches = ChangingBatches(len(data), sizes)
    while batches.epoch < 30:
        ...  # an epoch
        sizes.observe(validation_loss, batches.undrawn)
    ```
    """

    def __init__(
        self,
        first: int,
        last: int,
        *,
        times: float = 2.0,
        patience: int = 3,
        threshold: float = 0.01,
        averaged: int = 1,
        multiple: int = 1,
        then_rate: float | None = None,
    ) -> None:
        """`times`: the factor of one switch, towards `last`; sizes are multiples of `multiple`.

        A plateau is `patience` looks in a row at a loss no lower than (1 - `threshold`) x the lowest since the last
        switch. A look is the mean of `averaged` losses: 1 for held-out losses, some hundred for those of updates.
        `then_rate`: with the batch at `last`, each further plateau multiplies `rate_factor` by it; None: nothing more
        happens. ConfigError for what can't be.
        """
        super().__init__(first, lowest=min(first, last), highest=max(first, last), multiple=multiple)
        if not (math.isfinite(times) and times > 1):
            raise ConfigError(f"times = {times}: more than 1, the factor of one switch")
        for name, value in (("patience", patience), ("averaged", averaged)):
            if value < 1:
                raise ConfigError(f"{name} = {value}: at least 1")
        if not 0 <= threshold < 1:
            raise ConfigError(f"threshold = {threshold}: from 0 to less than 1")
        if then_rate is not None and not 0 < then_rate < 1:
            raise ConfigError(f"then_rate = {then_rate}: between 0 and 1, or None")
        if first == last and then_rate is None:
            raise ConfigError(f"from {first} to {last} nothing can change: give another last, or then_rate")
        self._last, self._times, self._patience, self._threshold = last, times, patience, threshold
        self._averaged, self._then_rate = averaged, then_rate
        self.rate_factor = 1.0
        """For `RateFollower.set(..., factor=...)`."""
        self._best: float | None = None
        self._without = 0
        """Looks in a row without a lower loss."""
        self._sum, self._count = 0.0, 0
        """Of the look that isn't complete."""

    def observe(self, loss: float, at: Progress) -> Switch | None:
        """A loss (of held-out data, or of updates; lower is better), and the first update that may still change
        (`ChangingBatches.undrawn`).

        Returns the switch that was decided, if one was. Every rank must be given the same. RunError where the loss is
        no number.
        """
        if not math.isfinite(loss):
            raise RunError(f"a loss of {loss} at step {at.step:,}: no batch mends that. Lower the learning rate")
        self._sum, self._count = self._sum + loss, self._count + 1
        if self._count < self._averaged:
            return None
        look, self._sum, self._count = self._sum / self._count, 0.0, 0
        if self.pending:
            return None
        if self._best is None or look < self._best - self._threshold * abs(self._best):
            self._best, self._without = look, 0
            return None
        self._without += 1
        if self._without < self._patience:
            return None
        best, self._best, self._without = self._best, None, 0
        if self.size == self._last:
            self.rate_factor *= self._then_rate or 1.0
            return None
        why = f"no loss {self._threshold:.2%} below {best:.6g} in {self._patience} looks"
        return self._switch(self._next(), at, why)

    def state_dict(self) -> dict[str, Any]:
        """Plain types."""
        return super().state_dict() | {
            "rate_factor": self.rate_factor,
            "best": self._best,
            "without": self._without,
            "sum": self._sum,
            "count": self._count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """CheckpointError where it isn't one of these, or of a schedule that began with another size."""
        super().load_state_dict(state)
        try:
            self.rate_factor = float(state["rate_factor"])
            self._best = None if state["best"] is None else float(state["best"])
            self._without, self._sum, self._count = int(state["without"]), float(state["sum"]), int(state["count"])
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"a damaged state of {type(self).__name__}: {error}") from None

    def _next(self) -> int:
        """One step towards the last size, and never past it."""
        size, multiple = self.size, self._multiple
        if self._last > size:
            step = math.floor(size * self._times / multiple) * multiple
            return min(self._last, max(step, size + multiple))
        step = math.ceil(size / self._times / multiple) * multiple
        return max(self._last, min(step, size - multiple))
