"""From a micro-batch to per-token numbers: the trunk over all tokens, the head at scored positions only.

S lines, L the longest line, N scored positions, H hidden size.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stoker.engine.local.block_attention import blocks_of, give_back, take_over
from stoker.engine.local.chunked import Head, Scores, scores_of_logits, token_scores
from stoker.engine.local.compiler import Library, arithmetic, load_library
from stoker.engine.local.layout import Line, Microbatch, collate
from stoker.rl.types import TrainRow

__all__ = ["ScoringModel", "hidden_states", "sharing_width", "trunk_of"]


def trunk_of(model: PreTrainedModel) -> nn.Module | None:
    """The model without its head, where it is a module of its own."""
    trunk: nn.Module = model.base_model
    return None if trunk is model else trunk


def hidden_states(
    trunk: nn.Module, batch: Microbatch, *, by_blocks: bool = False, library: Library | None = None
) -> Tensor:
    """(N, H) last hidden states that predict the scored tokens. `by_blocks`: the model takes `block_attention.Blocks`.

    No attention mask where each line has one answer: padding is on the right, where a causal model can't
    look. Without a mask the fastest attention kernels apply.
    """
    extra: dict[str, Any] = {}
    dtype, (lines, length) = next(trunk.parameters()).dtype, batch.token_ids.shape
    blocks = blocks_of(batch.segments, (lines, length), dtype, library) if by_blocks else None
    if blocks is not None:
        # A mask of four dimensions is taken as it is; nothing looks at it.
        extra = {"blocks": blocks, "attention_mask": torch.zeros(1, 1, 1, 1), "position_ids": batch.positions}
    elif batch.segments is not None:
        extra = {"attention_mask": batch.mask(dtype), "position_ids": batch.positions}
    states: Tensor = trunk(input_ids=batch.token_ids, use_cache=False, **extra).last_hidden_state  # (S, L, H)
    return states.flatten(0, 1).index_select(0, batch.sources)


@torch.no_grad()
def sharing_width(model: PreTrainedModel) -> int:
    """The hidden size where answers to one prompt may share a line; 0 where the model can't do it.

    Windowed attention would count the answers between; other models are asked by trying.
    """
    config, trunk = model.config.get_text_config(), trunk_of(model)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if trunk is None or kinds != {"full_attention"} or getattr(config, "sliding_window", None):
        return 0
    shared, apart = _lines_of_two(model), _lines_of_one(model)
    try:
        found, expected = hidden_states(trunk, shared).float(), hidden_states(trunk, apart).float()
    except (TypeError, ValueError, RuntimeError, IndexError):  # it takes no position_ids, or no mask of its own
        return 0
    return int(config.hidden_size) if _close(found, expected, model.dtype) else 0


def _lines_of_two(model: PreTrainedModel) -> Microbatch:
    """Two short answers on the line of their prompt."""
    return collate(_two_rows(model), [Line((0, 1), 9)], model.device)


def _lines_of_one(model: PreTrainedModel) -> Microbatch:
    """The same, a line each."""
    return collate(_two_rows(model), [Line((0,), 6), Line((1,), 6)], model.device)


def _two_rows(model: PreTrainedModel) -> list[TrainRow]:
    vocabulary = model.config.get_text_config().vocab_size
    ids = np.random.default_rng(0).integers(0, vocabulary, 16).astype(np.int32)
    empty = np.zeros(4, dtype=np.float32)
    return [
        TrainRow("", tuple(ids[:3].tolist()), answer, np.ones(4, dtype=np.bool_), empty, empty, empty)
        for answer in (ids[4:8], ids[8:12])
    ]


@torch.no_grad()
def _takes_blocks(model: PreTrainedModel) -> bool:
    """True where the trunk attends by blocks, and without them as before, tried on lines of one and of two answers.

    Where it doesn't, the model is left as it was: some ask for the name of their attention (Falcon), and would compute
    something else under another.
    """
    trunk, batches = trunk_of(model), [_lines_of_two(model), _lines_of_one(model)]
    if trunk is None:
        return False
    expected = [hidden_states(trunk, batch).float() for batch in batches]
    if not take_over(model):
        return False
    try:
        found = [hidden_states(trunk, batch, by_blocks=by).float() for by in (True, False) for batch in batches]
        takes = all(_close(one, other, model.dtype) for one, other in zip(found, expected * 2, strict=True))
    except (TypeError, ValueError, RuntimeError):  # its layers don't pass on what they are given
        takes = False
    if not takes:
        give_back(model)
    return takes


def _close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    tolerance = 1e-4 if dtype in (torch.float32, torch.float64) else 3e-2
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1e-6))


class ScoringModel:
    """A causal language model seen as a scorer of given tokens. Holds no copy of any weight."""

    def __init__(self, model: PreTrainedModel, positions_per_chunk: int, *, compiled: bool = False) -> None:
        """`compiled`: let functions compiled for this CPU help where there are any."""
        library = load_library() if compiled and model.device.type == "cpu" else None
        self._library = library if isinstance(library, Library) else None
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
        self.sharing_width = sharing_width(model) if self._trunk is not None else 0
        self._by_blocks = bool(self.sharing_width) and _takes_blocks(model)

    @property
    def arithmetic(self) -> str:
        """What computes attention's backward pass, for a manifest."""
        return arithmetic(self._library if self._by_blocks else None)

    def __call__(self, batch: Microbatch) -> Scores:
        """Log-prob and entropy of each scored token, (N,)."""
        if self._trunk is None:
            logits = self.model(input_ids=batch.token_ids, use_cache=False).logits
            chosen = logits.flatten(0, 1).index_select(0, batch.sources)
            return scores_of_logits(chosen, batch.targets, batch.temperature, batch.kept)
        hidden = hidden_states(self._trunk, batch, by_blocks=self._by_blocks, library=self._library)
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
        return _close(found, expected, self.model.dtype)


def _head_transforms(model: PreTrainedModel) -> tuple[float, float]:
    """(scale, softcap) that the config names: Cohere multiplies logits, Granite divides them, Gemma caps them."""
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return scale, float(getattr(config, "final_logit_softcapping", None) or 0.0)
