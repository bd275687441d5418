"""The optimizer step: fp32 master weights, fp32 gradient sums, clipping, and a learning rate by samples."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stoker.batch.horizons import Horizon
from stoker.batch.warmup import NORMS_REMEMBERED, running_median
from stoker.config import schema
from stoker.engine.local.compiler import Library, load_library
from stoker.engine.local.structures import float32, int32, int64, pointer
from stoker.errors import CheckpointError

__all__ = ["MasterOptimizer", "NormGuard", "learning_rate", "loss_scale"]

_SLOTS = {
    "adamw": {"step", "exp_avg", "exp_avg_sq"},
    "sgd": {"momentum_buffer"},
    "adafactor": {"step", "row_var", "col_var", "variance"},
}
"""What torch's optimizers remember of a parameter, by `Optimizer.name`."""


def learning_rate(config: schema.Optimizer, samples_seen: int, total_samples: int, factor: float = 1.0) -> float:
    """Rate of the update that ends with `samples_seen` samples trained on (its own included), times a factor.

    By samples, not updates: changing samples_per_update leaves the schedule where it was.
    """
    warmup = config.warmup_fraction * total_samples
    horizon = Horizon(total_samples, warmup, config.decay, config.final_fraction)
    return factor * horizon.rate(config.learning_rate, samples_seen)


def loss_scale(dtype: torch.dtype, weights: Sequence[NDArray[np.floating[Any]]]) -> float:
    """float16 can't hold the gradient of a loss over thousands of tokens: lift a token's weight to about 1."""
    if dtype != torch.float16:
        return 1.0
    largest = max((float(np.abs(of_row).max(initial=0)) for of_row in weights), default=0.0)
    return 2.0 ** -round(math.log2(largest)) if largest else 1.0


