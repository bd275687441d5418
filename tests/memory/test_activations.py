"""What small real models keep, by saved-tensor hooks, against the formulas: the part that grows, to the byte."""

from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from stoker.batch.target import Target
from stoker.batch.tracing import Trace, trace
from stoker.errors import ConfigError
from stoker.memory import Setup, predict, shape_of
from stoker.memory.activations import embedded, ending, kept
from stoker.memory.setup import LOSSES
from stoker.memory.states import states_of
from tests.memory.test_families import DEEPSEEK_V3, LLAMA_8B

TOKENS, VOCABULARY = 24, 100
GATED = {
    "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 112,
    "num_hidden_layers": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_inner": 112, "vocab_size": VOCABULARY, "n_positions": 64,
        "tie_word_embeddings": False}  # fmt: skip
BERT = {
    "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 112, "num_hidden_layers": 2,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
STILL: dict[str, dict[str, float]] = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
FULL = {"layer_types": ["full_attention"] * 2}
SIZES: dict[str, dict[str, Any]] = {
    "llama": GATED, "mistral": GATED | {"sliding_window": None}, "qwen2": GATED, "qwen3": GATED,
    "smollm3": GATED | {"pad_token_id": None}, "gemma": GATED,
    "gemma2": GATED | FULL, "gemma3_text": GATED | FULL, "gpt2": GPT2, "bert": BERT,
}  # fmt: skip


EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": GATED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "mixtral": GATED | {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def build(kind: str, precision: str, attention: str, dropout: bool) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    config = AutoConfig.for_model(kind, **(SIZES | EXPERTS)[kind], **({} if dropout else STILL.get(kind, {})))
    maker = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = maker.from_config(
        config, dtype=dtype, attn_implementation={"flash": "sdpa", "eager": "eager"}[attention]
    ).train()
    return config, model


def traced(model: Any, precision: str, mask: bool = False) -> Trace:
    def batch(size: int) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCABULARY, (size, TOKENS))
        padding = torch.ones_like(ids)
        padding[:, : TOKENS // 2] = 0
        return {"input_ids": ids, "labels": ids.clone(), **({"attention_mask": padding} if mask else {})}

    # A cache, on by default, would copy keys and values.
    cached = {} if model.config.model_type == "bert" else {"use_cache": False}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            found: Tensor = model(**batch, **cached).loss
        return found

    return trace(Target(model, torch.optim.SGD(model.parameters()), batch, loss))


def losses(kind: str) -> str:
    return "cross_entropy, own precision" if kind == "bert" else "cross_entropy"


def per_token(found: Trace, within: str) -> float:
    return sum(layer.per_unit for layer in found.layers if within in layer.name) / TOKENS


CASES = [
    (kind, precision, attention, dropout)
    for kind in SIZES
    for precision in ("fp32", "bf16", "autocast")
    for attention in ("flash", "eager")
    for dropout in ((False, True) if kind in STILL else (False,))
    if not (kind == "gemma2" and attention == "flash")  # its scores are capped
    if not (dropout and attention == "flash")  # on a CPU that is neither: SDPA falls back to a path of its own
]


@pytest.mark.parametrize(("kind", "precision", "attention", "dropout"), CASES)
def test_a_layer_keeps_what_the_formula_says(kind: str, precision: str, attention: str, dropout: bool) -> None:
    config, model = build(kind, precision, attention, dropout)
    found = traced(model, precision)
    shape = shape_of(config.to_dict())
    setup = Setup(1, TOKENS, precision=precision, attention=attention, device="cpu")  # type: ignore[arg-type]
    # The second layer: masks and positions that all layers share are kept by the first.
    assert per_token(found, ".1.") == kept(shape.blocks[0], shape, setup)
    cast = sum(layer.fixed for layer in found.layers if ".1." in layer.name)
    if precision == "autocast" and shape.blocks[0].norm != "gemma":
        assert cast == 2 * shape.blocks[0].linear
    rest = sum(layer.per_unit for layer in found.layers if ".1." not in layer.name and ".0." not in layer.name) / TOKENS
    # Beside the log-probs: shifted labels, where a model predicts the next token.
    labels = 0 if kind == "bert" else 8
    held = LOSSES[losses(kind)].held[setup.bytes_of.compute]
    if kind == "bert" and precision == "autocast":
        held = 4  # autocast raises it
    assert rest == embedded(shape, setup) + ending(shape, setup) + held * VOCABULARY + labels


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft, of transformers
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")  # peft, of gpt2's maps
@pytest.mark.parametrize("lora_dtype", ["fp32", "base"])
@pytest.mark.parametrize("attention", ["flash", "eager"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma", "gpt2", "bert"])
def test_adapters_keep_their_own_inputs_and_a_frozen_base_none(
    kind: str, precision: str, attention: str, lora_dtype: Any
) -> None:
    config, model = build(kind, precision, attention, False)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules="all-linear"), autocast_adapter_dtype=lora_dtype == "fp32"
    )
    found = traced(adapted, precision)
    shape = shape_of(config.to_dict())
    setup = Setup(1, TOKENS, precision=precision, attention=attention, device="cpu", lora_rank=4, lora_dtype=lora_dtype)  # type: ignore[arg-type]
    assert per_token(found, ".1.") == kept(shape.blocks[0], shape, setup)
    if kind != "bert":  # whose head has maps that are adapted
        rest = sum(layer.per_unit for layer in found.layers if ".1." not in layer.name and ".0." not in layer.name)
        held = LOSSES[losses(kind)].held[setup.bytes_of.compute]
        assert rest / TOKENS == embedded(shape, setup) + ending(shape, setup) + held * VOCABULARY + 8


def test_casts_of_autocast() -> None:
    config, model = build("llama", "autocast", "flash", False)
    found = traced(model, "autocast")
    weights = shape_of(config.to_dict()).weights()
    fixed = sum(layer.fixed for layer in found.layers if "layers" in layer.name or "lm_head" in layer.name)
    shared = sum(layer.fixed for layer in found.layers if layer.name.endswith("0.self_attn"))  # positions
    assert fixed - shared == states_of(weights, Setup(1, 1, precision="autocast")).cast


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_padding_mask_repeats_keys_and_values(precision: str) -> None:
    config, model = build("llama", precision, "flash", False)
    shape = shape_of(config.to_dict())
    setup = Setup(1, TOKENS, precision=precision, padding_mask=True, device="cpu")
    found = per_token(traced(model, precision, mask=True), ".1.")
    assert found == pytest.approx(kept(shape.blocks[0], shape, setup), abs=2 * TOKENS)


def test_checkpointed_layers_keep_their_input() -> None:
    config, model = build("llama", "fp32", "flash", False)
    model.activation_checkpointing_enable({"use_reentrant": False})
    found = traced(model, "fp32")
    layers = sum(layer.per_unit for layer in found.layers if "layers." in layer.name) / TOKENS
    outside = sum(layer.per_unit for layer in found.layers if layer.name == "model") / TOKENS
    assert layers + outside == pytest.approx(2 * 4 * config.hidden_size, abs=1)


def test_llama_8b() -> None:
    shape = shape_of(LLAMA_8B)
    assert kept(shape.blocks[0], shape, Setup(1, 2048, precision="bf16")) == 200_840
    h, q, k, f, a, s = 4096, 4096, 1024, 14336, 32, 2048
    for changes, expected in (
        ({}, 16 * h + 4 * q + 4 * k + 8 * f + 4 * a + 8),
        ({"fused_norm": True}, 8 * h + 4 * q + 4 * k + 8 * f + 4 * a + 8),
        ({"fused_mlp": True}, 16 * h + 4 * q + 4 * k + 6 * f + 4 * a + 8),
        ({"attention": "eager"}, 16 * h + 8 * q + 8 * f + 8 + 6 * a * s),
        ({"padding_mask": True}, 16 * h + 8 * q + 8 * f + 4 * a + 8 + 2 * s),
    ):
        setup = Setup(1, s, precision="bf16", **changes)  # type: ignore[arg-type]
        assert kept(shape.blocks[0], shape, setup) == expected


@pytest.mark.parametrize(("attention", "pairs"), [("flash", 0), ("eager", 5)])
def test_the_transformer_of_korthikanti(attention: str, pairs: int) -> None:
    """arXiv 2205.05198, section 4.1: 34 h + 5 a s in 16 bit, masks of a byte; statistics left out."""
    config = {"model_type": "gpt2", "n_embd": 1024, "n_layer": 1, "n_head": 16, "vocab_size": 100, "n_positions": 512,
              "activation_function": "gelu"}  # fmt: skip
    shape = shape_of(config)
    found = kept(shape.blocks[0], shape, Setup(1, 512, precision="bf16", attention=attention))  # type: ignore[arg-type]
    small = 16 + (4 * 16 if attention == "flash" else 0)
    assert found - small == 34 * 1024 + pairs * 16 * 512


def test_latent_attention_is_refused() -> None:
    shape = shape_of(DEEPSEEK_V3)
    with pytest.raises(ConfigError, match="latent attention"):
        kept(shape.blocks[0], shape, Setup(1, 1))
    scoring = Setup(1, 1, precision="bf16", optimizer="none", cache_tokens=100)
    assert predict(shape, scoring).row("key-value cache") == 100 * 70_272


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_experts_keep_about_what_is_said(kind: str, precision: str) -> None:
    """The router's own tensors aren't in the formula."""
    config, model = build(kind, precision, "flash", False)
    shape = shape_of(config.to_dict())
    expected = kept(shape.blocks[0], shape, Setup(1, TOKENS, precision=precision, device="cpu"))
    assert per_token(traced(model, precision), ".1.") == pytest.approx(expected, rel=0.03)


def test_an_unknown_activation_function_is_refused() -> None:
    shape = shape_of(LLAMA_8B | {"hidden_act": "xielu"})
    with pytest.raises(ConfigError, match="'xielu': what it keeps isn't known"):
        kept(shape.blocks[0], shape, Setup(1, 1))
