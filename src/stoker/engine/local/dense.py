"""Which models are dense decoders of the Llama kind, and the parts of one, for a decoder of our own.

Parts are the model's own modules and parameters, read anew for each decoder: there is no copy to go stale, an
adapter put in a linear's place is called, and saving, tying and the optimizer see nothing of it. How the matrix
products among them are computed is `products.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from stoker.engine.local.compiler import Library
from stoker.engine.local.products import Product, can_pack, together

__all__ = ["FAMILIES", "Dense", "Layer", "Norm", "read_dense"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
_MOVING_ROTARY = ("dynamic", "longrope")
"""Rotary kinds whose angles depend on the length reached: keys already cached would have to be turned again."""


@dataclass(frozen=True)
class Norm:
    """RMSNorm over the last dimension."""

    weight: Tensor
    """Of the model's type, or float32."""
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps).to(x.dtype)


@dataclass(frozen=True)
class Layer:
    """One decoder layer. None: the family has no such part."""

    heads: Product
    """Queries (N, H D), keys and values (N, K D) of normed inputs."""
    query_norm: Norm | None
    key_norm: Norm | None
    output: Product
    after_attention: Norm | None
    before_mlp: Norm
    gate_up: Product
    down: Product
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
    norms: tuple[Norm, ...]
    """Before the attention of each layer, and after the last."""
    head: Product
    final_softcap: float | None
    rotary: nn.Module
    key_value_heads: int
    head_dim: int
    library: Library | None
    """Compiled functions to decode with; None: PyTorch's operators."""
    device: torch.device
    dtype: torch.dtype

    def tables(self, length: int) -> dict[str | None, tuple[Tensor, Tensor]]:
        """By kind: cosines and sines (length, D) of every position, the sines signed as `step_math.turned` has them."""
        positions = torch.arange(length, device=self.device)[None]
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        found = {}
        for kind in {layer.rotary for layer in self.layers}:
            cos, sin = self.rotary(like, positions) if kind is None else self.rotary(like, positions, kind)
            half = sin.shape[-1] // 2
            found[kind] = cos[0].contiguous(), torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)
        return found


def read_dense(model: PreTrainedModel, library: Library | None = None) -> Dense | str:
    """The model's parts, or why it isn't one of the dense families, as a clause. `library`: see `Dense`."""
    body, head = getattr(model, "model", None), model.get_output_embeddings()
    blocks: list[Any] = list(getattr(body, "layers", ()))
    if body is None or head is None or not blocks:
        return "it isn't laid out as a Llama-class model"
    homes = {type(part).__module__ for part in (body, *blocks)}
    families = {home.removeprefix("transformers.models.").split(".")[0] for home in homes}
    family = families.pop() if len(families) == 1 else ""
    if family not in FAMILIES or not all(home.startswith("transformers.models.") for home in homes):
        return f"stoker's own decoding knows {', '.join(FAMILIES)}"
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
    # All or none: beside adapters the frozen base would stay in memory twice.
    pack = can_pack([head, *(linear for block in blocks for linear in _linears(block))])
    product = partial(together, library=library, pack=pack)
    return Dense(
        embed=body.embed_tokens,
        layers=tuple(_layer(block, family, product, per_layer=per_layer) for block in blocks),
        norms=tuple(_norm(norm) for norm in [*(block.input_layernorm for block in blocks), body.norm]),
        head=product([head]),
        final_softcap=getattr(config, "final_logit_softcapping", None),
        rotary=body.rotary_emb,
        key_value_heads=config.num_key_value_heads,
        head_dim=blocks[0].self_attn.head_dim,
        library=library,
        device=model.device,
        dtype=model.dtype,
    )


def _linears(block: Any) -> list[Any]:
    """Of one layer: query, key, value, output, gate, up, down."""
    attention, mlp = block.self_attn, block.mlp
    of_attention = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    return [*of_attention, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def _layer(block: Any, family: str, product: Callable[[list[Any]], Product], *, per_layer: bool) -> Layer:
    attention, linears = block.self_attn, _linears(block)
    sandwich = hasattr(block, "pre_feedforward_layernorm")  # Gemma 2 and 3 norm what a part gives, too
    window = attention.sliding_window if hasattr(attention, "sliding_window") else None
    if family == "mistral":
        window = attention.config.sliding_window
    return Layer(
        heads=product(linears[:3]),
        query_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        key_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        output=product(linears[3:4]),
        after_attention=_norm(block.post_attention_layernorm) if sandwich else None,
        before_mlp=_norm(block.pre_feedforward_layernorm if sandwich else block.post_attention_layernorm),
        gate_up=product(linears[4:6]),
        down=product(linears[6:]),
        activation=block.mlp.act_fn,
        after_mlp=_norm(block.post_feedforward_layernorm) if sandwich else None,
        scale=attention.scaling,
        softcap=attention.attn_logit_softcapping if family == "gemma2" else None,  # Gemma 3 has the key, unused
        window=window,
        rotary=attention.layer_type if per_layer else None,
    )


def _norm(module: Any) -> Norm:
    """Gemma's RMSNorm keeps its weight less one, which only float32 can add, under another name for epsilon."""
    if hasattr(module, "variance_epsilon"):
        return Norm(module.weight, module.variance_epsilon)
    return Norm(1 + module.weight.float(), module.eps)
