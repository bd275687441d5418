"""Attention of the learner on a CPU: only between tokens that see each other, with a backward pass of its own.

A line of a micro-batch is a prompt and its answers (layout.py). With a mask over all its pairs most scores are computed
to be thrown away; here answers meet their prompt, and each answer itself. The backward pass computes probabilities
again from the kept log-sum-exp, in plain matrix products: with few tokens, and in bfloat16 above all, PyTorch's own for
CPUs takes several times as long (bfloat16, 64 x 109 tokens, 9 heads: 124 ms for both passes against 28).

S lines, L the longest, P the longest prompt, R the most answers, A the longest answer; K key heads, G query heads of
each, D head dimension.
"""

from ctypes import byref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from stoker.engine.local.compiler import Library
from stoker.engine.local.step_math import attend_part, merge_parts
from stoker.engine.local.structures import NAMES, Mask, float32, int32, int64, pointer

__all__ = ["Blocks", "blocks_of", "give_back", "take_over"]

_NAME = "stoker_blocks"
_LONGEST = {torch.bfloat16: 1024, torch.float32: 192}
"""The longest block that plain products are faster for, in tokens: measured on a CPU with AMX."""


@dataclass(frozen=True)
class Set:
    """Blocks of one length T, padded: prompts (S of them) or answers (S R)."""

    length: int  # T
    places: Tensor  # (blocks T,) where each token stands in the flat lines (S L); padding anywhere
    real: Tensor | None  # (blocks T,) bool; None: no padding
    ours: Tensor  # (tokens,) the real ones among the blocks' tokens
    theirs: Tensor  # (tokens,) and in the flat lines

    @classmethod
    def of(cls, places: Tensor, real: Tensor) -> "Set":
        """Both (.., T)."""
        places = (places * real).view(-1)
        ours = real.view(-1).nonzero()[:, 0]
        return cls(real.shape[-1], places, None if len(ours) == len(places) else real.view(-1), ours, places[ours])


@dataclass(frozen=True)
class Blocks:
    """Lines taken apart."""

    answers: Set
    prompts: Set | None = None
    """None: each line is one block, and `answers` holds those."""
    library: Library | None = None
    """Compiled functions for the backward pass; None: PyTorch's operators."""

    @property
    def sets(self) -> list[Set]:
        return [self.answers] if self.prompts is None else [self.prompts, self.answers]


def blocks_of(
    segments: Tensor | None, shape: tuple[int, int], dtype: torch.dtype, library: Library | None = None
) -> Blocks | None:
    """Blocks of lines (S, L) with these `layout.Microbatch.segments`; None: PyTorch's attention is the faster one."""
    lines, length = shape
    limit = _LONGEST.get(dtype, 0)
    first = torch.arange(lines)[:, None] * length
    if segments is None:
        if length > limit:
            return None
        places = first + torch.arange(length)
        return Blocks(Set.of(places, torch.ones_like(places, dtype=torch.bool)), library=library)
    counts = torch.stack([(segments == number).sum(1) for number in range(int(segments.max()) + 1)], 1)  # (S, 1 + R)
    if int(counts.max()) > limit:
        return None
    at = torch.arange(int(counts[:, 0].max()))
    prompts = Set.of(first + at, at < counts[:, :1])
    if counts.shape[1] == 1:  # answers of one token each: nothing is predicted from them, so they aren't there
        return Blocks(prompts, library=library)
    starts = counts.cumsum(1)[:, :-1]  # (S, R) an answer begins where what is before it ends
    at = torch.arange(int(counts[:, 1:].max()))
    answers = Set.of((first + starts)[:, :, None] + at, at < counts[:, 1:, None])
    return Blocks(answers, prompts, library)


def take_over(model: PreTrainedModel) -> bool:
    """Let a model on CPU that uses SDPA take `blocks=` in its forward; without it, and elsewhere, SDPA serves."""
    config = model.config.get_text_config()
    if model.device.type != "cpu" or config._attn_implementation not in ("sdpa", _NAME):
        return config._attn_implementation == _NAME
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    config._attn_implementation = _NAME
    return True


