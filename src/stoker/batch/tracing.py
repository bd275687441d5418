"""What any module's training holds in memory, found by running its forward pass at two sizes.

Saved-tensor hooks see each tensor that autograd keeps for the backward pass, checkpointed layers' inputs included.
What lives only within an operator or the backward pass (its gradients, a layer computed again) isn't kept, and isn't
seen here: `stoker.batch.fit` measures the peak of complete steps.
"""

import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stoker.batch import nest
from stoker.batch.saved import SavedTensors, storages
from stoker.batch.scalar import scalar
from stoker.batch.target import Target
from stoker.batch.telling import OnPart
from stoker.errors import ConfigError

__all__ = ["LayerTrace", "Trace", "trace"]

BATCH, LOSS = "batch", "loss"


@dataclass(frozen=True)
class LayerTrace:
    """What one module keeps itself, its submodules' share left to them."""

    name: str
    """As `named_modules` has it; "" is the model itself; "batch" and "loss" lie outside of it."""
    kind: str
    """The module's class."""
    parameters: int
    """Its own; shared ones belong to the first module that has them."""
    saved: tuple[tuple[int, int], ...]
    """(size, bytes kept for the backward pass), as measured."""

    @property
    def per_unit(self) -> float:
        """Bytes that each further unit (example, token) adds."""
        (few, less), (many, more) = self.saved
        return (more - less) / (many - few)

    @property
    def fixed(self) -> float:
        """Bytes kept at any size."""
        few, less = self.saved[0]
        return less - self.per_unit * few

    def activations(self, size: int) -> float:
        """Bytes at that size, on the line through both measured ones."""
        return self.fixed + self.per_unit * size


@dataclass(frozen=True)
class Trace:
    """What a target's training holds, before its optimizer's states. Bytes, unless it says otherwise."""

    model: str
    """The model's class."""
    unit: str
    """What a size counts."""
    parameters: int
    trainable: int
    """Of the parameters."""
    weight_bytes: int
    gradient_bytes: int
    """Once a backward pass has run: each trainable parameter's, in its own dtype."""
    buffer_bytes: int
    largest_parameter: int
    """Elements of the largest trained tensor: an optimizer's step makes temporaries of its size."""
    matrix_parameters: int
    """Trained ones in two-dimensional tensors: what Muon moves."""
    layers: tuple[LayerTrace, ...]
    """Those with parameters or something kept, in the order of `named_modules`; first the batch, last the loss."""

    def activations(self, size: int) -> float:
        """Bytes of the batch and of all that is kept of its forward pass."""
        return sum(layer.activations(size) for layer in self.layers)

    @property
    def largest(self) -> LayerTrace:
        """The layer that adds most for each further unit."""
        return max(self.layers, key=lambda layer: layer.per_unit)

    def to_json(self) -> dict[str, Any]:
        """Everything, in plain types."""
        return asdict(self) | {
            "layers": [
                asdict(layer) | {"fixed": layer.fixed, "per_unit": layer.per_unit, "saved": [*map(list, layer.saved)]}
                for layer in self.layers
            ],
            "largest": self.largest.name,
        }

    def __str__(self) -> str:
        mib = 2**20
        ranked = sorted(self.layers, key=lambda layer: -layer.per_unit)[:10]
        width = max(len(_label(layer)) for layer in ranked)
        per_unit = sum(layer.per_unit for layer in self.layers)
        return "\n".join([
            f"{self.model}: {self.parameters:,} parameters, {self.trainable:,} of them trained",
            f"weights {self.weight_bytes / mib:,.1f} MiB, gradients {self.gradient_bytes / mib:,.1f} MiB, "
            f"buffers {self.buffer_bytes / mib:,.1f} MiB",
            f"kept for the backward pass: {self.activations(0) / mib:,.2f} MiB + {per_unit / mib:,.3f} MiB x "
            f"{self.unit}, most of it by",
            *(f"  {_label(layer):<{width}}  {layer.per_unit / mib:>10,.3f} MiB  {layer.kind}" for layer in ranked),
        ])  # fmt: skip


