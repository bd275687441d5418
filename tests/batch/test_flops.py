"""FLOPs by formula against torch's own counter on real models, and against numbers by hand."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from stoker.batch.flops import Attention, Work, causal_pairs, work_of_config, work_of_parameters
from stoker.engine.local.cache import abilities_of

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
OWN = {
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 97, "n_positions": 64},
    "opt": {
        "hidden_size": 32, "ffn_dim": 88, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 97,
        "word_embed_proj_dim": 32, "max_position_embeddings": 64,
    },
    "gpt_neox": {key: value for key, value in SIZES.items() if key != "num_key_value_heads"},
    "qwen3": {**SIZES, "head_dim": 16},
    "gemma": {**SIZES, "head_dim": 16},
    "gemma3_text": {**SIZES, "head_dim": 16, "sliding_window": 64},
    "glm": {**SIZES, "head_dim": 8},
    "glm4": {**SIZES, "head_dim": 8},
    "helium": {**SIZES, "head_dim": 8},
    "gemma2": {**SIZES, "head_dim": 8},
    "seed_oss": {**SIZES, "head_dim": 16},
}  # fmt: skip
FAMILIES = [
    "cohere", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_neox", "granite", "helium", "llama",
    "mistral", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2",
]  # fmt: skip


def tiny(kind: str, **more: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(kind, **(OWN.get(kind, SIZES) | more))
    with torch.random.fork_rng():
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def counted(model: PreTrainedModel, tokens: int, *, backward: bool = False, **arguments: Any) -> int:
    """By torch's counter. Eager attention multiplies the whole square, so that is what it sees."""
    counter = FlopCounterMode(display=False)
    with counter:
        logits = model(input_ids=torch.ones(1, tokens, dtype=torch.long), **arguments).logits
        if backward:
            logits.sum().backward()
    return int(counter.get_total_flops())


def as_executed(work: Work, tokens: int) -> int:
    """What the formula counts, with the square of attention for its lower triangle."""
    square = sum(4 * a.layers * a.width * tokens**2 for a in work.attention)
    return square - work.pairs(tokens)


@pytest.mark.parametrize("kind", FAMILIES)
def test_forward_and_training_agree_with_torchs_counter(kind: str) -> None:
    model, tokens = tiny(kind), 12
    work = work_of_config(model.config)
    assert work is not None
    assert counted(model, tokens) == work.forward(tokens) + as_executed(work, tokens)
    # The first layer's input needs no gradient of a lookup, so nothing is saved: all products have both.
    assert counted(model, tokens, backward=True) == work.training(tokens) + 3 * as_executed(work, tokens)


def test_prefill_and_decode_agree_with_torchs_counter() -> None:
    model = tiny("llama").eval()
    work = work_of_config(model.config)
    assert work is not None
    prompt, new = 9, 4
    assert counted(model, prompt, logits_to_keep=1) == work.prefill(prompt) + as_executed(work, prompt)
    with torch.no_grad():
        name = abilities_of(model).cache_argument
        assert name is not None
        cache = model(input_ids=torch.ones(1, prompt, dtype=torch.long), use_cache=True)[name]
        steps = sum(counted(model, 1, **{name: cache, "use_cache": True}) for _ in range(new))
    assert steps == work.decode(prompt, new)


def test_adapters_save_the_gradients_of_frozen_weights() -> None:
    """Without adapters' own products: a frozen model whose embeddings' gradient is asked for."""
    model, tokens = tiny("llama"), 12
    model.requires_grad_(False).enable_input_require_grads()
    work = work_of_config(model.config)
    assert work is not None
    frozen = Work(work.linear, work.head, work.attention, adapters=1000)
    own = 6 * 1000 * tokens
    assert counted(model, tokens, backward=True) == frozen.training(tokens) - own + 3 * as_executed(work, tokens)
    assert frozen.forward(tokens) == work.forward(tokens) + 2 * 1000 * tokens


@pytest.mark.parametrize("window", [0, 1, 3, 100])
@pytest.mark.parametrize(("tokens", "past"), [(1, 0), (5, 0), (4, 7), (6, 2)])
def test_causal_pairs_by_enumeration(tokens: int, past: int, window: int) -> None:
    seen = [min(t + 1, window or t + 1) for t in range(past, past + tokens)]
    assert causal_pairs(tokens, past, window) == sum(seen)


def test_a_prompt_computed_apart_changes_nothing_in_the_sum() -> None:
    work = Work(linear=1000, head=300, attention=(Attention(2, 16), Attention(1, 16, window=4)))
    assert work.training(5, scored=0) + work.training(3, past=5, scored=3) == work.training(8, scored=3)
    assert work.prefill(5) + work.decode(5, 2) == work.forward(7, scored=3)


def test_windowed_layers_are_counted_apart() -> None:
    model = tiny("gemma3_text", layer_types=["sliding_attention"] * 2 + ["full_attention"], sliding_window=5)
    work = work_of_config(model.config)
    assert work is not None
    assert work.attention == (Attention(1, 64), Attention(2, 64, 5))
    whole = tiny("mistral", sliding_window=7)
    found = work_of_config(whole.config)
    assert found is not None
    assert found.attention == (Attention(3, 32, 7),)


def test_the_published_figure_of_a_known_model() -> None:
    """Llama-3.1-8B: 8.03e9 parameters, 0.525e9 of them an input table that isn't the head."""
    config = AutoConfig.for_model(
        "llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    work = work_of_config(config)
    assert work is not None
    norms = 65 * 4096
    assert work.linear + work.head + norms == 8_030_261_248 - 128256 * 4096


def test_unknown_kinds_fall_back_to_two_and_six_n() -> None:
    assert work_of_config(AutoConfig.for_model("mamba")) is None
    assert work_of_config(AutoConfig.for_model("qwen3_moe")) is None
    work = work_of_parameters(1000, input_table=100)
    assert (work.forward(7), work.training(7), work.prefill(7)) == (2 * 900 * 7, 6 * 900 * 7, 2 * 900 * 7)
