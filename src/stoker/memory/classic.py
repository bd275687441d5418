"""GPT-2 and encoders of BERT's kind from a Hugging Face config: learned positions, LayerNorm, biases, dropout."""

from stoker.memory.decoders import Config, head_of, projections
from stoker.memory.shape import Attention, Block, Matrix, Mlp, ModelShape

__all__ = ["bert", "gpt2"]


def gpt2(config: Config, architecture: str) -> ModelShape:
    """Of model_type gpt2. KeyError or ValueError where the config doesn't say enough."""
    hidden, vocabulary = config["n_embd"], config["vocab_size"]
    width = config.get("n_inner") or 4 * hidden
    block = Block(
        layers=config["n_layer"],
        matrices=(
            Matrix("qkv", hidden, 3 * hidden),
            Matrix("o", hidden, hidden),
            Matrix("up", hidden, width),
            Matrix("down", width, hidden),
        ),
        vectors=3 * hidden + hidden + width + hidden + 4 * hidden,
        attention=Attention(config["n_head"], hidden, hidden, hidden, hidden, rotary=False, cached=2 * hidden),
        mlp=Mlp(width, False, str(config.get("activation_function", "gelu_new"))),
        norm="layer",
    )
    is_tied = bool(config.get("tie_word_embeddings", True))
    head, logits, shared = head_of(config, architecture, tied=is_tied, hidden=hidden, vocabulary=vocabulary)
    return ModelShape(
        name=f"gpt2 ({architecture or 'GPT2LMHeadModel'})",
        causal=True,
        hidden=hidden,
        vocabulary=vocabulary,
        blocks=(block,),
        embeddings=hidden * (vocabulary + config["n_positions"]),
        head=head,
        final=2 * hidden,
        tied=shared,
        logits=logits,
        dropout=float(config.get("resid_pdrop", 0.1)),
        attention_dropout=float(config.get("attn_pdrop", 0.1)),
    )


def bert(config: Config, architecture: str) -> ModelShape:
    """Of model_type bert or roberta. KeyError or ValueError where the config doesn't say enough."""
    hidden, vocabulary, width = config["hidden_size"], config["vocab_size"], config["intermediate_size"]
    block = Block(
        layers=config["num_hidden_layers"],
        matrices=(
            *projections(hidden, hidden, hidden),
            Matrix("up", hidden, width),
            Matrix("down", width, hidden),
        ),
        vectors=4 * hidden + width + hidden + 4 * hidden,
        attention=Attention(config["num_attention_heads"], hidden, hidden, hidden, hidden, rotary=False),
        mlp=Mlp(width, False, str(config.get("hidden_act", "gelu"))),
        norm="layer",
        post_norm=True,
    )
    is_tied = bool(config.get("tie_word_embeddings", True))
    head, logits = _encoder_head(
        config, architecture or "BertForMaskedLM", 0 if is_tied else hidden * vocabulary + vocabulary
    )
    return ModelShape(
        name=f"{config['model_type']} ({architecture or 'ForMaskedLM'})",
        causal=False,
        hidden=hidden,
        vocabulary=vocabulary,
        blocks=(block,),
        embeddings=hidden * (vocabulary + config["max_position_embeddings"] + config.get("type_vocab_size", 2)),
        head=head,
        final=2 * hidden,
        tied=is_tied and logits == vocabulary,
        logits=logits,
        dropout=float(config.get("hidden_dropout_prob", 0.1)),
        attention_dropout=float(config.get("attention_probs_dropout_prob", 0.1)),
    )


def _encoder_head(config: Config, architecture: str, table: int) -> tuple[int, int]:
    """(parameters, logits at a token); one answer for a whole text has no logits at its tokens."""
    # An untied head has a table of its own, and a second bias.
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    labels = len(config.get("id2label") or ()) or config.get("num_labels") or 2
    square = hidden * hidden + hidden
    roberta = config["model_type"] == "roberta"
    onto_vocabulary = square + 2 * hidden + vocabulary + table
    heads = {
        "ForMaskedLM": (onto_vocabulary, vocabulary),
        "ForPreTraining": (onto_vocabulary + square + 2 * hidden + 2, vocabulary),
        "ForSequenceClassification": (square + hidden * labels + labels, 0),
        "ForTokenClassification": (hidden * labels + labels, labels),
        "ForQuestionAnswering": (hidden * labels + labels, labels),
        "Model": (square, 0),
    }
    for ending, found in heads.items():
        if architecture.endswith(ending) and not (roberta and ending == "ForPreTraining"):
            return found
    raise ValueError(f"architecture {architecture} isn't known; known: {', '.join(heads)}")
