"""Which models are dense decoders of the Llama kind, and the parts of one, for a decoder of our own.

Parts are the model's own modules and parameters, read anew for each decoder: there is no copy to go stale, an
adapter put in a linear's place is called, and saving, tying and the optimizer see nothing of it. Weights are
not fused: on CPU a fused query-key-value or gate-up product was measured no faster than its parts, or slower.
How a product is laid out does matter there, see `few_rows`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

__all__ = ["Dense", "Layer", "Norm", "few_rows", "read_dense"]

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
_MOVING_ROTARY = ("dynamic", "longrope")
"""Rotary kinds whose angles depend on the length reached: keys already cached would have to be turned again."""

Linear = Callable[[Tensor], Tensor]

_FEW_ROWS = 128


@dataclass(frozen=True)
class Norm:
    """RMSNorm over the last dimension."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True)
class Layer:
    """One decoder layer. None: the family has no such part."""

    before_attention: Norm
    query: Linear
    key: Linear
    value: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    output: Linear
    after_attention: Norm | None
    before_mlp: Norm
    gate: Linear
    up: Linear
    down: Linear
    activation: Callable[[Tensor], Tensor]
    after_mlp: Norm | None
    scale: float
    """What a query is multiplied with."""
    softcap: float | None
    window: int | None
    """How many tokens a query sees, itself included; None: all."""
    rotary: str | None
    """Which rotary table; None: the model has one for all layers."""


@dataclass(frozen=True)
class Dense:
    """A dense decoder's parts. H query heads, K key-value heads, D head dimension."""

    embed: Callable[[Tensor], Tensor]
    layers: tuple[Layer, ...]
    norm: Norm
    head: nn.Module
    final_softcap: float | None
    rotary: nn.Module
    key_value_heads: int
    head_dim: int
    device: torch.device
    dtype: torch.dtype

    def tables(self, length: int) -> dict[str | None, tuple[Tensor, Tensor]]:
        """By kind: cosines and sines (length, D) of every position, the sines signed for `dense_decoder._turned`."""
        positions = torch.arange(length, device=self.device)[None]
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        found = {}
        for kind in {layer.rotary for layer in self.layers}:
            cos, sin = self.rotary(like, positions) if kind is None else self.rotary(like, positions, kind)
            half = sin.shape[-1] // 2
            found[kind] = cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)
        return found


def read_dense(model: PreTrainedModel) -> Dense | str:
    """The model's parts, or why it isn't one of the dense families, as a clause."""
    body, head = getattr(model, "model", None), model.get_output_embeddings()
    blocks: list[Any] = list(getattr(body, "layers", ()))
    if body is None or head is None or not blocks:
        return "it isn't laid out as a Llama-class model"
    homes = {type(part).__module__ for part in (body, *blocks)}
    families = {home.removeprefix("transformers.models.").split(".")[0] for home in homes}
    family = families.pop() if len(families) == 1 else ""
    if family not in _FAMILIES or not all(home.startswith("transformers.models.") for home in homes):
        return f"stoker's own decoding knows {', '.join(_FAMILIES)}"
    hooked = [name for name, part in model.named_modules() if part._forward_hooks or part._forward_pre_hooks]
    if hooked:
        return f"there is a hook on {hooked[0] or 'the model'}, which stoker's own decoding would pass by"
    config = model.config.get_text_config(decoder=True)
    kinds = body.rotary_emb.rope_type
    if any(
        moving in kind for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]) for moving in _MOVING_ROTARY
    ):
        return f"its rotary angles ({kinds}) depend on the length reached"
    if any(block.self_attn.is_causal is False for block in blocks):
        return "it attends to later tokens"
    per_layer = isinstance(kinds, dict)
    return Dense(
        embed=body.embed_tokens,
        layers=tuple(_layer(block, family, per_layer=per_layer) for block in blocks),
        norm=_norm(body.norm),
        head=head,
        final_softcap=getattr(config, "final_logit_softcapping", None),
        rotary=body.rotary_emb,
        key_value_heads=config.num_key_value_heads,
        head_dim=blocks[0].self_attn.head_dim,
        device=model.device,
        dtype=model.dtype,
    )


def _layer(block: Any, family: str, *, per_layer: bool) -> Layer:
    attention, mlp = block.self_attn, block.mlp
    sandwich = hasattr(block, "pre_feedforward_layernorm")  # Gemma 2 and 3 norm what a part gives, too
    window = attention.sliding_window if hasattr(attention, "sliding_window") else None
    if family == "mistral":
        window = attention.config.sliding_window
    return Layer(
        before_attention=_norm(block.input_layernorm),
        query=_linear(attention.q_proj),
        key=_linear(attention.k_proj),
        value=_linear(attention.v_proj),
        query_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        key_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        output=_linear(attention.o_proj),
        after_attention=_norm(block.post_attention_layernorm) if sandwich else None,
        before_mlp=_norm(block.pre_feedforward_layernorm if sandwich else block.post_attention_layernorm),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
        activation=mlp.act_fn,
        after_mlp=_norm(block.post_feedforward_layernorm) if sandwich else None,
        scale=attention.scaling,
        softcap=attention.attn_logit_softcapping if family == "gemma2" else None,  # Gemma 3 has the key, unused
        window=window,
        rotary=attention.layer_type if per_layer else None,
    )


def few_rows(x: Tensor) -> bool:
    """True where W x' beats x W' for x (N, width): MKL's float32 product took up to three times as long the second
    way round with 2 to 64 rows, and 1.1 to 1.4 times with 96 and 128; from 256 on there was little between them.
    """
    return len(x) <= _FEW_ROWS and x.dtype == torch.float32 and x.device.type == "cpu"


def _linear(module: Any) -> Linear:
    """The map (N, in) -> (N, out). What isn't a plain linear, an adapted one say, is called as it is."""
    if type(module) is not nn.Linear:
        plain: Linear = module
        return plain

    def product(x: Tensor) -> Tensor:
        if not few_rows(x):
            return module(x)
        turned = torch.mm(module.weight, x.contiguous().t()).t()
        return turned if module.bias is None else turned + module.bias

    return product


def _norm(module: Any) -> Norm:
    """Gemma's RMSNorm keeps its weight less one, under another name for epsilon."""
    if hasattr(module, "variance_epsilon"):
        return Norm(module.weight, module.variance_epsilon)
    return Norm(1 + module.weight, module.eps)
