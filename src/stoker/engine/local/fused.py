"""RMSNorms and gated MLPs of a training model by the compiled functions of training.cpp, forward and backward.

transformers computes them by up to eight operators each, most of which write a tensor; here it is one pass over memory,
and what is kept for the backward pass is what came in (and of a norm one number a row).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stoker.engine.local.compiled_math import GELU, SILU
from stoker.engine.local.compiler import Library, arithmetic, load_library
from stoker.engine.local.dense import FAMILIES
from stoker.engine.local.structures import NAMES, float32, int32, int64, pointer

__all__ = ["fuse", "prepare_update"]

_HOMES = {f"transformers.models.{family}.modeling_{family}" for family in FAMILIES}
_BLOCK = 64
"""Rows whose part of a weight's gradient is summed in one go, as in training.cpp."""


def prepare_update(model: PreTrainedModel, *, compiled: bool) -> str:
    """Fuse the model's norms and gates where that is asked for and can be; what then computes them, for a manifest."""
    fits = model.device.type == "cpu" and model.dtype in NAMES and any(map(_fused, model.modules()))
    library = load_library() if compiled and fits else None
    if not isinstance(library, Library):
        return arithmetic(None)
    fuse(model, library)
    return arithmetic(library)


def fuse(model: nn.Module, library: Library) -> None:
    """Put the compiled functions into the model's norms and MLPs, where they are transformers' own of a known family.

    A module changes its class and nothing else: weights, names and adapters stay, and a copy is fused as well.
    """
    for module in model.modules():
        kind: Any = type(module)  # Any: a module's own hash makes mypy doubt that its class has one
        fused: Any = _fused(module)
        if fused is not None:
            module.__class__ = _subclass(fused, kind, library)


@dataclass(frozen=True)
class _Functions:
    """Of training.cpp and decode.cpp, for one dtype."""

    norm: Callable[..., None]
    norm_back: Callable[..., None]
    gated: Callable[..., None]
    gated_back: Callable[..., None]


def _functions(library: Library, name: str) -> _Functions:
    function, sizes = library.function, (int64, int64, int32)
    return _Functions(
        norm=function(f"norm_{name}", pointer, pointer, float32, float32, pointer, pointer, *sizes),
        norm_back=function(f"norm_back_{name}", *[pointer] * 3, float32, *[pointer] * 3, *sizes),
        gated=function(f"gated_{name}", pointer, int64, pointer, int64, int32, pointer, *sizes),
        gated_back=function(f"gated_back_{name}", *[pointer] * 3, int32, pointer, pointer, int64, int32),
    )


class _NormFunction(torch.autograd.Function):
    """x (..., W), weight (W,) -> x / rms(x) * (weight + offset)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offset: float, eps: float, functions: _Functions) -> Tensor:
        given, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
        scales = torch.empty(x.shape[:-1], dtype=torch.float32)
        told = given.data_ptr(), weight.data_ptr(), offset, eps, out.data_ptr(), scales.data_ptr()
        functions.norm(*told, scales.numel(), x.shape[-1], torch.get_num_threads())
        ctx.save_for_backward(x, weight, scales)
        ctx.offset, ctx.functions = offset, functions
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scales = ctx.saved_tensors
        grad, given, on_x = grad.contiguous(), x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
        sums = None  # (blocks, W)
        if ctx.needs_input_grad[1]:
            sums = torch.empty(-(-scales.numel() // _BLOCK), x.shape[-1], dtype=torch.float32)
        inputs = grad.data_ptr(), given.data_ptr(), weight.data_ptr(), ctx.offset, scales.data_ptr()
        outputs = on_x.data_ptr(), None if sums is None else sums.data_ptr()
        ctx.functions.norm_back(*inputs, *outputs, scales.numel(), x.shape[-1], torch.get_num_threads())
        return on_x, None if sums is None else sums.sum(0).to(weight.dtype), None, None, None


class _GatedFunction(torch.autograd.Function):
    """gate (..., W), up (..., W) -> f(gate) * up, f the SiLU or the GELU by tanh."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gelu: bool, functions: _Functions) -> Tensor:
        first, second, out = gate.contiguous(), up.contiguous(), torch.empty(gate.shape, dtype=gate.dtype)
        width = gate.shape[-1]
        halves = first.data_ptr(), width, second.data_ptr(), width
        functions.gated(*halves, gelu, out.data_ptr(), gate.numel() // width, width, torch.get_num_threads())
        ctx.save_for_backward(gate, up)
        ctx.gelu, ctx.functions = gelu, functions
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = (tensor.contiguous() for tensor in ctx.saved_tensors)
        grad = grad.contiguous()
        on_gate, on_up = torch.empty_like(gate), torch.empty_like(up)
        inputs = grad.data_ptr(), gate.data_ptr(), up.data_ptr(), ctx.gelu
        outputs = on_gate.data_ptr(), on_up.data_ptr()
        ctx.functions.gated_back(*inputs, *outputs, gate.numel(), torch.get_num_threads())
        return on_gate, on_up, None, None


class _Fused(nn.Module):
    """Before transformers' class among a module's classes."""

    functions: Mapping[torch.dtype, _Functions]

    def functions_for(self, x: Tensor, other: Tensor) -> _Functions | None:
        """None: the two want transformers' own operators (a copy may have another type or place)."""
        fits = x.device.type == other.device.type == "cpu" and x.dtype == other.dtype
        return self.functions.get(x.dtype) if fits else None


class _Norm(_Fused):
    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        functions, told = self.functions_for(x, self.weight), vars(self)
        if functions is None:
            plain: Tensor = super().forward(x)
            return plain
        # Gemma's keeps its weight less one, and epsilon under another name.
        offset, eps = (0.0, told["variance_epsilon"]) if "variance_epsilon" in told else (1.0, told["eps"])
        result: Tensor = _NormFunction.apply(x, self.weight, offset, eps, functions)
        return result


class _Mlp(_Fused):
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        functions = self.functions_for(gate, up)
        if functions is None:
            gated = self.act_fn(gate) * up
        else:
            gated = _GatedFunction.apply(gate, up, isinstance(self.act_fn, GELU), functions)
        result: Tensor = self.down_proj(gated)
        return result


def _fused(module: nn.Module) -> type[_Fused] | None:
    """What computes the module; None: it stays."""
    kind = type(module)
    if kind.__module__ not in _HOMES or "forward" in vars(module):
        return None
    if kind.__name__.endswith("RMSNorm"):
        return _Norm
    return _Mlp if kind.__name__.endswith("MLP") and isinstance(module.act_fn, (*SILU, GELU)) else None


@cache
def _subclass(fused: type[Any], kind: type[Any], library: Library) -> type[nn.Module]:
    """Of transformers' class, under its name."""
    functions = {dtype: _functions(library, name) for dtype, name in NAMES.items()}
    return type(kind.__name__, (fused, kind), {"functions": functions})
