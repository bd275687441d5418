"""Bytes that a transformer's layers keep for the backward pass, per token, as transformers computes them.

Letters: h hidden size, q and k widths of queries and keys, a heads, f width of the MLP, s tokens of an example,
w bytes of a computed element (2, or 4 in fp32), r bytes of the residual stream (4 under autocast too).

What each operation keeps: a linear map its input (under autocast a 16-bit copy of it for each map); RMSNorm, in fp32,
its input and the normalised values, 4 bytes each, before the weight takes them to w; LayerNorm its input, mean and
deviation; attention q, k, v, its output and a log-sum-exp of 4 bytes a head (flash), or the probabilities of all pairs
(eager); an activation function its input, a gated MLP all four of its f-wide tensors; dropout its mask.

Of a frozen base maps keep no input and norms no normalised values; an adapter keeps its own input, in its own
precision, and what its first matrix makes of it.

In 16 bit that makes a layer of Llama's kind, flash attention: 16 h + 4 q + 4 k + 8 f + 4 a + 8. With h = q = k,
f = 4 h, LayerNorm and dropout it makes the 34 h of Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), and eager
attention 5 a s more.
"""

from stoker.errors import ConfigError
from stoker.memory.setup import Setup
from stoker.memory.shape import Attention, Block, Mlp, ModelShape, Norm

__all__ = ["embedded", "ending", "kept", "working"]

KEPT_BY = {"gelu": 1, "gelu_pytorch_tanh": 1, "silu": 1, "swish": 1, "relu": 0, "gelu_new": 4, "quick_gelu": 2}
"""Tensors that an activation function keeps beside its output; `gelu_new` is a formula in Python, term by term."""
STATISTIC = 4
"""Bytes of a root mean square or a log-sum-exp: fp32."""


def kept(block: Block, shape: ModelShape, setup: Setup) -> float:
    """Bytes per token of one whole layer."""
    return (
        _norms(block, shape, setup)
        + _attention(block.attention, block.norm, shape, setup)
        + _mlp(block.mlp, shape, setup)
        + _adapters(block, shape, setup)
    )


def working(block: Block, shape: ModelShape, setup: Setup) -> float:
    """Bytes per token, above all that is kept, that one layer's backward pass has at the most.

    The gradients of an MLP's wide tensors, of which two are there beyond those let go of; of eager attention's
    probabilities and scores; and that of the residual stream, twice.
    """
    size, attention = setup.bytes_of, block.attention
    wide = 2 * block.mlp.active * size.compute
    pairs = 0.0
    if setup.attention == "eager":
        pairs = 2 * STATISTIC * attention.heads * setup.tokens
    return max(wide, pairs) + 2 * shape.hidden * residual(setup)


def _adapters(block: Block, shape: ModelShape, setup: Setup) -> float:
    """What adapters of all maps but joint experts' keep beyond the base's inputs, which they keep in its place."""
    if not setup.lora_rank:
        return 0.0
    size, own = setup.bytes_of, setup.adapter_bytes
    maps = [matrix for matrix in block.matrices if "expert" not in matrix.name]
    rows = sum(matrix.count for matrix in maps) * setup.lora_rank
    output = block.attention.output
    if size.autocast:  # to fp32 and back: flash attention's output, which it keeps itself, is then another tensor
        return size.compute * (rows + (output if setup.attention == "flash" else 0))
    if own == size.compute:
        return own * rows
    # Each casts its input; what several maps share, the base would have kept once. Flash attention's output stays.
    shared = 2 * shape.hidden + block.mlp.active + (output if setup.attention == "eager" else 0)
    return own * (rows + sum(matrix.count * matrix.inputs for matrix in maps)) - size.compute * shared


def embedded(shape: ModelShape, setup: Setup) -> float:
    """Bytes per token of the batch and of what stands before the layers."""
    ids = 8 * (2 if shape.logits else 1)  # tokens and labels
    first = shape.blocks[0]
    normalised = shape.hidden * residual(setup) + _moments(setup) if first.post_norm else 0
    return ids + normalised + _mask(setup, shape.dropout, residual(setup)) * shape.hidden


def ending(shape: ModelShape, setup: Setup) -> float:
    """Bytes per token between the last layer and the logits."""
    last, hidden, size = shape.blocks[-1], shape.hidden, setup.bytes_of
    if not last.post_norm:
        capped = size.compute * shape.logits if last.attention.softcap else 0  # Gemma 2's logits, before their loss
        head = bool(shape.logits) and not setup.lora_rank  # a frozen one has no adapter
        return _norm(last, shape, setup, consumers=int(head)) + capped
    if shape.logits != shape.vocabulary:
        return hidden * size.compute
    # BERT's head: a dense layer, its activation, a norm, and the matrix onto the vocabulary.
    return 4 * hidden * size.compute + _moments(setup)