class NormGuard:
    """Says why a gradient of this norm should make no update; remembers past norms for a running median."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self.past: deque[float] = deque(maxlen=NORMS_REMEMBERED)

    def __call__(self, norm: float) -> str:
        """Empty where the update may go ahead."""
        if not math.isfinite(norm):
            return f"is {norm}"
        median = running_median(self.past)
        if norm:  # 0: no row of the update had anything to teach
            # Remembered even when refused, so that a lasting change of scale becomes the new normal.
            self.past.append(norm)
        if self._ratio and median and norm > self._ratio * median:
            return f"{norm:.4g} is {norm / median:.3g} times its running median {median:.4g}"
        return ""


def _is_wide(parameter: Tensor) -> bool:
    return parameter.dtype in (torch.float32, torch.float64)


class MasterOptimizer:
    """Owns what a module needs to learn, by parameter name.

    A 16-bit parameter has an fp32 master and an fp32 gradient sum: each backward's 16-bit gradient is
    added to the sum and freed as soon as autograd has it. A 32-bit parameter is its own master and
    uses plain `.grad`. Compute weights change in place only, so whoever shares them sees each step.
    """

    def __init__(
        self,
        module: nn.Module,
        config: schema.Optimizer,
        exact: Mapping[str, Tensor] | None = None,
        *,
        compiled: bool = True,
    ) -> None:
        """`exact`: fp32 weights by name of which the module's 16-bit ones are roundings: they become the masters.
        `compiled`: let a function compiled for this CPU add gradients up, where there is one.
        """
        exact = exact or {}
        self._config = config
        self._compiled = compiled
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._masters = {
            name: p if _is_wide(p) else nn.Parameter(exact.get(name, p).detach().float())
            for name, p in self._parameters.items()
        }
        self._optimizer = _build(config, list(self._masters.values()))
        self.grad_scale = 1.0
        """The loss was multiplied by this (float16 would lose small gradients); undone when gradients are summed."""
        for name, parameter in self._parameters.items():
            if not _is_wide(parameter):
                parameter.register_post_accumulate_grad_hook(self._summing_hook(self._masters[name]))

    def _summing_hook(self, master: nn.Parameter) -> Callable[[Tensor], None]:
        def add_to_sum(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = parameter.grad.float()
                if self.grad_scale != 1:
                    master.grad.div_(self.grad_scale)
            else:
                _add(master.grad, parameter.grad, 1 / self.grad_scale, compiled=self._compiled)
            parameter.grad = None

        return add_to_sum

    # -- gradients -------------------------------------------------------------------------------

    def gradients(self) -> list[Tensor | None]:
        """The fp32 sums so far, in the order of the parameters; None: nothing yet."""
        return [master.grad for master in self._masters.values()]

    def sizes(self) -> list[int]:
        """Weights of each parameter, in the same order."""
        return [master.numel() for master in self._masters.values()]

    @property
    def device(self) -> torch.device:
        """Where the sums are."""
        return next(iter(self._masters.values())).device

    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, master, gradient in zip(
            self._parameters.values(), self._masters.values(), gradients, strict=True
        ):
            parameter.grad = None  # a backward cut short may have left a 16-bit one
            master.grad = gradient

    def zero(self) -> None:
        self.set_gradients([None] * len(self._masters))

    def norm(self) -> float:
        """Global L2 norm of the gradient, fp32; 0 where there is none."""
        present = [gradient for gradient in self.gradients() if gradient is not None]
        if not present:
            return 0.0
        return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(present))))

    # -- the step --------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, rate: float, norm: float) -> None:
        """Clip by the global `norm`, update masters, copy them into the compute weights, zero the gradient.

        Parameters without a gradient take part with a zero one: a batch whose rows all carry none
        moves the weights (by momentum) exactly as if it had been computed.
        """
        for master in self._masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        limit = self._config.max_grad_norm
        if limit and norm > limit:
            torch._foreach_mul_([g for g in self.gradients() if g is not None], limit / norm)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        narrow = [name for name, parameter in self._parameters.items() if not _is_wide(parameter)]
        if narrow:
            torch._foreach_copy_([self._parameters[n] for n in narrow], [self._masters[n] for n in narrow])
        self.zero()

    @torch.no_grad()
    def restart(self) -> None:
        """Forget moments and gradients; masters of which the module's present weights aren't roundings become those."""
        self._optimizer.state.clear()
        self.zero()
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is not parameter:
                master.copy_(torch.where(master.to(parameter.dtype) == parameter, master, parameter.float()))

    # -- saving ----------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """`master/<parameter>` (16-bit parameters only) and `state/<key>/<parameter>`."""
        found = {f"master/{n}": m.detach() for n, m in self._masters.items() if m is not self._parameters[n]}
        for name, master in self._masters.items():
            for key, value in self._optimizer.state.get(master, {}).items():
                if value is not None:
                    found[f"state/{key}/{name}"] = value
        return found

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Inverse of `tensors`; 16-bit compute weights follow their masters. Raises CheckpointError on a stranger.

        Moments of another update rule (a resume that changes `optimizer.name`) mean nothing here: they begin anew.
        """
        self._optimizer.state.clear()
        self.zero()
        masters = {name for name, master in self._masters.items() if master is not self._parameters[name]}
        missing = masters - {key.removeprefix("master/") for key in tensors if key.startswith("master/")}
        if missing:
            raise CheckpointError(
                f"optimizer state lacks fp32 weights of {min(missing)} (and {len(missing) - 1} more): was model.dtype "
                "another when it was saved? Resume with the saved config.toml"
            )
        slots = {key.split("/")[1] for key in tensors if key.startswith("state/")}
        of_this_rule = slots <= _SLOTS[self._config.name]
        for key, tensor in tensors.items():
            kind, rest = key.split("/", 1)
            slot, name = ("", rest) if kind == "master" else rest.split("/", 1)
            if name not in self._masters:
                raise CheckpointError(
                    f"optimizer state names {name!r}, which this model doesn't have: another model's?"
                )
            if kind == "master":
                self._masters[name].copy_(tensor)
                self._parameters[name].copy_(tensor)
            elif of_this_rule:
                device = self._masters[name].device
                self._optimizer.state[self._masters[name]][slot] = tensor.clone().to(device)


def _add(total: Tensor, gradient: Tensor, scale: float, *, compiled: bool) -> None:
    """total += scale * gradient, to the same bits either way: PyTorch makes a float32 copy of a bfloat16 `gradient`."""
    fits = compiled and gradient.device.type == "cpu" and gradient.dtype == torch.bfloat16
    library = load_library() if fits else None
    if not isinstance(library, Library) or not (total.is_contiguous() and gradient.is_contiguous()):
        total.add_(gradient, alpha=scale)
        return
    accumulate = library.function("accumulate", pointer, pointer, float32, int64, int32)
    accumulate(total.data_ptr(), gradient.data_ptr(), scale, total.numel(), torch.get_num_threads())


def _build(config: schema.Optimizer, masters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Matrices decay, vectors (norms, biases) don't."""
    groups = [
        {"params": [m for m in masters if m.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [m for m in masters if m.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)
    return torch.optim.Adafactor(groups, lr=config.learning_rate)
