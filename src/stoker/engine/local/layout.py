"""How rows lie in a micro-batch: one line per prompt, its answers behind it, so that a prompt is computed once.

    prompt | answer 1 | answer 2 | ... | padding

Each answer sees the prompt and itself, and counts positions from the prompt's end, as if it were alone.
With 8 answers to a prompt three times their length that is a third of the tokens. An answer's last token
is left out: nothing is predicted from it.

B rows, S lines, L the longest line, T the longest answer, N scored positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.engine.local.chunked import Kept
from stoker.errors import ModelError
from stoker.rl import ragged
from stoker.rl.types import TrainRow

__all__ = ["Line", "Microbatch", "collate", "lines_of"]

LONGEST_SHARED_LINE = 4096
"""A shared line needs its mask in memory, the square of its length."""


NOTHING = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class Line:
    """Rows (by index) that share a prompt."""

    rows: tuple[int, ...]
    length: int


@dataclass(frozen=True)
class Microbatch:
    """Lines on the device, padded on the right, and where the rows' tokens are in them."""

    rows: tuple[TrainRow, ...]  # (B,), in the order of the lines
    shape: tuple[int, int]  # B, T
    token_ids: Tensor  # (S, L)
    positions: Tensor  # (S, L)
    segments: Tensor | None  # (S, L) 0: prompt, -1: padding, else which answer; None: each line has one answer
    sources: Tensor  # (N,) where the hidden state that predicts each scored token stands in the flat (S * L)
    slots: Tensor  # (N,) where its result goes in the flat (B * T)
    targets: Tensor  # (N,)
    temperature: Tensor  # (N,)
    kept: Kept | None
    useful_tokens: int

    def column(self, name: str) -> Tensor:
        """(B, T) the rows' field of that name, 0 beyond a row's end."""
        values = [getattr(row, name) for row in self.rows]
        padded = np.zeros(self.shape, dtype=values[0].dtype)
        padded[np.arange(self.shape[1]) < ragged.lengths(values)[:, None]] = np.concatenate(values)
        return torch.from_numpy(padded).to(self.token_ids.device)

    def known(self, name: str) -> Tensor | None:
        """The same of a field that rows may lack; None where one does."""
        return None if any(getattr(row, name) is None for row in self.rows) else self.column(name)

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
    members: list[list[int]] = []
    lengths: list[int] = []
    latest: dict[tuple[int, ...], int] = {}  # prompt -> its line still open
    for index, row in enumerate(rows):
        prompt, answer = len(row.prompt_ids), max(len(row.token_ids) - 1, 0)
        place = latest.get(row.prompt_ids) if width else None
        if place is not None:
            length = lengths[place] + answer
            pays = 4 * (length**2 - lengths[place] ** 2) <= 6 * width * prompt
            if pays and length <= min(ceiling, LONGEST_SHARED_LINE):
                members[place].append(index)
                lengths[place] = length
                continue
        latest[row.prompt_ids] = len(members)
        members.append([index])
        lengths.append(prompt + answer)
    return [Line(tuple(indices), length) for indices, length in zip(members, lengths, strict=True)]


def collate(rows: Sequence[TrainRow], lines: Sequence[Line], device: torch.device) -> Microbatch:
    """The scored tokens are those of the masks, which is all that a loss or an advantage can see."""
    chosen = tuple(rows[index] for line in lines for index in line.rows)
    per_line = np.array([len(line.rows) for line in lines])  # (S,)
    firsts = np.cumsum(per_line) - per_line  # (S,) each line's first row
    home = np.repeat(np.arange(len(lines)), per_line)  # (B,) the line of each row
    prompts = _prompt_lengths([chosen[first] for first in firsts])  # (S,)
    answers = ragged.lengths([row.token_ids for row in chosen])  # (B,)
    fed = np.maximum(answers - 1, 0)  # (B,)
    before = np.cumsum(fed) - fed
    starts = prompts[home] + before - before[firsts][home]  # (B,) where each answer begins in its line

    longest, width = max(line.length for line in lines), int(answers.max())
    token_ids = np.zeros(len(lines) * longest, dtype=np.int64)  # what stands on padding is never looked at
    positions = np.tile(np.arange(longest), len(lines))
    segments = np.full(len(lines) * longest, -1)
    here = np.repeat(np.arange(len(lines)) * longest, prompts) + ragged.places(prompts)
    token_ids[here], segments[here] = list(chain.from_iterable(chosen[first].prompt_ids for first in firsts)), 0
    at = ragged.places(fed)
    here = np.repeat(home * longest + starts, fed) + at
    token_ids[here] = np.concatenate([row.token_ids[:-1] for row in chosen])
    positions[here] = np.repeat(prompts[home], fed) + at
    segments[here] = np.repeat(np.arange(len(chosen)) - firsts[home] + 1, fed)

    scored = np.concatenate([row.mask for row in chosen])  # (all tokens,)
    at = ragged.places(answers)[scored]  # (N,) the index of each scored token in its row
    row_of = np.repeat(np.arange(len(chosen)), answers)[scored]
    line_of = home[row_of]
    # The prompt's last position predicts every answer's first token.
    sources = line_of * longest + np.where(at == 0, prompts[line_of] - 1, starts[row_of] + at - 1)

    def put(values: NDArray[np.generic], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(values).to(device=device, dtype=dtype)

    def laid(values: NDArray[np.int64]) -> Tensor:
        return put(values).view(len(lines), longest)

    return Microbatch(
        rows=chosen,
        shape=(len(chosen), width),
        token_ids=laid(token_ids),
        positions=laid(positions),
        segments=laid(segments) if len(chosen) > len(lines) else None,
        sources=put(sources),
        slots=put(row_of * width + at),
        targets=put(np.concatenate([row.token_ids for row in chosen])[scored]),
        temperature=put(np.array([row.temperature for row in chosen])[row_of], torch.float32),
        kept=_kept(chosen, scored, device),
        useful_tokens=sum(line.length for line in lines),
    )


def _prompt_lengths(rows: Sequence[TrainRow]) -> NDArray[np.int64]:
    for row in rows:
        if not row.prompt_ids:
            raise ModelError(f"sample {row.sample_id} has an empty prompt: nothing predicts its first token")
    return ragged.lengths([row.prompt_ids for row in rows])


def _kept(rows: Sequence[TrainRow], scored: NDArray[np.bool_], device: torch.device) -> Kept | None:
    """The kept ids of the scored positions, in their order; a row without any keeps everything (an empty set).

    `scored` marks them among the tokens of all rows.
    """
    if all(row.kept is None for row in rows):
        return None
    ids = np.concatenate([NOTHING if row.kept is None else row.kept.ids for row in rows])
    counts = np.concatenate(
        [
            np.zeros(len(row.token_ids), dtype=np.int64) if row.kept is None else np.diff(row.kept.offsets)
            for row in rows
        ]
    )
    ids = ids[np.repeat(scored, counts)]
    offsets = np.concatenate([[0], np.cumsum(counts[scored])])
    return Kept(torch.from_numpy(ids).to(device=device, dtype=torch.int64), torch.from_numpy(offsets))
