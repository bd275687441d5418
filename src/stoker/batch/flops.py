"""What a transformer must compute, from its config alone: floating-point operations (FLOPs) of its matrix products.

Algorithmic work: every product once, and of attention only the pairs of positions that a token may see. What an
engine computes beyond that (padding, recomputed activations, a prompt repeated for each of its answers) doesn't count,
nor does elementwise work. A product with n weights costs a token 2n; its backward pass 2n for the gradient of its
input and 2n for that of its weights (Kaplan et al. 2020, arXiv 2001.08361, section 2.1). A pair of positions costs
4 x (query heads x head dim) in every layer, for the scores and the weighted values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Attention", "Work", "causal_pairs", "work_of_config", "work_of_parameters"]

GATED = {
    "cohere", "cohere2", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "granite", "helium", "llama", "mistral",
    "olmo", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm",
}  # fmt: skip
"""Model types whose layers are q, k, v, o and a gated MLP of three matrices."""
PLAIN = {"gpt2", "gpt_neox", "opt", "phi", "starcoder2"}
"""Model types whose layers are q, k, v, o and an MLP of two matrices."""


@dataclass(frozen=True)
class Attention:
    """Layers that attend alike."""

    layers: int
    width: int
    """Query heads x head dim."""
    window: int = 0
    """Positions that a token sees, itself included; 0: all before it."""


@dataclass(frozen=True)
class Work:
    """The matrix products of a causal language model, as what one token meets on its way."""

    linear: int
    """Weights of the layers' products; for experts, those that a token visits."""
    head: int
    """Weights of the last product, onto the vocabulary; 0 where `linear` holds it (see `work_of_parameters`)."""
    attention: tuple[Attention, ...] = ()
    """Empty: not known, and left out."""
    adapters: int = 0
    """Trainable weights of adapters on an otherwise frozen model; 0: every weight is trained."""

    def pairs(self, tokens: int, past: int = 0) -> int:
        """FLOPs of attention: `tokens` new positions after `past` ones."""
        return sum(4 * a.layers * a.width * causal_pairs(tokens, past, a.window) for a in self.attention)

    def forward(self, tokens: int, past: int = 0, scored: int | None = None) -> int:
        """`tokens` positions after `past` cached ones; vocabulary logits at `scored` of them (None: all)."""
        logits = tokens if scored is None else scored
        return 2 * (self.linear + self.adapters) * tokens + 2 * self.head * logits + self.pairs(tokens, past)

    def training(self, tokens: int, past: int = 0, scored: int | None = None) -> int:
        """Forward and backward; `past` positions are a prompt that is computed, and counted, elsewhere.

        Adapters save the frozen weights' own gradients: 4 instead of 6 for each.
        """
        logits = tokens if scored is None else scored
        weight = 4 if self.adapters else 6
        products = weight * (self.linear * tokens + self.head * logits) + 6 * self.adapters * tokens
        return products + 3 * self.pairs(tokens, past)

    def prefill(self, prompt: int) -> int:
        """A prompt of so many tokens, logits after its last one."""
        return self.forward(prompt, scored=1)

    def decode(self, past: int, tokens: int = 1) -> int:
        """`tokens` fed one at a time, the first of them after `past` cached ones."""
        return self.forward(tokens, past)


def causal_pairs(tokens: int, past: int = 0, window: int = 0) -> int:
    """How many positions `tokens` of them see after `past`: each itself and all before, at most `window` (0: any)."""
    if not window:
        return tokens * past + tokens * (tokens + 1) // 2
    growing = min(max(window - past, 0), tokens)  # positions that still see everything
    return causal_pairs(growing, past) + (tokens - growing) * window


def work_of_config(config: Any) -> Work | None:
    """Of a Hugging Face text config of a dense decoder; None for kinds that aren't known to be one."""
    kind = getattr(config, "model_type", "")
    if kind not in GATED | PLAIN:
        return None
    hidden, heads = config.hidden_size, config.num_attention_heads
    query = heads * (getattr(config, "head_dim", None) or hidden // heads)
    keys = query // heads * (getattr(config, "num_key_value_heads", None) or heads)
    mlp = next(filter(None, (getattr(config, name, None) for name in ("intermediate_size", "ffn_dim"))), 4 * hidden)
    layer = 2 * hidden * query + 2 * hidden * keys + (3 if kind in GATED else 2) * hidden * mlp
    layers = config.num_hidden_layers
    return Work(linear=layers * layer, head=config.vocab_size * hidden, attention=_attention(config, layers, query))


def work_of_parameters(parameters: int, input_table: int, attention: Sequence[Attention] = ()) -> Work:
    """The rule of thumb, 2N forward and 6N in training, for a model whose parts aren't known.

    `input_table`: parameters of an input table that isn't the head too, which only looks rows up.
    """
    return Work(linear=parameters - input_table, head=0, attention=tuple(attention))


def _attention(config: Any, layers: int, width: int) -> tuple[Attention, ...]:
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if not window or kinds is None:
        used = window if getattr(config, "use_sliding_window", True) else 0
        return (Attention(layers, width, used),)
    windowed = sum(kind == "sliding_attention" for kind in kinds)
    groups = (Attention(layers - windowed, width), Attention(windowed, width, window))
    return tuple(group for group in groups if group.layers)