def give_back(model: PreTrainedModel) -> None:
    """Undo `take_over`."""
    config = model.config.get_text_config()
    if config._attn_implementation == _NAME:
        config._attn_implementation = "sdpa"


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    blocks: Blocks | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: query (S, K G, L, D), key and value (S, K, L, D) -> (S, L, K G, D)."""
    if blocks is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **more)
    if more.get("softcap") or more.get("sliding_window") or more.get("dropout"):
        raise ValueError("attention by blocks knows no softcap, window or dropout")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _Attend.apply(query, key, value, blocks, scale), None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, scale: float) -> Tensor:
        flat = _Flat(query, key, blocks)
        q, k, v = flat.parts(query), flat.parts(key), flat.parts(value)
        found = _forward(q, k, v, flat, scale)
        seen = flat.together([seen for seen, _ in found], query.shape[1])
        ctx.save_for_backward(query, key, value, seen, *(weight for _, weight in found))
        ctx.blocks, ctx.scale = blocks, scale
        return seen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, seen, *weights = ctx.saved_tensors
        flat = _Flat(query, key, ctx.blocks)
        q, k, v = flat.parts(query), flat.parts(key), flat.parts(value)
        g, out = (flat.parts(x.transpose(1, 2), clean=True) for x in (gradient, seen))
        deltas = [(one.float() * other.float()).sum(-1, keepdim=True) for one, other in zip(g, out, strict=True)]
        dq, dk, dv = _backward(q, k, v, g, deltas, weights, flat, ctx.scale, ctx.blocks.library)
        gradients = zip((dq, dk, dv), (query, key, value), strict=True)
        return *(flat.together(parts, x.shape[1]).transpose(1, 2) for parts, x in gradients), None, None


class _Flat:
    """Takes blocks out of lines and puts them back. A block is (K, G T, D): query heads of one key head lie behind each
    other.
    """

    def __init__(self, query: Tensor, key: Tensor, blocks: Blocks) -> None:
        self.sets = blocks.sets
        self.lines, heads, self.length, self.dim = query.shape
        self.keys, self.group = key.shape[1], heads // key.shape[1]

    def parts(self, x: Tensor, *, clean: bool = False) -> list[Tensor]:
        """By set: (blocks, K, X T, D) of (S, K X, L, D); `clean`: 0 on padding."""
        heads = x.shape[1]
        flat = x.transpose(1, 2).reshape(self.lines * self.length, heads * self.dim)
        found = []
        for some in self.sets:
            taken = flat.index_select(0, some.places)
            if clean and some.real is not None:
                taken.mul_(some.real[:, None])
            taken = taken.view(-1, some.length, self.keys, heads // self.keys, self.dim).permute(0, 2, 3, 1, 4)
            found.append(taken.reshape(len(taken), self.keys, -1, self.dim))
        return found

    def together(self, parts: list[Tensor], heads: int) -> Tensor:
        """The inverse, as (S, L, heads, D); 0 on what belongs to no block."""
        out = parts[0].new_zeros(self.lines * self.length, heads * self.dim)
        for part, some in zip(parts, self.sets, strict=True):
            apart = part.view(len(part), self.keys, -1, some.length, self.dim).permute(0, 3, 1, 2, 4)
            rows = apart.reshape(-1, heads * self.dim)
            out.index_copy_(0, some.theirs, rows if some.real is None else rows.index_select(0, some.ours))
        return out.view(self.lines, self.length, heads, self.dim)

    def causal(self, some: Set, dtype: torch.dtype) -> Tensor:
        """What to add to the scores of a block, (1, 1, G T, T)."""
        hidden = torch.full((some.length, some.length), -torch.inf, dtype=dtype).triu(1)
        return hidden.repeat(self.group, 1)[None, None]

    def padding(self, dtype: torch.dtype) -> Tensor | None:
        """What to add to the scores that answers have of their prompts, (S, 1, 1, P)."""
        real = self.sets[0].real
        if real is None:
            return None
        return torch.zeros(real.shape, dtype=dtype).masked_fill_(~real, -torch.inf).view(self.lines, 1, 1, -1)

    def by_line(self, answers: Tensor) -> Tensor:
        """(S R, K, X, D) -> (S, K, R X, D)."""
        _, keys, rows, dim = answers.shape
        return answers.view(self.lines, -1, keys, rows, dim).transpose(1, 2).reshape(self.lines, keys, -1, dim)

    def by_answer(self, lines: Tensor) -> Tensor:
        """The inverse."""
        _, keys, _, dim = lines.shape
        apart = lines.view(self.lines, keys, -1, self.group * self.sets[1].length, dim).transpose(1, 2)
        return apart.reshape(-1, keys, self.group * self.sets[1].length, dim)


def _forward(
    q: list[Tensor], k: list[Tensor], v: list[Tensor], flat: _Flat, scale: float
) -> list[tuple[Tensor, Tensor]]:
    """Of each set of blocks: what is seen, and the log of the sum of the exponentials of its scores."""
    own = [
        attend_part(query, key, value, flat.causal(some, key.dtype), None, scale)
        for some, query, key, value in zip(flat.sets, q, k, v, strict=True)
    ]
    if len(own) == 1:
        return own
    seen, weight = attend_part(flat.by_line(q[1]), k[0], v[0], flat.padding(q[1].dtype), None, scale)
    there = flat.by_answer(seen), flat.by_answer(weight)
    merged = merge_parts(own[1], there)
    return [own[0], (merged, torch.logaddexp(own[1][1], there[1]))]


def _backward(
    q: list[Tensor],
    k: list[Tensor],
    v: list[Tensor],
    g: list[Tensor],
    deltas: list[Tensor],
    weights: list[Tensor],
    flat: _Flat,
    scale: float,
    library: Library | None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    own = [
        _gradients(q[n], k[n], v[n], g[n], deltas[n], weights[n], flat.causal(some, torch.float32), scale, library)
        for n, some in enumerate(flat.sets)
    ]
    dq, dk, dv = ([of_block[n] for of_block in own] for n in range(3))
    if len(own) > 1:
        asked, gradient, delta, weight = (flat.by_line(x) for x in (q[1], g[1], deltas[1], weights[1]))
        more = _gradients(asked, k[0], v[0], gradient, delta, weight, flat.padding(torch.float32), scale, library)
        dq[1], dk[0], dv[0] = dq[1] + flat.by_answer(more[0]), dk[0] + more[1], dv[0] + more[2]
    return dq, dk, dv


def _gradients(
    query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, delta: Tensor, weight: Tensor, mask: Tensor | None,
    scale: float, library: Library | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Of query (N, K, Q, D), key and value (N, K, T, D); `gradient` (N, K, Q, D) of what is seen, `delta` its product
    with what is seen and `weight` the log-sum-exp of the scores over all keys, not these alone, (N, K, Q, 1).
    """
    scores, change = query @ key.transpose(-1, -2), gradient @ value.transpose(-1, -2)
    if library is None:
        wide = scores.float().mul_(scale).sub_(weight)
        if mask is not None:
            wide += mask
        chance = wide.exp_()
        change = change.float().sub_(delta).mul_(chance).mul_(scale).to(query.dtype)
        chance = chance.to(query.dtype)
    else:
        _rescore(library, scores, change, weight, delta, mask, scale)
        chance = scores
    return change @ key, change.transpose(-1, -2) @ query, chance.transpose(-1, -2) @ gradient


def _rescore(
    library: Library, scores: Tensor, change: Tensor, weight: Tensor, delta: Tensor, mask: Tensor | None, scale: float
) -> None:
    """`scores` become probabilities and `change`, of these, that of the scores: all in one pass."""
    back = library.function(f"attention_back_{NAMES[scores.dtype]}", *[pointer] * 5, float32, *[int64] * 4, int32)
    told = Mask()
    if mask is not None:
        told = Mask(mask.data_ptr(), *(mask.stride(n) if mask.shape[n] > 1 else 0 for n in (0, 2)))
    weight, delta = weight.contiguous(), delta.contiguous()
    places = scores.data_ptr(), change.data_ptr(), weight.data_ptr(), delta.data_ptr()
    back(*places, byref(told), scale, *scores.shape, torch.get_num_threads())
