"""Squared norms of each micro-batch's gradient, seen on its way to `.grad`: no gradient is kept twice."""

from collections.abc import Callable, Sequence
from itertools import islice
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stoker.batch.noise import NoiseScale
from stoker.errors import RunError

__all__ = ["MicrobatchNorms"]

DOT = (torch.float32, torch.float64)
LONGEST_DOT = 2**31 - 1


class MicrobatchNorms:
    """Hooks on the parameters for one window. A leaf's hook sees the sum of what one backward pass adds to its `.grad`.

    With DistributedDataParallel that is this rank's own gradient, before any exchange. Norms stay on their devices
    until the window ends, so that nothing waits for one.
    """

    def __init__(self, model: nn.Module, noise: NoiseScale) -> None:
        self._model, self._noise = model, noise
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._squares: dict[str, Tensor] = {}
        self._microbatches: list[list[Tensor]] = []

    def __enter__(self) -> "MicrobatchNorms":
        self._handles = [
            p.register_hook(self._seeing(name))  # type: ignore[no-untyped-call]
            for name, p in self._parameters.items()
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def leftover(self) -> str:
        """What is wrong with gradients that are there before a window: the whole's norm would count them in."""
        held = {name: _square(p.grad) for name, p in self._parameters.items() if p.grad is not None}
        if not _sums([list(held.values())])[0]:
            return ""
        name = next(name for name, square in held.items() if float(square))
        return (
            f"{name} has a gradient from before: the noise scale needs the gradient of this window alone; call "
            "zero_grad() first, or leave `noise` out"
        )

    def end_microbatch(self) -> None:
        """After its backward pass."""
        self._microbatches.append(list(self._squares.values()))
        self._squares = {}

    def report(self, counts: Sequence[float], scale: float, mean: bool) -> None:
        """The whole update, over all ranks, to the meter: each micro-batch and the whole as the mean over its units.

        `scale` is what the whole `.grad` was multiplied by (a loss scaler's factor). Where `mean`, `.grad` is of the
        mean over all units, otherwise of their sum.
        """
        model = self._model
        ranks = dist.get_world_size(model.process_group) if isinstance(model, DistributedDataParallel) else 1
        held = [_square(p.grad) for p in self._parameters.values() if p.grad is not None]
        *squares, whole = _sums([*self._microbatches, held])
        mine = [(square / ranks**2, count) for square, count in zip(squares, counts, strict=True) if count > 0]
        parts: list[list[tuple[float, float]]] = [mine]
        if isinstance(model, DistributedDataParallel):
            parts = [[] for _ in range(ranks)]
            dist.all_gather_object(parts, mine, group=model.process_group)
        every = [part for rank in parts for part in rank]
        total = sum(count for _, count in every)
        unit = scale if mean else scale * total
        self._noise.add_parts(
            [square * (total / count / unit) ** 2 for square, count in every],
            whole / unit**2,
            [count for _, count in every],
        )

    def _seeing(self, name: str) -> Callable[[Tensor], None]:
        def see(gradient: Tensor) -> None:
            if name in self._squares:
                raise RunError(
                    f"{name} gets its gradient in several pieces within one backward pass (reentrant checkpointing "
                    "does that), and their norms don't add up: use checkpoint(..., use_reentrant=False), or leave "
                    "`noise` out"
                )
            self._squares[name] = _square(gradient)

        return see


def _square(gradient: Tensor) -> Tensor:
    """() its squared norm, in float32 at least. A product with itself takes half as long as a norm on a CPU."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    if values.dtype in DOT and values.is_contiguous() and values.numel() <= LONGEST_DOT:
        flat = values.view(-1)
        return torch.dot(flat, flat)
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))
    return norm.square()


def _sums(groups: Sequence[Sequence[Tensor]]) -> list[float]:
    """Each group's sum, with one wait for the device; devices and dtypes may differ."""
    squares = [square for group in groups for square in group]
    if not squares:
        return [0.0] * len(groups)
    device = squares[0].device
    found = iter(torch.stack([one if one.device == device else one.to(device) for one in squares]).tolist())
    return [sum(islice(found, len(group))) for group in groups]
