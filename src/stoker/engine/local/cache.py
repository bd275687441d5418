"""What a model can do when it decodes, and a key-value cache that is written in place.

The cache of transformers grows by concatenation: every token copies the whole past. This one owns room for
tokens to come, so a token costs its own bytes.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from stoker.errors import ModelError

__all__ = ["Abilities", "abilities_of", "preallocated_cache"]

_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")  # newest name first
_MIN_ROOM = 64
_ATTENTION_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
_EMPTY_LAYERS = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))  # new in 5.23


@dataclass(frozen=True)
class Abilities:
    """How a model's forward may be called, read from its signature and its cache layers."""

    cache_argument: str | None
    """None: no cache that can be reordered, so each token recomputes its whole past."""
    preallocated: bool
    """Every layer is attention over keys and values, so `preallocated_cache` fits; else the model's own cache."""
    pads: bool
    """Prompts of different lengths may share a batch: padding can be masked and positions given."""
    logits_to_keep: bool
    position_ids: bool
    max_positions: int | None
    """Longest sequence, None: no limit stated."""


def abilities_of(model: PreTrainedModel) -> Abilities:
    """Read what `model` can do. Raises ModelError where it can't write text left to right."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{type(model).__name__} is an encoder-decoder: stoker samples from decoder-only language models "
            "(the classes of AutoModelForCausalLM). Choose another model.path."
        )
    if not model.can_generate():
        raise ModelError(
            f"{type(model).__name__} has no language-model head, so it gives no token probabilities: "
            "load it with AutoModelForCausalLM."
        )
    if _looks_ahead(model):
        raise ModelError(
            f"{type(model).__name__} attends to later tokens, so it can't write text left to right: set is_decoder = "
            "true in its config.json, or choose another model.path."
        )
    arguments = inspect.signature(model.forward).parameters
    argument = next((name for name in _CACHE_ARGUMENTS if name in arguments), None)
    # A stateful model (state space, recurrence) keeps more than keys and values, whatever its config lists.
    attends = argument is not None and not getattr(model, "_is_stateful", False) and _only_attention(config)
    positions = "position_ids" in arguments and not _numbers_positions(model)
    if argument is not None and not attends and not _own_cache_works(model, argument):
        argument = None
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return Abilities(
        cache_argument=argument,
        preallocated=attends,
        pads=attends and positions and "attention_mask" in arguments,
        logits_to_keep="logits_to_keep" in arguments,
        position_ids=positions,
        max_positions=limit if isinstance(limit, int) and limit > 0 else None,
    )


def preallocated_cache(config: PreTrainedConfig, length: int) -> Cache:
    """A cache for up to `length` tokens a row. Windows are left to the masks: each layer keeps the whole past."""
    template = DynamicCache(config=config).layers
    return Cache(layers=[_InPlaceLayer(length) if type(layer) in _ATTENTION_LAYERS else layer for layer in template])


class _InPlaceLayer(DynamicLayer):
    """Keys and values in buffers (rows, heads, room, dim), of which the first `_length` positions are filled.

    Room grows by half when it is full: rows that stop early never pay for the longest possible answer.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start, self._length = self._length, self._length + key_states.shape[-2]
        if self.keys is None or self.values is None:
            self.device = key_states.device
            self.keys, self.values = key_states, value_states  # the prompt itself, until rows are chosen
            self.is_initialized = True
            return key_states, value_states
        if self._length > self.keys.shape[-2]:
            room = max(self._length, start + max(start // 2, _MIN_ROOM))
            self.keys = _with_room(self.keys[:, :, :start], None, min(room, max(self._limit, self._length)))
            self.values = _with_room(self.values[:, :, :start], None, min(room, max(self._limit, self._length)))
        self.keys[:, :, start : self._length] = key_states
        self.values[:, :, start : self._length] = value_states
        return self.keys[:, :, : self._length], self.values[:, :, : self._length]

    def get_seq_length(self) -> int:
        return self._length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows, in this order; a row may be repeated or left out."""
        if self.keys is None or self.values is None:
            return
        room = min(max(self.keys.shape[-2], self._length + _MIN_ROOM), max(self._limit, self._length))
        self.keys = _with_room(self.keys[:, :, : self._length], beam_idx, room)
        self.values = _with_room(self.values[:, :, : self._length], beam_idx, room)


def _with_room(filled: Tensor, rows: Tensor | None, room: int) -> Tensor:
    """A buffer of `room` positions that begins with `filled` (or the named rows of it)."""
    count, heads, length, dim = filled.shape
    buffer = filled.new_empty(count if rows is None else len(rows), heads, room, dim)
    buffer[:, :, :length] = filled if rows is None else filled.index_select(0, rows)
    return buffer


def _only_attention(config: PreTrainedConfig) -> bool:
    try:
        layers = DynamicCache(config=config).layers
    except (AttributeError, KeyError, TypeError):  # layer types that only the model's own code knows
        return False
    return all(type(layer) in (*_ATTENTION_LAYERS, *_EMPTY_LAYERS) for layer in layers)


def _looks_ahead(model: PreTrainedModel) -> bool:
    """True for an encoder that is not set to decode: its modules say so, and none says otherwise."""
    said = [getattr(module, name, None) for module in model.modules() for name in ("is_causal", "is_decoder")]
    return False in said and True not in said


def _numbers_positions(model: PreTrainedModel) -> bool:
    """True where positions are counted from the token ids by the model's own rule (RoBERTa's begin at 2)."""
    return any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules())


def _own_cache_works(model: PreTrainedModel, argument: str) -> bool:
    """True where the model returns a cache of transformers' kind, whose rows can be chosen and repeated."""
    with torch.no_grad():
        output = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=True)
    return isinstance(getattr(output, argument, None), Cache)
