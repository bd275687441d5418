"""Keys and values of rows that share prompts: each prompt's once, each row's own answer beside it.

B rows, P prompts, K key-value heads, D head dimension.
Answers are kept by column: at every step all rows write the same next column, so a row's answer lies between
the column it entered at and the current one, wherever the others began. Keys are turned before they are
kept, so a column's place says nothing about its position.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LANES", "GroupCache", "Rows", "Store"]

LANES = 16
"""Places that decode.cpp scores together."""
_MIN_COLUMNS = 64


class Store:
    """Keys and values of one layer in buffers (entries, K, room, D)."""

    def __init__(self, like: Tensor, *, upright: bool) -> None:
        """`like`: (..., K, 0, D), of the right type and device. `upright`: a dimension's keys lie side by side in
        memory, for as many places as a multiple of `LANES`.
        """
        self.keys = self.values = like
        self._upright = upright

    def reserve(self, entries: int, room: int, filled: tuple[int, slice]) -> None:
        """New buffers of that size, where the old ones' `filled` entries and positions come first."""
        count, places = filled
        room = -(-room // LANES) * LANES if self._upright else room
        for name in ("keys", "values"):
            old = getattr(self, name)
            _, heads, _, dim = old.shape
            # What is masked must be finite all the same: zeros.
            if self._upright and name == "keys":
                new = old.new_zeros(entries, heads, dim, room).transpose(2, 3)
            else:
                new = old.new_zeros(entries, heads, room, dim)
            kept = old[:count, :, places]
            new[:count, :, : kept.shape[2]] = kept
            setattr(self, name, new)

    def move(self, targets: Tensor, sources: Tensor, places: slice) -> None:
        for buffer in (self.keys, self.values):
            buffer[targets, :, places] = buffer[sources, :, places]


@dataclass(frozen=True)
class Rows:
    """Where each row's keys are, (B,) int64 each."""

    prompts: Tensor
    """The entry of its prompt."""
    lengths: Tensor
    """Of the prompt, in tokens."""
    starts: Tensor
    """The column its answer began at."""

    def __len__(self) -> int:
        return len(self.prompts)


class GroupCache:
    """What a dense decoder's layers attend to, while rows enter and leave."""

    def __init__(self, layers: int, like: Tensor, longest: int, *, upright: bool) -> None:
        """`like`: (0, K, 0, D). `longest`: the longest answer to come, in tokens. `upright`: see `Store`."""
        self.shared = [Store(like, upright=upright) for _ in range(layers)]
        """Of prompts, one entry each."""
        self.own = [Store(like, upright=upright) for _ in range(layers)]
        """Of answers, one entry each row."""
        self.column = -1
        """The one that all rows wrote last, or are about to write."""
        self.first = 0
        """The earliest that a row still needs."""
        self._device = like.device
        self._longest = longest
        self._prompts: list[tuple[int, ...]] = []  # (P,)
        self._prompt_of: list[int] = []  # (B,)
        self._starts: list[int] = []  # (B,)
        self._describe()

    @property
    def prompt_lengths(self) -> list[int]:
        """(P,) in tokens."""
        return [len(prompt) for prompt in self._prompts]

    @property
    def positions(self) -> Tensor:
        """Of each row's token in the current column, (B,)."""
        return self.rows.lengths + (self.column - self.rows.starts)

    def missing(self, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Those not kept yet, each once."""
        return [p for p in dict.fromkeys(prompts) if p not in self._prompts]

    def add_prompts(self, prompts: Sequence[tuple[int, ...]]) -> range:
        """Make room for prompts; the entries to `write_prompts` to."""
        count, needed = len(self._prompts), len(self._prompts) + len(prompts)
        entries, _, room, _ = self.shared[0].keys.shape
        width = max(room, max(map(len, prompts)))
        if needed > entries or width > room:
            entries = max(entries, needed, min(2 * count, needed + 16))
            for store in self.shared:
                store.reserve(entries, width, (count, slice(0, room)))
        self._prompts.extend(prompts)
        return range(count, needed)

    def write_prompts(self, layer: int, entries: range, keys: Tensor, values: Tensor) -> None:
        """Keys and values (len(entries), K, T, D); what lies beyond a prompt's own length is never seen."""
        place = slice(entries.start, entries.stop), slice(None), slice(0, keys.shape[2])
        self.shared[layer].keys[place] = keys
        self.shared[layer].values[place] = values

    def add_rows(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """One row for each prompt given; its answer begins at the next column."""
        places = {prompt: place for place, prompt in enumerate(self._prompts)}
        self._prompt_of.extend(places[prompt] for prompt in prompts)
        self._starts.extend([self.column + 1] * len(prompts))
        self._describe()

    def keep(self, order: Sequence[int], upcoming: tuple[int, ...] | None) -> None:
        """Row i becomes what row order[i] was; order[i] >= i, rows left out are gone. Prompts without rows go
        too, but for `upcoming`.
        """
        moved = [
            (target, source)
            for target, source in enumerate(order)
            if target != source and self._starts[source] <= self.column  # a row that just entered has no answer yet
        ]
        self._move(self.own, moved, slice(self.first, self.column + 1))
        self._prompt_of = [self._prompt_of[row] for row in order]
        self._starts = [self._starts[row] for row in order]
        self._drop_prompts(upcoming)
        self._describe()

    def next_column(self) -> None:
        """Open the next column for all rows."""
        self.column += 1
        self.first = min(self._starts)
        if self.column >= self.own[0].keys.shape[2] or len(self.rows) > self.own[0].keys.shape[0]:
            self._make_room()

    def _describe(self) -> None:
        lengths = [len(self._prompts[place]) for place in self._prompt_of]
        facts = torch.tensor([self._prompt_of, lengths, self._starts], dtype=torch.long, device=self._device)
        self.rows = Rows(*facts.view(3, len(lengths)).unbind())

    def _drop_prompts(self, upcoming: tuple[int, ...] | None) -> None:
        needed = set(self._prompt_of)
        kept = [n for n, prompt in enumerate(self._prompts) if n in needed or prompt == upcoming]
        order = _filling(kept)
        moved = [(target, source) for target, source in enumerate(order) if target != source]
        self._move(self.shared, moved, slice(0, max(self.prompt_lengths, default=0)))
        new_place = {source: target for target, source in enumerate(order)}
        self._prompts = [self._prompts[source] for source in order]
        self._prompt_of = [new_place[place] for place in self._prompt_of]

    def _move(self, stores: Sequence[Store], moved: Sequence[tuple[int, int]], places: slice) -> None:
        if not moved:
            return
        targets, sources = torch.tensor(moved, device=self._device).T
        for store in stores:
            store.move(targets, sources, places)

    def _make_room(self) -> None:
        """Move the columns still needed to the front of larger buffers: half as many again, as far as answers go."""
        used = self.column - self.first
        room = used + min(max(used // 2, _MIN_COLUMNS), self._longest)
        entries, old = self.own[0].keys.shape[0], slice(self.first, self.column)
        for store in self.own:
            store.reserve(len(self.rows), room, (min(entries, len(self.rows)), old))
        self._starts = [start - self.first for start in self._starts]
        self.column, self.first = used, 0
        self._describe()


def _filling(kept: Sequence[int]) -> list[int]:
    """The order that leaves as many of the ascending `kept` in place as can be: gaps are filled from the end."""
    count = len(kept)
    staying = {place for place in kept if place < count}
    movers = iter(place for place in kept if place >= count)
    return [place if place in staying else next(movers) for place in range(count)]
