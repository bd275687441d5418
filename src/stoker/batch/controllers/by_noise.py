"""A batch that follows the gradient's noise scale (McCandlish et al. 2018, arXiv 1812.06162, section 5). No torch here.

The scale grows while a training goes on, as |G|^2 falls faster than the noise: a batch that is right at the beginning
takes more updates than it needs later.
"""

import math

from stoker.batch.controllers.switching import Switch, Switching
from stoker.batch.noise import NoiseEstimate
from stoker.batch.stages import Progress
from stoker.errors import ConfigError

__all__ = ["ByNoise"]

MOST = 2
"""A switch changes the batch by at most this factor: the scale is of where the training is, not of where it goes."""


class ByNoise(Switching):
    """Examples per update follow `times` x the measured noise scale.

    ```python
    sizes = ByNoise(64, highest=1024)
    batches = ChangingBatches(len(data), sizes, granularity="step")
    for batch in batches.through(loader):
        ...  # an update, its micro-batches seen by `noise`
        sizes.observe(noise.estimate(), batches.undrawn)
    ```
    """

    def __init__(
        self,
        first: int,
        *,
        highest: int,
        lowest: int | None = None,
        multiple: int = 1,
        times: float = 1.0,
        unit: str = "examples",
        hysteresis: float = 1.4,
        wait: int = 100,
    ) -> None:
        """`lowest` (None: `first`) and `highest` bound the size, which is a multiple of `multiple`.

        `times`: examples per update for a noise scale of 1 `unit`. 1 is where updates and examples are both twice the
        fewest possible; less costs more updates and fewer examples. `hysteresis`: the size stays while what is wanted
        is within this factor of it, and while the estimate's 95 % interval holds it. `wait`: updates that a size lasts
        at least. ConfigError for what can't be.
        """
        super().__init__(first, lowest=first if lowest is None else lowest, highest=highest, multiple=multiple)
        if not (math.isfinite(times) and times > 0):
            raise ConfigError(f"times = {times}: a positive number")
        if not hysteresis >= 1:
            raise ConfigError(f"hysteresis = {hysteresis}: at least 1, a factor")
        if wait < 1:
            raise ConfigError(f"wait = {wait}: at least 1 update")
        self._times, self._unit, self._hysteresis, self._wait = times, unit, hysteresis, wait

    def observe(self, estimate: NoiseEstimate, at: Progress) -> Switch | None:
        """What the updates so far say, and the first update that may still change (`ChangingBatches.undrawn`).

        An undetermined scale changes nothing. Returns the switch that was decided, if one was. Every rank must be given
        the same. ConfigError where the estimate counts another unit.
        """
        if estimate.unit != self._unit:
            raise ConfigError(
                f"the noise scale is in {estimate.unit}, and this schedule takes {self._unit}: give "
                f"ByNoise(unit={estimate.unit!r}, times=...), examples per update for a noise scale of 1"
            )
        if estimate.scale is None or estimate.scale.interval is None or self.pending or not self._rested(at):
            return None
        size, wanted = self.size, self._times * estimate.scale.value
        low, high = (self._times * end for end in estimate.scale.interval)
        grows = wanted >= size * self._hysteresis and low > size
        shrinks = wanted * self._hysteresis <= size and high < size
        if not (grows or shrinks):
            return None
        now = self._allowed(wanted)
        if now == size:
            return None
        asks = "" if self._times == 1 else f" x {self._times:g}"
        ends = f"{estimate.scale.interval[0]:,.4g} to {estimate.scale.interval[1]:,.4g}"
        return self._switch(now, at, f"noise scale {estimate.scale.value:,.4g} ({ends}) {self._unit}{asks}")

    def _rested(self, at: Progress) -> bool:
        return not self.switches or at.step - self.switches[-1].step >= self._wait

    def _allowed(self, wanted: float) -> int:
        """Towards what is wanted: within a factor of two, in multiples, within the bounds."""
        size, multiple = self.size, self._multiple
        if wanted > size:
            return min(self._highest, math.floor(min(wanted, MOST * size) / multiple) * multiple)
        return max(self._lowest, math.ceil(max(wanted, size / MOST) / multiple) * multiple)
