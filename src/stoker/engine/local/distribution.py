"""The sampled distribution: softmax(logits / temperature), cut by top-k then top-p, renormalised.

One draw per row by inverse CDF of a given uniform, with the exact log-prob of what was drawn.
B rows, V tokens of the vocabulary, W tokens at most that a cut may keep.

Where nothing is cut the vocabulary is read twice (largest logit, exponentials) and nothing of its size is
written but to a piece of memory that stays in the processor's cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.rl.types import SamplingParams

__all__ = ["Draws", "RowDraws", "draw", "draw_rows"]

_BLOCK = 256
"""Tokens summed at once before the CDF: a scan over V / 256 block sums and one block beats a scan over V."""
_IN_CACHE = 1 << 18
"""Exponentials held at once on CPU, in numbers (1 MiB)."""


@dataclass(frozen=True)
class RowDraws:
    """One token per row, where each row has its own parameters."""

    token_ids: Tensor  # (B,) int64
    logprobs: Tensor  # (B,) float32
    kept: list[NDArray[np.int32] | None] | None = None  # (B,) the tokens that a row's cut left, best first


@dataclass(frozen=True)
class Draws:
    """One token per row."""

    token_ids: Tensor  # (B,) int64
    logprobs: Tensor  # (B,) float32, under the distribution drawn from; NaN where the logits weren't finite
    kept_ids: Tensor | None = None  # (B, W) int64, best first; row b owns the first kept_counts[b]
    kept_counts: Tensor | None = None  # (B,) int64

    def kept_rows(self) -> list[NDArray[np.int32] | None] | None:
        """The kept tokens of each row; None: nothing was cut."""
        if self.kept_ids is None or self.kept_counts is None:
            return None
        ids = self.kept_ids.int().cpu().numpy()
        return [row[:count].copy() for row, count in zip(ids, self.kept_counts.tolist(), strict=True)]


def draw_rows(logits: Tensor, uniforms: Tensor, params: Sequence[SamplingParams]) -> RowDraws:
    """Draw a token for each row of `logits` (B, V) under its own parameters, from its uniform in [0, 1), (B,)."""
    rows_of: dict[tuple[float, float, int], list[int]] = {}  # by what shapes the distribution
    for row, wanted in enumerate(params):
        rows_of.setdefault((wanted.temperature, wanted.top_p, wanted.top_k), []).append(row)
    if len(rows_of) == 1:
        drawn = draw(logits, uniforms, params[0])
        return RowDraws(drawn.token_ids, drawn.logprobs, drawn.kept_rows())
    token_ids = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(params), dtype=torch.float32, device=logits.device)
    kept: list[NDArray[np.int32] | None] = [None] * len(params)
    for rows in rows_of.values():
        drawn = draw(logits[rows], uniforms[rows], params[rows[0]])
        token_ids[rows], logprobs[rows] = drawn.token_ids, drawn.logprobs
        for row, ids in zip(rows, drawn.kept_rows() or [None] * len(rows), strict=True):
            kept[row] = ids
    return RowDraws(token_ids, logprobs, kept)


def draw(logits: Tensor, uniforms: Tensor, params: SamplingParams) -> Draws:
    """Draw a token for each row of `logits` (B, V) from its uniform in [0, 1), (B,).

    Temperature 0 is greedy: the smallest id of the best tokens; its log-prob is that of the full
    distribution at temperature 1, and nothing counts as cut.
    """
    if params.temperature == 0:
        best, token_ids = logits.float().max(-1)
        return Draws(token_ids, best - logits.float().logsumexp(-1))
    if params.truncates:
        scaled = logits.float()
        return _draw_cut(scaled if params.temperature == 1 else scaled / params.temperature, uniforms, params)
    rows, vocabulary = logits.shape
    piece = max(1, _IN_CACHE // vocabulary) if logits.device.type == "cpu" else rows
    blocks = -(-vocabulary // _BLOCK)
    mass = torch.empty(min(piece, rows), blocks * _BLOCK, dtype=torch.float32, device=logits.device)
    mass[:, vocabulary:] = 0
    drawn = [
        _draw_full(some, numbers, params.temperature, mass[: len(some)])
        for some, numbers in zip(logits.split(piece), uniforms.split(piece), strict=True)
    ]
    token_ids, logprobs = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    return Draws(token_ids, logprobs)


def _draw_full(logits: Tensor, uniforms: Tensor, temperature: float, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and log-probs (B,) of the whole distribution; `mass` (B, blocks x _BLOCK) is overwritten."""
    rows, vocabulary = logits.shape
    best = logits.amax(-1, keepdim=True).float()
    front = mass[:, :vocabulary]
    torch.sub(logits, best, out=front)
    if temperature != 1:
        front.mul_(1 / temperature)
    front.exp_()
    mass = mass.view(rows, -1, _BLOCK)
    sums = mass.sum(-1).to(_wide(mass))  # (B, blocks)
    ends = sums.cumsum(-1)
    target = uniforms.to(sums)[:, None] * ends[:, -1:]
    block = _first_above(ends, target)  # (B, 1)
    rest = target - (ends.gather(1, block) - sums.gather(1, block))
    inside = mass.gather(1, block[:, :, None].expand(-1, 1, _BLOCK))[:, 0].to(sums.dtype)  # (B, BLOCK)
    # The clamp only matters to NaN logits: they must reach the caller as a NaN log-prob, not as a bad index.
    token_ids = (block * _BLOCK + _first_above(inside.cumsum(-1), rest))[:, 0].clamp(max=vocabulary - 1)
    above = (_gather(logits, token_ids).float() - best[:, 0]) / temperature
    return token_ids, above - ends[:, -1].log().float()


