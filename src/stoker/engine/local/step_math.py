"""What lies between the matrix products of a decoding step, in PyTorch's operators: any device, any type.

`compiled_math.py` does the same in one pass where a CPU has a compiler.
B rows, P prompts, at most R rows of one prompt, H query heads in K groups of G (H = K G), D head dimension.
"""

from typing import Protocol

import torch
from torch import Tensor

from stoker.engine.local.dense import Dense, Layer, Norm
from stoker.engine.local.group_cache import GroupCache

__all__ = ["StepMath", "TorchMath", "attend_part", "merge_parts", "turned"]

_HIDDEN = -1e30
"""Added to a score that must not count; finite, so that a part which is hidden altogether has weight 0, not NaN."""


class StepMath(Protocol):
    """One decoder's, beside its cache."""

    def begin_step(self) -> None:
        """The cache has opened a column, or its rows are others."""
        ...

    def step(self, x: Tensor) -> Tensor | None:
        """The norm of inputs (B, width) after all layers, in one call. None: it must be called layer by layer."""
        ...

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Of a layer's products (B, H D), (B, K D), (B, K D): keep key and value in the current column; what the
        queries see, (B, H D).
        """
        ...

    def add_norm(self, x: Tensor, more: Tensor | None, after: Norm | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """x + after(more), and its norm, (N, width) both. `x` itself may be overwritten."""
        ...

    def gate(self, layer: Layer, gate: Tensor, up: Tensor) -> Tensor:
        """activation(gate) * up, (N, width)."""
        ...


class TorchMath:
    """`StepMath` by attention in two parts, prompts and answers: a prompt's keys are read once for all its rows."""

    def __init__(self, dense: Dense, cache: GroupCache, tables: dict[str | None, tuple[Tensor, Tensor]]) -> None:
        self._dense = dense
        self._cache = cache
        self._tables = tables
        self._windows = {layer.window for layer in dense.layers}

    def begin_step(self) -> None:
        """The masks of this step, and `_grid` (P, R): the rows of each prompt, filled up with row 0; `_spots` (B,): a
        row's place in it.
        """
        positions = self._cache.positions
        self._turns = {kind: (cos[positions], sin[positions]) for kind, (cos, sin) in self._tables.items()}
        members: list[list[int]] = [[] for _ in self._cache.prompt_lengths]
        for row, prompt in enumerate(self._cache.rows.prompts.tolist()):
            members[prompt].append(row)
        most = max(map(len, members), default=0)
        spots = [0] * len(self._cache.rows)
        for prompt, rows in enumerate(members):
            for rank, row in enumerate(rows):
                spots[row] = prompt * most + rank
        filled = [rows + [0] * (most - len(rows)) for rows in members]
        device = positions.device
        self._grid = torch.tensor(filled, dtype=torch.long, device=device).view(len(members), most)
        self._spots = torch.tensor(spots, dtype=torch.long, device=device)
        self._masks = {window: self._mask(window, positions) for window in self._windows}

    def step(self, x: Tensor) -> Tensor | None:
        return None

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layer, cache, dim = self._dense.layers[index], self._cache, self._dense.head_dim
        store, shared = cache.own[index], cache.shared[index]
        rows, heads = len(query), self._dense.key_value_heads
        query, key = turned(layer, query, key, self._turns[layer.rotary], dim)
        seen = slice(cache.first, cache.column + 1)
        store.keys[:rows, :, cache.column] = key
        store.values[:rows, :, cache.column] = value.view(rows, heads, dim)
        prompt_mask, answer_mask = self._masks[layer.window]
        query = query.view(rows, heads, -1, dim)
        own = attend_part(query, store.keys[:rows, :, seen], store.values[:rows, :, seen], answer_mask, layer.softcap)

        prompts, most = self._grid.shape
        group, width = query.shape[2], max(cache.prompt_lengths)
        asked = query[self._grid.view(-1)].view(prompts, most, heads, group, dim).transpose(1, 2)  # (P, K, R, G, D)
        seen_there, weight = attend_part(
            asked.reshape(prompts, heads, most * group, dim),
            shared.keys[:prompts, :, :width],
            shared.values[:prompts, :, :width],
            prompt_mask,
            layer.softcap,
        )
        merged = merge_parts(own, (self._by_row(seen_there, most, group), self._by_row(weight, most, group)))
        return merged.to(value.dtype).view(rows, -1)

    def add_norm(self, x: Tensor, more: Tensor | None, after: Norm | None, norm: Norm) -> tuple[Tensor, Tensor]:
        if more is not None:
            x = x + (more if after is None else after(more))
        return x, norm(x)

    def gate(self, layer: Layer, gate: Tensor, up: Tensor) -> Tensor:
        return layer.activation(gate) * up

    def _by_row(self, part: Tensor, most: int, group: int) -> Tensor:
        """(P, K, R G, x) -> (B, K, G, x)."""
        prompts, heads, _, last = part.shape
        by_prompt = part.view(prompts, heads, most, group, last).transpose(1, 2)
        return by_prompt.reshape(prompts * most, heads, group, last)[self._spots]

    def _mask(self, window: int | None, positions: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What to add to the scores of prompts, (P, 1, R G or 1, width), and of answers, (B, 1, 1, columns)."""
        cache, device = self._cache, positions.device
        lengths = torch.tensor(cache.prompt_lengths, device=device)
        places = torch.arange(max(cache.prompt_lengths), device=device)
        columns = torch.arange(cache.first, cache.column + 1, device=device)
        hidden = (places >= lengths[:, None])[:, None]  # (P, 1, width)
        unborn = columns < cache.rows.starts[:, None]  # (B, columns)
        if window is not None:
            hidden = hidden | (positions[self._grid][:, :, None] - places >= window)  # (P, R, width)
            unborn = unborn | (cache.column - columns >= window)
        return _added(hidden[:, None]), _added(unborn[:, None, None])


def turned(layer: Layer, query: Tensor, key: Tensor, turn: tuple[Tensor, Tensor], dim: int) -> tuple[Tensor, Tensor]:
    """Queries (N, H, D), scaled, and keys (N, K, D) of products (N, H D) and (N, K D), with rotary embedding; of
    `turn`, cosines and sines (N, D), the sines carry the sign that the first half of the dimensions takes.
    """
    query, key = query.view(len(query), -1, dim), key.view(len(key), -1, dim)
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = layer.query_norm(query), layer.key_norm(key)
    cos, sin = turn[0][:, None], turn[1][:, None]
    query, key = (torch.addcmul(x * cos, x.roll(dim // 2, -1), sin) for x in (query, key))
    return query * layer.scale, key


def _added(hidden: Tensor) -> Tensor | None:
    return torch.where(hidden, _HIDDEN, 0.0) if bool(hidden.any()) else None


def attend_part(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, softcap: float | None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Attention over some of the keys: what is seen (N, K, Q, D), and the log of its weight (N, K, Q, 1).

    query (N, K, Q, D), keys and values (N, K, T, D), mask (N or 1, 1, Q or fewer, T) is added to the scores.
    """
    asked = query.shape[2]
    if mask is not None and 1 < mask.shape[2] < asked:
        mask = mask.repeat_interleave(asked // mask.shape[2], 2)
    if softcap is None and query.device.type == "cpu":  # one operator instead of eight
        added = None if mask is None else _narrowed(mask, query.dtype).expand(-1, -1, asked, -1)
        query = query.contiguous()  # a last stride of 1 is taken as given
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        seen, weight = flash(query, keys, values, 0.0, False, attn_mask=added, scale=scale)
        return seen, weight[..., None]
    scores = (query @ keys.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores += mask
    log_weight = scores.logsumexp(-1, keepdim=True)
    return (scores.sub_(log_weight).exp_().to(values.dtype) @ values), log_weight


def _narrowed(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """In `dtype`, still finite: float16 doesn't reach as far as `_HIDDEN`."""
    return (mask.clamp(min=torch.finfo(dtype).min) if dtype == torch.float16 else mask).to(dtype)


def merge_parts(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Attention over the keys of both parts."""
    share = torch.sigmoid(one[1] - other[1]).to(one[0].dtype)
    return torch.lerp(other[0], one[0], share)
