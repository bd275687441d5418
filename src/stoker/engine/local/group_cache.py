"""Keys and values of rows that share prompts: each prompt's once, each row's own answer beside it.

B rows, P prompts, at most R rows of one prompt, H query heads in K groups of G (H = K G), D head dimension.
Answers are kept by column: at every step all rows write the same next column, so a row's answer lies between
the column it entered at and the current one, wherever the others began. Keys are turned before they are
kept, so a column's place says nothing about its position.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stoker.engine.local.dense import Layer

__all__ = ["GroupCache"]

_HIDDEN = -1e30
"""Added to a score that must not count; finite, so that a part which is hidden altogether has weight 0, not NaN."""
_MIN_COLUMNS = 64


class _Store:
    """Keys and values of one layer in buffers (entries, K, room, D)."""

    def __init__(self, like: Tensor) -> None:
        """`like`: (..., K, 0, D), of the right type and device."""
        self.keys = self.values = like

    def reserve(self, entries: int, room: int, filled: tuple[int, slice]) -> None:
        """New buffers of that size, where the old ones' `filled` entries and positions come first."""
        count, places = filled
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(entries, old.shape[1], room, old.shape[3])  # what is masked must be finite all the same
            kept = old[:count, :, places]
            new[:count, :, : kept.shape[2]] = kept
            setattr(self, name, new)

    def move(self, targets: Tensor, sources: Tensor, places: slice) -> None:
        for buffer in (self.keys, self.values):
            buffer[targets, :, places] = buffer[sources, :, places]