def residual(setup: Setup) -> int:
    """Bytes of an element of the residual stream: the weights' own."""
    return setup.bytes_of.weight


def _norms(block: Block, shape: ModelShape, setup: Setup) -> float:
    """Both norms of a layer, with the copies that the maps behind them keep, and the residual dropouts."""
    joint = block.matrices[0].name == "qkv"
    consumers = (1 if joint else 3, 2 if block.mlp.gated else 1)
    total = sum(_norm(block, shape, setup, consumers=count) for count in consumers)
    if block.norms == 4:
        total += 2 * _norm(block, shape, setup, consumers=0)
    return total + 2 * _mask(setup, shape.dropout, setup.bytes_of.compute) * shape.hidden


def _norm(block: Block, shape: ModelShape, setup: Setup, *, consumers: int) -> float:
    """One norm, and its output as the linear maps after it keep it. `consumers` 0: none of them does."""
    hidden, size, stream = shape.hidden, setup.bytes_of, residual(setup)
    copies = consumers if size.autocast else min(consumers, 1)
    output = copies * size.compute * hidden
    if block.norm == "layer":
        # A norm after the residual sum has an output that goes on in the stream: what keeps it is counted here.
        return stream * hidden + _moments(setup) + output
    if setup.fused_norm:
        return stream * hidden + STATISTIC + output
    normalised = 0 if setup.lora_rank else 4 if block.norm == "gemma" else stream
    return (4 + normalised) * hidden + STATISTIC + output


def _attention(attention: Attention, norm: Norm, shape: ModelShape, setup: Setup) -> float:
    if attention.latent:
        raise ConfigError(
            f"{shape.name}: what latent attention keeps for the backward pass isn't known by formula (weights, states "
            "and cache are); measure the model with `stoker batch memory file.py:make_target`"
        )
    size, heads, tokens = setup.bytes_of.compute, attention.heads, setup.tokens
    wide = attention.query + attention.keys + attention.values + attention.output
    if setup.attention == "eager" or setup.padding_mask:
        wide += 2 * attention.query - attention.keys - attention.values
    total = float(size * wide)
    if attention.normed:
        values = 4 if setup.lora_rank else 8 if norm == "gemma" or size == STATISTIC else 6
        rows = heads + heads * attention.keys // attention.query
        total += (attention.query + attention.keys) * values + STATISTIC * rows
    if setup.attention == "flash":
        mask = 2 * tokens if setup.padding_mask else 0
        return total + STATISTIC * heads + mask
    probability = _probability(attention, shape, setup)
    dropped = _mask(setup, shape.attention_dropout, size)
    pairs = probability + dropped
    if dropped or probability > size:
        pairs += size
    softcap = size if attention.softcap else 0
    return total + heads * tokens * (pairs + softcap)


def _mlp(mlp: Mlp, shape: ModelShape, setup: Setup) -> float:
    if mlp.activation not in KEPT_BY:
        known = ", ".join(KEPT_BY)
        raise ConfigError(
            f"activation function '{mlp.activation}': what it keeps isn't known (known: {known}); measure the model "
            "with `stoker batch memory file.py:make_target`"
        )
    inner = KEPT_BY[mlp.activation]
    tensors = inner + 3 if mlp.gated else inner + 1
    if setup.fused_mlp and mlp.gated:
        tensors -= 1
    # Experts are given gathered rows, and each row's answer is weighed by its router.
    gathered = 2 * mlp.visited * shape.hidden if mlp.experts else 0
    return float(setup.bytes_of.compute * (mlp.active * tensors + gathered))


def _probability(attention: Attention, shape: ModelShape, setup: Setup) -> int:
    """Bytes of an eager attention's softmax; what isn't of the computed type is then rounded to it.

    fp32 where the model says so (Llama's kind), or autocast: on CUDA it has softmax in fp32, on a CPU an fp32 causal
    mask makes the scores so.
    """
    size = setup.bytes_of
    raised = size.autocast and (setup.device == "cuda" or shape.causal)
    return STATISTIC if attention.rotary or raised else size.compute


def _mask(setup: Setup, probability: float, size: int) -> int:
    """Bytes of an element of a dropout's mask: on a CPU it is of its input's type, of `size` bytes."""
    if not setup.dropout or not probability or not setup.trains:
        return 0
    return 1 if setup.device == "cuda" else size


def _moments(setup: Setup) -> int:
    """Bytes of LayerNorm's mean and deviation: fp32, but of the weights' type on a CPU."""
    return 2 * min(STATISTIC, setup.bytes_of.weight) if setup.device == "cpu" else 2 * STATISTIC
