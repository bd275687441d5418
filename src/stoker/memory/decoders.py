"""Decoders of Llama's kind from a Hugging Face config: gated MLPs, rotary positions, grouped or latent attention.

A key that transformers may leave out of a config (what equals its class's default) has that default here.
"""

from collections.abc import Callable, Mapping
from typing import Any

from stoker.memory.shape import Attention, Block, Matrix, Mlp, ModelShape, Norm

__all__ = ["Config", "deepseek_v3", "experts", "gated", "head_of", "projections"]

Config = Mapping[str, Any]


def head_of(config: Config, architecture: str, *, tied: bool, hidden: int, vocabulary: int) -> tuple[int, int, bool]:
    """(parameters, logits at a token, tied) of what stands after a decoder's layers."""
    labels = len(config.get("id2label") or ()) or config.get("num_labels") or 2
    if architecture.endswith("ForSequenceClassification"):
        return hidden * labels, labels, False
    if architecture.endswith("ForTokenClassification"):
        return hidden * labels + labels, labels, False
    if architecture.endswith(("ForCausalLM", "LMHeadModel")) or not architecture:
        return 0 if tied else hidden * vocabulary, vocabulary, tied
    if architecture.endswith("Model"):
        return 0, 0, False
    raise ValueError(f"architecture {architecture} isn't known; name a ForCausalLM, ForSequenceClassification or Model")


def gated(
    *,
    norm: Norm = "rms",
    norms: int = 2,
    qkv_bias: bool | str = False,
    out_bias: bool | str = False,
    mlp_bias: bool | str = False,
    normed: bool = False,
    tied: bool = False,
    head_dim: int | None = None,
    softcap: bool = False,
) -> Callable[[Config, str], ModelShape]:
    """A family of Llama's kind: RMSNorm, rotary grouped attention, gated MLP. A bias may be a key of the config."""

    def shape(config: Config, architecture: str) -> ModelShape:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        size = config.get("head_dim") or head_dim or hidden // heads
        query, keys = heads * size, (config.get("num_key_value_heads") or heads) * size
        width = config["intermediate_size"]

        def flag(name: bool | str) -> bool:
            return bool(config.get(name, False)) if isinstance(name, str) else name

        biases = flag(qkv_bias) * (query + 2 * keys) + flag(out_bias) * hidden + flag(mlp_bias) * (2 * width + hidden)
        attention = Attention(heads, query, keys, keys, query, normed=normed, softcap=softcap, cached=2 * keys)
        block = Block(
            layers=config["num_hidden_layers"],
            matrices=(*projections(hidden, query, keys), *_gated_mlp(hidden, width)),
            vectors=biases + norms * hidden + 2 * size * normed,
            attention=attention,
            mlp=Mlp(width, True, _activation(config)),
            norm=norm,
            norms=norms,
        )
        return _decoder(config, architecture, (block,), tied=tied)

    return shape


def _activation(config: Config) -> str:
    if str(config["model_type"]).startswith("gemma"):
        return config.get("hidden_activation") or "gelu_pytorch_tanh"
    return str(config.get("hidden_act", "silu"))


def projections(hidden: int, query: int, keys: int) -> tuple[Matrix, ...]:
    """The four of an attention layer that computes queries, keys and values apart."""
    return Matrix("q", hidden, query), Matrix("k", hidden, keys), Matrix("v", hidden, keys), Matrix("o", query, hidden)


def _gated_mlp(hidden: int, width: int, count: int = 1, prefix: str = "") -> tuple[Matrix, ...]:
    return (
        Matrix(prefix + "gate", hidden, width, count),
        Matrix(prefix + "up", hidden, width, count),
        Matrix(prefix + "down", width, hidden, count),
    )


def _decoder(config: Config, architecture: str, blocks: tuple[Block, ...], *, tied: bool) -> ModelShape:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    is_tied = bool(config.get("tie_word_embeddings", tied))
    head, logits, shared = head_of(config, architecture, tied=is_tied, hidden=hidden, vocabulary=vocabulary)
    return ModelShape(
        name=f"{config['model_type']} ({architecture or 'ForCausalLM'})",
        causal=True,
        hidden=hidden,
        vocabulary=vocabulary,
        blocks=tuple(block for block in blocks if block.layers),
        embeddings=hidden * vocabulary,
        head=head,
        final=hidden,
        tied=shared,
        logits=logits,
        attention_dropout=float(config.get("attention_dropout") or 0.0),
    )


def experts(*, width: str, normed: bool = False, qkv_bias: str | None = None) -> Callable[[Config, str], ModelShape]:
    """Llama's attention with an MLP of experts in every layer (Mixtral, Qwen3-MoE)."""

    def shape(config: Config, architecture: str) -> ModelShape:
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise ValueError("layers without experts between those with them aren't known")
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        size = config.get("head_dim") or hidden // heads
        query, keys = heads * size, (config.get("num_key_value_heads") or heads) * size
        visited = config["num_experts_per_tok"]
        # transformers has renamed the key; published configs have either.
        number = config["num_experts" if "num_experts" in config else "num_local_experts"]
        biased = bool(qkv_bias and config.get(qkv_bias, False))
        block = Block(
            layers=config["num_hidden_layers"],
            matrices=(
                *projections(hidden, query, keys),
                Matrix("router", hidden, number),
                *_gated_mlp(hidden, config[width], number, "expert_"),
            ),
            vectors=2 * hidden + 2 * size * normed + biased * (query + 2 * keys + hidden),
            attention=Attention(heads, query, keys, keys, query, normed=normed, cached=2 * keys),
            mlp=Mlp(config[width], True, str(config.get("hidden_act", "silu")), number, visited),
            norm="rms",
        )
        return _decoder(config, architecture, (block,), tied=False)

    return shape


def deepseek_v3(config: Config, architecture: str) -> ModelShape:
    """Multi-head latent attention; the first layers dense, the others with routed and shared experts."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    plain, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    latent, query_latent = config["kv_lora_rank"], config.get("q_lora_rank")
    if config.get("attention_bias"):
        raise ValueError("attention_bias isn't known for this family")
    query = heads * (plain + rope)
    queries = (
        (Matrix("q_a", hidden, query_latent), Matrix("q_b", query_latent, query))
        if query_latent
        else (Matrix("q", hidden, query),)
    )
    attending = (
        *queries,
        Matrix("kv_a", hidden, latent + rope),
        Matrix("kv_b", latent, heads * (plain + value)),
        Matrix("o", heads * value, hidden),
    )
    attention = Attention(heads, query, query, heads * value, heads * value, latent=True, cached=latent + rope)
    vectors = 2 * hidden + (query_latent or 0) + latent
    dense, width = config["intermediate_size"], config["moe_intermediate_size"]
    routed, shared = config["n_routed_experts"], config["n_shared_experts"]
    activation, leading = str(config.get("hidden_act", "silu")), config["first_k_dense_replace"]
    first = Block(
        leading, (*attending, *_gated_mlp(hidden, dense)), vectors, attention, Mlp(dense, True, activation), "rms"
    )
    others = Block(
        config["num_hidden_layers"] - leading,
        (
            *attending,
            Matrix("router", hidden, routed),
            *_gated_mlp(hidden, width, routed, "expert_"),
            *_gated_mlp(hidden, width * shared),
        ),
        vectors,
        attention,
        Mlp(width, True, activation, routed, config["num_experts_per_tok"] + shared),
        "rms",
    )
    return _decoder(config, architecture, (first, others), tied=False)