class GroupCache:
    """What a dense decoder's layers attend to, while rows enter and leave."""

    def __init__(self, layers: int, like: Tensor, longest: int) -> None:
        """`like`: (0, K, 0, D). `longest`: the longest answer to come, in tokens."""
        self._device = like.device
        self._longest = longest
        self._prefixes = [_Store(like) for _ in range(layers)]
        self._answers = [_Store(like) for _ in range(layers)]
        self._prompts: list[tuple[int, ...]] = []  # (P,)
        self._prompt_of: list[int] = []  # (B,)
        self._starts: list[int] = []  # (B,) first column
        self._column = -1  # the one written last
        self._first = 0  # the earliest that a row still needs
        self._masks: dict[int | None, tuple[Tensor | None, Tensor | None]] = {}
        self._grid = self._spots = torch.empty(0, dtype=torch.long)

    @property
    def rows(self) -> int:
        return len(self._prompt_of)

    def missing(self, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Those not kept yet, each once."""
        return [p for p in dict.fromkeys(prompts) if p not in self._prompts]

    def add_prompts(self, prompts: Sequence[tuple[int, ...]]) -> range:
        """Make room for prompts; the entries to `write_prompts` to."""
        count, needed = len(self._prompts), len(self._prompts) + len(prompts)
        entries, _, room, _ = self._prefixes[0].keys.shape
        width = max(room, max(map(len, prompts)))
        if needed > entries or width > room:
            entries = max(entries, needed, min(2 * count, needed + 16))
            for store in self._prefixes:
                store.reserve(entries, width, (count, slice(0, room)))
        self._prompts.extend(prompts)
        return range(count, needed)

    def write_prompts(self, layer: int, entries: range, keys: Tensor, values: Tensor) -> None:
        """Keys and values (len(entries), K, T, D); what lies beyond a prompt's own length is never seen."""
        place = slice(entries.start, entries.stop), slice(None), slice(0, keys.shape[2])
        self._prefixes[layer].keys[place] = keys
        self._prefixes[layer].values[place] = values

    def add_rows(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """One row for each prompt given; its answer begins at the next column."""
        places = {prompt: place for place, prompt in enumerate(self._prompts)}
        self._prompt_of.extend(places[prompt] for prompt in prompts)
        self._starts.extend([self._column + 1] * len(prompts))
        self._regroup()

    def keep(self, order: Sequence[int], upcoming: tuple[int, ...] | None) -> None:
        """Row i becomes what row order[i] was; order[i] >= i, rows left out are gone. Prompts without rows go
        too, but for `upcoming`.
        """
        moved = [
            (target, source)
            for target, source in enumerate(order)
            if target != source and self._starts[source] <= self._column  # a row that just entered has no answer yet
        ]
        self._move(self._answers, moved, slice(self._first, self._column + 1))
        self._prompt_of = [self._prompt_of[row] for row in order]
        self._starts = [self._starts[row] for row in order]
        self._drop_prompts(upcoming)
        self._regroup()

    def begin_step(self, positions: Tensor, windows: set[int | None]) -> None:
        """Open the next column for all rows, whose new tokens are at `positions` (B,)."""
        self._column += 1
        self._first = min(self._starts)
        if self._column >= self._answers[0].keys.shape[2] or self.rows > self._answers[0].keys.shape[0]:
            self._make_room()
        self._masks = {window: self._mask(window, positions) for window in windows}

    def attend(self, index: int, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Add keys and values (B, K, D) of the new tokens; what their queries (B, K, G, D) see, same shape."""
        store, prefix = self._answers[index], self._prefixes[index]
        rows, width = self.rows, max(map(len, self._prompts))
        seen = slice(self._first, self._column + 1)
        store.keys[:rows, :, self._column] = key
        store.values[:rows, :, self._column] = value
        prompt_mask, answer_mask = self._masks[layer.window]
        own = _part(query, store.keys[:rows, :, seen], store.values[:rows, :, seen], answer_mask, layer.softcap)

        prompts, most = self._grid.shape
        _, heads, group, dim = query.shape
        asked = query[self._grid.view(-1)].view(prompts, most, heads, group, dim).transpose(1, 2)  # (P, K, R, G, D)
        seen_there, weight = _part(
            asked.reshape(prompts, heads, most * group, dim),
            prefix.keys[:prompts, :, :width],
            prefix.values[:prompts, :, :width],
            prompt_mask,
            layer.softcap,
        )
        return _merge(own, (self._by_row(seen_there, most, group), self._by_row(weight, most, group)))

    def _by_row(self, part: Tensor, most: int, group: int) -> Tensor:
        """(P, K, R G, x) -> (B, K, G, x)."""
        prompts, heads, _, last = part.shape
        by_prompt = part.view(prompts, heads, most, group, last).transpose(1, 2)
        return by_prompt.reshape(prompts * most, heads, group, last)[self._spots]

    def _regroup(self) -> None:
        """`_grid` (P, R): the rows of each prompt, filled up with row 0; `_spots` (B,): a row's place in it."""
        members: list[list[int]] = [[] for _ in self._prompts]
        for row, prompt in enumerate(self._prompt_of):
            members[prompt].append(row)
        most = max(map(len, members), default=0)
        spots = [0] * self.rows
        for prompt, rows in enumerate(members):
            for rank, row in enumerate(rows):
                spots[row] = prompt * most + rank
        filled = [rows + [0] * (most - len(rows)) for rows in members]
        self._grid = torch.tensor(filled, dtype=torch.long, device=self._device).view(len(members), most)
        self._spots = torch.tensor(spots, dtype=torch.long, device=self._device)

    def _mask(self, window: int | None, positions: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What to add to the scores of prompts, (P, 1, R G or 1, width), and of answers, (B, 1, 1, columns)."""
        lengths = torch.tensor([len(prompt) for prompt in self._prompts], device=self._device)
        starts = torch.tensor(self._starts, device=self._device)
        places = torch.arange(int(lengths.max()), device=self._device)
        columns = torch.arange(self._first, self._column + 1, device=self._device)
        hidden = (places >= lengths[:, None])[:, None]  # (P, 1, width)
        unborn = columns < starts[:, None]  # (B, columns)
        if window is not None:
            hidden = hidden | (positions[self._grid][:, :, None] - places >= window)  # (P, R, width)
            unborn = unborn | (self._column - columns >= window)
        return _added(hidden[:, None]), _added(unborn[:, None, None])

    def _drop_prompts(self, upcoming: tuple[int, ...] | None) -> None:
        needed = set(self._prompt_of)
        kept = [n for n, prompt in enumerate(self._prompts) if n in needed or prompt == upcoming]
        order = _filling(kept)
        moved = [(target, source) for target, source in enumerate(order) if target != source]
        self._move(self._prefixes, moved, slice(0, max(map(len, self._prompts), default=0)))
        new_place = {source: target for target, source in enumerate(order)}
        self._prompts = [self._prompts[source] for source in order]
        self._prompt_of = [new_place[place] for place in self._prompt_of]

    def _move(self, stores: Sequence[_Store], moved: Sequence[tuple[int, int]], places: slice) -> None:
        if not moved:
            return
        targets, sources = torch.tensor(moved, device=self._device).T
        for store in stores:
            store.move(targets, sources, places)

    def _make_room(self) -> None:
        """Move the columns still needed to the front of larger buffers: half as many again, as far as answers go."""
        used = self._column - self._first
        room = used + min(max(used // 2, _MIN_COLUMNS), self._longest)
        entries, old = self._answers[0].keys.shape[0], slice(self._first, self._column)
        for store in self._answers:
            store.reserve(self.rows, room, (min(entries, self.rows), old))
        self._starts = [start - self._first for start in self._starts]
        self._column, self._first = used, 0


def _filling(kept: Sequence[int]) -> list[int]:
    """The order that leaves as many of the ascending `kept` in place as can be: gaps are filled from the end."""
    count = len(kept)
    staying = {place for place in kept if place < count}
    movers = iter(place for place in kept if place >= count)
    return [place if place in staying else next(movers) for place in range(count)]


def _added(hidden: Tensor) -> Tensor | None:
    return torch.where(hidden, _HIDDEN, 0.0) if bool(hidden.any()) else None


def _part(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention over some of the keys: what is seen (N, K, Q, D), and the log of its weight (N, K, Q, 1).

    query (N, K, Q, D), keys and values (N, K, T, D), mask (N, 1, Q or fewer, T) is added to the scores.
    """
    asked = query.shape[2]
    if mask is not None and 1 < mask.shape[2] < asked:
        mask = mask.repeat_interleave(asked // mask.shape[2], 2)
    if softcap is None and query.device.type == "cpu":  # one operator instead of eight
        added = None if mask is None else mask.to(query.dtype).expand(-1, -1, asked, -1)
        query = query.contiguous()  # a last stride of 1 is taken as given
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        seen, weight = flash(query, keys, values, 0.0, False, attn_mask=added, scale=1.0)
        return seen, weight[..., None]
    scores = (query @ keys.transpose(-1, -2)).float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores += mask
    log_weight = scores.logsumexp(-1, keepdim=True)
    return (scores.sub_(log_weight).exp_().to(values.dtype) @ values), log_weight


def _merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Attention over the keys of both parts."""
    share = torch.sigmoid(one[1] - other[1]).to(one[0].dtype)
    return torch.lerp(other[0], one[0], share)
