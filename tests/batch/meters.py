"""A noise meter that keeps what it is given."""

from collections.abc import Sequence

from stoker.batch.noise import NoiseScale


class Kept(NoiseScale):
    def __init__(self) -> None:
        super().__init__(every=1)
        self.given: list[tuple[list[float], float, list[float]]] = []

    def add_parts(self, squared: Sequence[float], whole: float, counts: Sequence[float]) -> None:
        self.given.append((list(squared), whole, list(counts)))
        super().add_parts(squared, whole, counts)
