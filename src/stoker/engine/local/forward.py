"""From rows to per-token numbers: padding, the trunk, and the head at response positions only.

B rows of a micro-batch, L the longest prompt + answer, T the longest answer, N scored positions, H hidden
size. The logits that predict token t of an answer stand at position P + t - 1 of its row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from stoker.engine.local.chunked import Head, Kept, Scores, scores_of_logits, token_scores
from stoker.errors import ModelError
from stoker.rl.types import TrainRow

__all__ = ["Microbatch", "ScoringModel", "checkpoint_activations", "collate", "hidden_states", "row_length", "trunk_of"]


@dataclass(frozen=True)
class Microbatch:
    """Rows on the device, padded on the right."""

    token_ids: Tensor  # (B, L)
    sources: Tensor  # (N,) where the hidden state of each scored token stands in the flat (B * L)
    slots: Tensor  # (N,) where its result goes in the flat (B * T)
    targets: Tensor  # (N,)
    temperature: Tensor  # (N,)
    kept: Kept | None
    shape: tuple[int, int]  # (B, T)

    def spread(self, values: Tensor) -> Tensor:
        """(N,) -> (B, T), 0 where nothing was scored; differentiable."""
        rows, width = self.shape
        return values.new_zeros(rows * width).index_copy(0, self.slots, values).view(rows, width)


def row_length(row: TrainRow) -> int:
    """Tokens of prompt and answer."""
    return len(row.prompt_ids) + len(row.token_ids)


def collate(rows: Sequence[TrainRow], device: torch.device, *, only_counted: bool) -> Microbatch:
    """`only_counted`: score the tokens of the mask alone, which is all that a loss can see."""
    width, longest = max(len(row.token_ids) for row in rows), max(map(row_length, rows))
    token_ids = np.zeros((len(rows), longest), dtype=np.int64)  # what stands on padding is never looked at
    scored: list[NDArray[np.int64]] = []  # answer positions of each row
    for line, row in zip(token_ids, rows, strict=True):
        if not row.prompt_ids:
            raise ModelError(
                f"sample {row.sample_id} has an empty prompt: its first token has nothing to be predicted from"
            )
        line[: row_length(row)] = [*row.prompt_ids, *row.token_ids]
        scored.append(np.flatnonzero(row.mask) if only_counted else np.arange(len(row.token_ids)))
    indexed = list(zip(scored, rows, strict=True))

    def put(parts: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device=device, dtype=dtype)

    return Microbatch(
        token_ids=torch.from_numpy(token_ids).to(device),
        sources=put([at + i * longest + len(row.prompt_ids) - 1 for i, (at, row) in enumerate(indexed)], torch.int64),
        slots=put([at + i * width for i, at in enumerate(scored)], torch.int64),
        targets=put([row.token_ids[at] for at, row in indexed], torch.int64),
        temperature=put([np.full(len(at), row.temperature) for at, row in indexed], torch.float32),
        kept=_kept(indexed, device),
        shape=(len(rows), width),
    )


def _kept(indexed: Sequence[tuple[NDArray[np.int64], TrainRow]], device: torch.device) -> Kept | None:
    """The kept ids of the scored positions, in their order; a row without any keeps everything (an empty set)."""
    if all(row.kept is None for _, row in indexed):
        return None
    ids, counts = [], []
    for at, row in indexed:
        if row.kept is None:
            counts.append(np.zeros(len(at), dtype=np.int64))
            continue
        spans = list(pairwise(row.kept.offsets.tolist()))
        ids += [row.kept.ids[slice(*spans[t])] for t in at]
        counts.append(np.diff(row.kept.offsets)[at])
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
    flat = np.concatenate(ids) if ids else np.zeros(0)
    return Kept(torch.from_numpy(flat).to(device=device, dtype=torch.int64), torch.from_numpy(offsets))


def trunk_of(model: PreTrainedModel) -> nn.Module | None:
    """The model without its head, where it is a module of its own."""
    trunk: nn.Module = model.base_model
    return None if trunk is model else trunk


def hidden_states(trunk: nn.Module, batch: Microbatch) -> Tensor:
    """(N, H) last hidden states that predict the scored tokens.

    No attention mask: padding is on the right, where a causal model can't look, and positions count from
    each row's start anyway. Without a mask the fastest attention kernels apply.
    """
    states: Tensor = trunk(input_ids=batch.token_ids, use_cache=False).last_hidden_state  # (B, L, H)
    return states.flatten(0, 1).index_select(0, batch.sources)


class ScoringModel:
    """A causal language model seen as a scorer of given tokens. Holds no copy of any weight."""

    def __init__(self, model: PreTrainedModel, positions_per_chunk: int) -> None:
        self.model = model
        self._chunk = positions_per_chunk
        self._trunk = trunk_of(model)
        self._scale, self._softcap = _head_transforms(model)
        self.notes: list[str] = []
        if not self._splits():
            self._trunk = None
            self.notes.append(
                f"{type(model).__name__} isn't trunk + linear head as far as stoker can tell: the logits of a whole "
                "micro-batch are in memory at once, so update.logits_per_chunk has no effect"
            )

    def __call__(self, batch: Microbatch) -> Scores:
        """Log-prob and entropy of each scored token, (N,)."""
        if self._trunk is None:
            logits = self.model(input_ids=batch.token_ids, use_cache=False).logits
            chosen = logits.flatten(0, 1).index_select(0, batch.sources)
            return scores_of_logits(chosen, batch.targets, batch.temperature, batch.kept)
        hidden = hidden_states(self._trunk, batch)
        return token_scores(hidden, self._head(), batch.targets, batch.temperature, batch.kept, self._chunk)

    def _head(self) -> Head:
        linear = self.model.get_output_embeddings()
        return Head(linear.weight, getattr(linear, "bias", None), self._scale, self._softcap)

    @torch.no_grad()
    def _splits(self) -> bool:
        """Does head(trunk(x)) equal the model's own logits? Tried, since there are too many kinds to list."""
        if self._trunk is None or not isinstance(self.model.get_output_embeddings(), nn.Linear):
            return False
        generator = torch.Generator().manual_seed(0)
        vocabulary = self.model.config.get_text_config().vocab_size
        ids = torch.randint(vocabulary, (2, 6), generator=generator).to(self.model.device)
        expected = self.model(input_ids=ids, use_cache=False).logits.float()
        head = self._head()
        states = self._trunk(input_ids=ids, use_cache=False).last_hidden_state
        found = nn.functional.linear(states, head.weight, head.bias).float() * head.scale
        if head.softcap:
            found = head.softcap * torch.tanh(found / head.softcap)
        tolerance = 1e-4 if self.model.dtype in (torch.float32, torch.float64) else 3e-2
        return bool((found - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1e-6))


def _head_transforms(model: PreTrainedModel) -> tuple[float, float]:
    """(scale, softcap) that the config names: Cohere multiplies logits, Granite divides them, Gemma caps them."""
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return scale, float(getattr(config, "final_logit_softcapping", None) or 0.0)


def checkpoint_activations(module: Any) -> None:
    """Recompute each layer in the backward pass instead of keeping its activations."""
    enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise ModelError(f"update.activation_checkpointing = true, but {error} Set it to false") from error
    # It makes embeddings' outputs require gradients, for adapters; here all weights do.
    module.disable_input_require_grads()
