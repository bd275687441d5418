"""An adapted linear map in one step: W x + b + s B A x, with nothing of the size of its output beside the output.

peft adds the adapters' part by three tensors of that size. Freed between small ones that live until the backward
pass, they leave holes in the heap: a micro-batch took half as much memory again as it needed.
"""

from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn

__all__ = ["LeanLinear"]


class _Adapted(torch.autograd.Function):
    """x (..., I), weight (O, I), bias (O,) or None, a (R, I), b (O, R) -> (..., O). Gradients for x, a and b alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        low = nn.functional.linear(x, a)  # (..., R)
        out = nn.functional.linear(x, weight, bias)
        out.view(-1, b.shape[0]).addmm_(low.view(-1, b.shape[1]), b.t(), alpha=scale)
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scale = scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, low = ctx.saved_tensors
        flat = grad.reshape(-1, b.shape[0])
        on_low = (flat @ b).mul_(ctx.scale)  # (N, R)
        on_x = on_a = on_b = None
        if ctx.needs_input_grad[0]:
            on_x = (flat @ weight).addmm_(on_low, a).view(x.shape)
        if ctx.needs_input_grad[3]:
            on_a = on_low.t() @ x.reshape(-1, a.shape[1])
        if ctx.needs_input_grad[4]:
            on_b = (flat.t() @ low.reshape(-1, b.shape[1])).mul_(ctx.scale)
        return on_x, None, None, on_a, on_b, None


class LeanLinear(Linear):
    """peft's map with one plain adapter and a base that nothing trains; everything but the forward is peft's."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        base: Any = self.get_base_layer()
        if self.disable_adapters:
            off: Tensor = base(x)
            return off
        (name,) = self.active_adapters
        weight = base.weight.t() if self.fan_in_fan_out else base.weight
        a, b = (part[name].weight for part in (self.lora_A, self.lora_B))
        result: Tensor = _Adapted.apply(x, weight, base.bias, a, b, self.scaling[name])
        return result
