"""An update's examples, divided so that each micro-batch fits and none is lost or added. No torch here."""

from dataclasses import asdict, dataclass
from typing import Any

from stoker.errors import ConfigError

__all__ = ["Applied", "Certified", "Shares", "divide"]


@dataclass(frozen=True)
class Shares:
    """How many examples meet where: examples_per_update = examples_per_microbatch x microbatches x ranks."""

    examples_per_microbatch: int
    """In one forward and backward of one rank."""
    microbatches: int
    """Per update on one rank: accumulation."""
    ranks: int

    @property
    def examples_per_update(self) -> int:
        """Over all micro-batches and ranks."""
        return self.examples_per_microbatch * self.microbatches * self.ranks

    def __str__(self) -> str:
        ranks = f" x {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.examples_per_microbatch} per micro-batch x {self.microbatches} accumulated{ranks}"


class Certified:
    """A size that fits: a number of examples, or a result of `stoker.batch.fit`."""

    def __init__(self, found: Any) -> None:
        size = getattr(found, "size", found)
        unit = getattr(found, "unit", "examples")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"{found!r} is no size to apply: give the result of stoker.batch.fit or a whole number of examples"
            )
        if unit != "examples":
            raise ConfigError(f"the fit counted {unit}, a data loader counts examples: fit a target whose unit is that")
        self.examples = size


@dataclass(frozen=True)
class Applied:
    """What a callback has changed, in words and as plain JSON."""

    before: Shares
    after: Shares
    certified: int
    """The largest micro-batch that was certified, in examples."""
    notes: tuple[str, ...] = ()
    """What holds or changes besides the sizes."""

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        return {**asdict(self), "examples_per_update": self.after.examples_per_update, "notes": list(self.notes)}

    def __str__(self) -> str:
        kept = f"{self.after.examples_per_update} examples an update, as before"
        change = f"{self.before} -> {self.after}" if self.before != self.after else f"{self.after}, unchanged"
        return "\n".join([f"stoker: {change}; {kept}; {self.certified} per micro-batch fit", *self.notes])


def divide(examples_per_update: int, ranks: int, largest: int) -> Shares:
    """The fewest micro-batches of at most `largest` examples that make up the update exactly, all of one size.

    One size, because trainers weigh the micro-batches of an update alike. ConfigError where only micro-batches far
    smaller than what fits would divide the update (a prime number of examples, say): another number is named there.
    """
    if examples_per_update % ranks:
        raise ConfigError(f"{examples_per_update} examples an update can't be shared by {ranks} ranks alike")
    share = examples_per_update // ranks
    microbatches = next(n for n in range(-(-share // largest), share + 1) if share % n == 0)
    micro = share // microbatches
    if 4 * micro < min(largest, share):
        wanted = -(-share // largest)
        better = -(-share // wanted) * wanted * ranks
        raise ConfigError(
            f"{examples_per_update} examples an update on {ranks} ranks divide only into micro-batches of {micro}, and "
            f"{largest} would fit: take {better} examples an update, {better // ranks // wanted} x {wanted} a rank"
        )
    return Shares(micro, microbatches, ranks)
