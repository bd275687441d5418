"""How rows lie in a micro-batch: one line per prompt, its answers behind it, so that a prompt is computed once.

    prompt | answer 1 | answer 2 | ... | padding

Each answer sees the prompt and itself, and counts positions from the prompt's end, as if it were alone.
With 8 answers to a prompt three times their length that is a third of the tokens. An answer's last token
is left out: nothing is predicted from it.

B rows, S lines, L the longest line, T the longest answer, N scored positions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.engine.local.chunked import Kept
from stoker.errors import ModelError
from stoker.rl.types import TrainRow

__all__ = ["Line", "Microbatch", "collate", "lines_of"]

LONGEST_SHARED_LINE = 4096
"""A shared line needs its mask in memory, the square of its length."""


@dataclass(frozen=True)
class Line:
    """Rows (by index) that share a prompt."""

    rows: tuple[int, ...]
    length: int


@dataclass(frozen=True)
class Microbatch:
    """Lines on the device, padded on the right, and where the rows' tokens are in them."""

    rows: tuple[TrainRow, ...]  # (B,), in the order of the lines
    token_ids: Tensor  # (S, L)
    positions: Tensor  # (S, L)
    segments: Tensor | None  # (S, L) 0: prompt, -1: padding, else which answer; None: each line has one answer
    sources: Tensor  # (N,) where the hidden state that predicts each scored token stands in the flat (S * L)
    slots: Tensor  # (N,) where its result goes in the flat (B * T)
    targets: Tensor  # (N,)
    temperature: Tensor  # (N,)
    kept: Kept | None
    useful_tokens: int

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        return len(self.rows), max(len(row.token_ids) for row in self.rows)

    def spread(self, values: Tensor) -> Tensor:
        """(N,) -> (B, T), 0 where nothing was scored; differentiable."""
        rows, width = self.shape
        return values.new_zeros(rows * width).index_copy(0, self.slots, values).view(rows, width)

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """(S, 1, L, L) to add to attention scores; None: a causal model needs none, as padding is on the right."""
        if self.segments is None:
            return None
        one, other = self.segments[:, :, None], self.segments[:, None, :]
        seen = ((other == 0) | (other == one)).tril()
        blocked = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return blocked.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def lines_of(rows: Sequence[TrainRow], ceiling: int, width: int) -> list[Line]:
    """Lay rows with equal prompts into lines of at most `ceiling` tokens (a row alone may be longer).

    `width` is the model's hidden size, 0: one line per row. An answer joins a line where the prompt it
    saves outweighs the attention it adds: a token costs about 24 width^2 per layer in matrix products, a
    pair of positions 4 width, and attention runs at about a quarter of their speed.
    """
    lines: list[Line] = []
    latest: dict[tuple[int, ...], int] = {}  # prompt -> its line still open
    for index, row in enumerate(rows):
        prompt, answer = len(row.prompt_ids), max(len(row.token_ids) - 1, 0)
        place = latest.get(row.prompt_ids)
        if place is not None and width:
            line = lines[place]
            length = line.length + answer
            pays = 4 * (length**2 - line.length**2) <= 6 * width * prompt
            if pays and length <= min(ceiling, LONGEST_SHARED_LINE):
                lines[place] = Line((*line.rows, index), length)
                continue
        latest[row.prompt_ids] = len(lines)
        lines.append(Line((index,), prompt + answer))
    return lines


def collate(rows: Sequence[TrainRow], lines: Sequence[Line], device: torch.device, *, only_counted: bool) -> Microbatch:
    """`only_counted`: score the tokens of the mask alone, which is all that a loss can see."""
    chosen = tuple(rows[index] for line in lines for index in line.rows)
    longest, width = max(line.length for line in lines), max(len(row.token_ids) for row in chosen)
    token_ids = np.zeros((len(lines), longest), dtype=np.int64)  # what stands on padding is never looked at
    positions = np.tile(np.arange(longest), (len(lines), 1))
    segments = np.full((len(lines), longest), -1)
    scored = [np.flatnonzero(row.mask) if only_counted else np.arange(len(row.token_ids)) for row in chosen]
    sources: list[NDArray[np.int64]] = []
    for place, line in enumerate(lines):
        prompt_ids = rows[line.rows[0]].prompt_ids
        if not prompt_ids:
            raise ModelError(
                f"sample {rows[line.rows[0]].sample_id} has an empty prompt: nothing predicts its first token"
            )
        start = len(prompt_ids)
        token_ids[place, :start], segments[place, :start] = prompt_ids, 0
        for answer, index in enumerate(line.rows, 1):
            fed = rows[index].token_ids[:-1]
            span = slice(start, start + len(fed))
            token_ids[place, span], segments[place, span] = fed, answer
            positions[place, span] = len(prompt_ids) + np.arange(len(fed))
            at = scored[len(sources)]
            # The prompt's last position predicts every answer's first token.
            sources.append(place * longest + np.where(at == 0, len(prompt_ids) - 1, start + at - 1))
            start += len(fed)

    def put(parts: Iterable[NDArray[np.generic]], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(np.concatenate(list(parts))).to(device=device, dtype=dtype)

    shared = any(len(line.rows) > 1 for line in lines)
    return Microbatch(
        rows=chosen,
        token_ids=torch.from_numpy(token_ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        segments=torch.from_numpy(segments).to(device) if shared else None,
        sources=put(sources),
        slots=put(at + index * width for index, at in enumerate(scored)),
        targets=put(row.token_ids[at] for row, at in zip(chosen, scored, strict=True)),
        temperature=put(
            (np.full(len(at), row.temperature) for row, at in zip(chosen, scored, strict=True)), torch.float32
        ),
        kept=_kept(chosen, scored, device),
        useful_tokens=sum(line.length for line in lines),
    )


def _kept(rows: Sequence[TrainRow], scored: Sequence[NDArray[np.int64]], device: torch.device) -> Kept | None:
    """The kept ids of the scored positions, in their order; a row without any keeps everything (an empty set)."""
    if all(row.kept is None for row in rows):
        return None
    ids, counts = [np.zeros(0, dtype=np.int32)], [np.zeros(1, dtype=np.int64)]
    for row, at in zip(rows, scored, strict=True):
        if row.kept is None:
            counts.append(np.zeros(len(at), dtype=np.int64))
            continue
        spans = list(pairwise(row.kept.offsets.tolist()))
        ids += [row.kept.ids[slice(*spans[t])] for t in at]
        counts.append(np.diff(row.kept.offsets)[at].astype(np.int64))
    offsets = torch.from_numpy(np.cumsum(np.concatenate(counts)))
    return Kept(torch.from_numpy(np.concatenate(ids)).to(device=device, dtype=torch.int64), offsets)