def _draw_cut(scaled: Tensor, uniforms: Tensor, params: SamplingParams) -> Draws:
    values, ids, counts = _kept(scaled, params)
    places = torch.arange(values.shape[1], device=values.device)
    mass = (values - values[:, :1]).exp().masked_fill(places >= counts[:, None], 0)
    ends = mass.to(_wide(mass)).cumsum(-1)
    place = _first_above(ends, uniforms.to(ends)[:, None] * ends[:, -1:])[:, 0]
    logprobs = _gather(values, place) - values[:, 0] - ends[:, -1].log().float()
    return Draws(_gather(ids, place), logprobs, ids, counts)


def _kept(scaled: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor, Tensor]:
    """Values and ids (B, W), best first, and how many of each row are kept (B,)."""
    vocabulary = scaled.shape[1]
    width = min(vocabulary, _candidates(params))
    values, ids = _rank(scaled, width)
    counts = _count(scaled, values, params)
    # Tokens tied with the last candidate may lie outside the candidates, so only those above it are certain.
    certain = (values > values[:, -1:]).sum(-1)
    unsure = (counts > certain).nonzero()[:, 0] if width < vocabulary else counts.new_empty(0)
    if len(unsure):
        all_values, all_ids = _rank(scaled[unsure], vocabulary)
        counts[unsure] = _count(scaled[unsure], all_values, params)
        width = max(width, int(counts.max()))
        values = torch.nn.functional.pad(values, (0, width - values.shape[1]), value=-torch.inf)
        ids = torch.nn.functional.pad(ids, (0, width - ids.shape[1]))
        values[unsure], ids[unsure] = all_values[:, :width], all_ids[:, :width]
    width = int(counts.max())
    return values[:, :width], ids[:, :width], counts


def _candidates(params: SamplingParams) -> int:
    """Tokens ranked before a whole row is, which takes seven times as long: most cuts end well before."""
    return 2 * params.top_k + 64 if params.top_k else 1024


def _rank(scaled: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The best `width` of each row, best first; among equals the smaller id first."""
    if width == scaled.shape[1]:
        return scaled.sort(descending=True, stable=True)
    _, ids = scaled.topk(width)
    ids = ids.sort().values
    values, order = scaled.gather(1, ids).sort(descending=True, stable=True)
    return values, ids.gather(1, order)


def _count(scaled: Tensor, values: Tensor, params: SamplingParams) -> Tensor:
    """How many of the ranked `values` (B, W) a row keeps, at least one: the fewest whose mass reaches top_p.

    With top_k the mass is that of the k best, renormalised; else that of the whole row `scaled` (B, V).
    """
    wide = _wide(values)
    best = values[:, :1]
    limit = min(params.top_k or values.shape[1], values.shape[1])
    if params.top_p == 1:
        return torch.full_like(values[:, 0], limit, dtype=torch.int64)
    mass = (values[:, :limit] - best).exp().to(wide)
    total = mass.sum(-1, keepdim=True) if params.top_k else (scaled - best).exp().sum(-1, keepdim=True).to(wide)
    before = mass.cumsum(-1) - mass
    return (before < params.top_p * total).sum(-1).clamp(min=1)


def _first_above(ends: Tensor, target: Tensor) -> Tensor:
    """First index where a running sum exceeds the target, (B, 1): an item of positive mass, always.

    Rounding may lift the target to the sum or sink it below 0; items of no mass never qualify either way.
    """
    last = torch.searchsorted(ends, ends[:, -1:].contiguous())
    found = torch.searchsorted(ends, target.clamp(min=0), right=True)
    return torch.minimum(found, last).clamp(max=ends.shape[1] - 1)


def _gather(rows: Tensor, index: Tensor) -> Tensor:
    return rows.gather(1, index[:, None])[:, 0]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64  # MPS has no float64
