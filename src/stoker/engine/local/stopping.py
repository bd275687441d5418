"""What ends an answer: every stop token of the model, and the run's own stop strings."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

__all__ = ["StopStrings", "decode", "stop_token_ids"]

_CHAT_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>",
    "<|return|>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>",
)  # fmt: skip
"""Ends of turn in known chat formats: an instruct model may write one that its config doesn't name as EOS."""


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends an answer: the generation config's, the tokenizer's EOS, known chat ends; sorted."""
    found: set[int] = set()
    configured = getattr(model.generation_config, "eos_token_id", None)
    if configured is not None:
        found.update([configured] if isinstance(configured, int) else configured)
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    # Only added tokens: "<|end|>" spelled out of ordinary pieces in a text is text.
    added = tokenizer.get_added_vocab()
    found.update(added[token] for token in _CHAT_ENDS if token in added)
    return tuple(sorted(found))


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: NDArray[np.integer]) -> str:
    """Text of an answer, special tokens left out."""
    if (
        type(tokenizer).decode is PreTrainedTokenizerFast.decode
        and type(tokenizer)._decode is PreTrainedTokenizerFast._decode
    ):
        # What they come to, without an inspection of every id for what kind of sequence it might be.
        return tokenizer.backend_tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)
    text = tokenizer.decode(token_ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


class StopStrings:
    """Finds a stop string as soon as a token completes it, wherever the token boundaries fall."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_vocab()
        self.token_ids = tuple(added[s] for s in strings if s in added)
        """Strings that are one added token ("<|im_end|>"): the text, without special tokens, may never show them."""
        self._strings = tuple(s for s in strings if s and s not in added)
        # A token is at least a byte of text, so this many of the last ones hold any string that ends in the
        # newest one. The margin is for decoders that treat the first token differently, and for special tokens.
        self._window = max((len(s.encode()) for s in self._strings), default=0) + 8

    def __bool__(self) -> bool:
        return bool(self._strings)

    def completed(self, token_ids: NDArray[np.integer]) -> bool:
        """True where the answer so far, (T,), holds a stop string."""
        recent = decode(self._tokenizer, token_ids[-self._window :])
        # The window is cheap but may begin inside a character, so what it shows is confirmed on the whole.
        return self._in(recent) and self._in(decode(self._tokenizer, token_ids))

    def cut(self, text: str) -> str:
        """The text before its first stop string."""
        starts = [place for s in self._strings if (place := text.find(s)) >= 0]
        return text[: min(starts)] if starts else text

    def _in(self, text: str) -> bool:
        return any(s in text for s in self._strings)