def trace(target: Target, sizes: tuple[int, int] = (2, 4), *, on_part: OnPart | None = None) -> Trace:
    """What `target` holds, from its forward pass at two sizes of batch, in the mode that the model is in.

    `on_part`: told of each size when it has been traced, and about how many seconds are left.
    At size 1 some tensors that other sizes copy are views, and BatchNorm may refuse: 2 is the least that is typical.
    The model is left as it was found: buffers (BatchNorm's statistics), gradients, and the random numbers of torch,
    numpy and Python. Raises ConfigError where the sizes aren't two, rising, or are more than the data set has, and
    for TorchScript.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in target.model.modules()):
        raise ConfigError("a TorchScript module can't be looked into: trace the model that it was made of")
    few, many = sizes
    if not 1 <= few < many:
        raise ConfigError(f"trace: sizes = {sizes} must be two sizes, at least 1, the second larger")
    if target.most is not None and many > target.most:
        raise ConfigError(
            f"trace: sizes = {sizes}, but the data set has {target.most} {target.unit}: give smaller ones"
        )
    keys = {module: name for name, module in target.model.named_modules()}
    with _restored(target):
        found, start = {}, time.monotonic()
        for size in sizes:
            found[size] = _saved(target, keys, size)
            if on_part is not None:
                left = (time.monotonic() - start) * (sum(sizes) / sum(found) - 1)
                on_part(f"{size} {target.unit} traced", left)
    own = _own_parameters(target.model)
    kinds = {name: type(module).__name__ for module, name in keys.items()}
    places = [(BATCH, "inputs"), *kinds.items(), (LOSS, "function")]
    layers = tuple(
        LayerTrace(name, kind, own.get(name, 0), tuple((size, found[size].get(name, 0)) for size in sizes))
        for name, kind in places
    )
    weights = target.weights()
    trained = [weight for weight in weights if weight.requires_grad]
    return Trace(
        model=type(target.model).__name__,
        unit=target.unit,
        parameters=sum(weight.numel() for weight in weights),
        trainable=sum(weight.numel() for weight in trained),
        weight_bytes=_bytes(weights),
        gradient_bytes=sum(weight.nbytes for weight in trained),
        buffer_bytes=_bytes(target.model.buffers()),
        largest_parameter=max((weight.numel() for weight in trained), default=0),
        matrix_parameters=sum(weight.numel() for weight in trained if weight.dim() == 2),
        layers=tuple(layer for layer in layers if layer.parameters or any(kept for _, kept in layer.saved)),
    )


def _saved(target: Target, keys: dict[nn.Module, str], size: int) -> dict[str, int]:
    """Bytes kept at one size, by the module's name; the batch's and the loss's too."""
    model = target.model
    batch = target.make_batch(size)
    inputs = nest.tensors(batch)
    with torch.enable_grad(), SavedTensors(keys, [*target.weights(), *model.buffers(), *inputs]) as saved:
        loss = scalar(target.loss(model, batch))
        found = {LOSS if key is None else str(key): kept for key, kept in saved.count().items()}
        del loss  # the graph lives until here
    return {**found, BATCH: _bytes(inputs)}


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of all memory behind them, each piece once."""
    parts = {part.data_ptr(): part.nbytes() for tensor in tensors for part in storages(tensor) if part.nbytes()}
    return sum(parts.values())


def _own_parameters(model: nn.Module) -> dict[str, int]:
    """Parameters by the module that has them, shared ones with the first."""
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        found[owner] = found.get(owner, 0) + parameter.numel()
    return found


@contextmanager
def _restored(target: Target) -> Iterator[None]:
    """Afterwards buffers, gradients, modes and random numbers are those of before."""
    modules = list(target.model.modules())
    buffers = [dict(module._buffers) for module in modules]
    values = {tensor: tensor.clone() for tensor in target.model.buffers()}
    gradients = [(weight, weight.grad) for weight in target.weights()]
    modes = [module.training for module in modules]
    python, numpy_state = random.getstate(), np.random.get_state()
    for weight, _ in gradients:
        weight.grad = None  # a loss that runs its own backward pass would add to it
    device = target.device
    try:
        with torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=_generator(device)):
            yield
    finally:
        with torch.no_grad():
            for tensor, value in values.items():
                tensor.copy_(value)
        for module, own, mode in zip(modules, buffers, modes, strict=True):
            module._buffers.clear()
            module._buffers.update(own)
            module.training = mode
        for weight, gradient in gradients:
            weight.grad = gradient
        random.setstate(python)
        np.random.set_state(numpy_state)


def _generator(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type


def _label(layer: LayerTrace) -> str:
    return layer.name or "(the model itself)"
