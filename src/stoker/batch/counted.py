"""What a step asks of the device: floating-point operations and bytes, counted while it runs, against the limits."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from stoker.batch.saved import bytes_of
from stoker.batch.speed import copy_bandwidth, matmul_peak

__all__ = ["Counted", "Limits", "count", "limits"]

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")
LOOKUPS = ("embedding", "index", "index_select", "gather", "embedding_dense_backward")
"""Read only the rows they return, not their whole table."""


@dataclass(frozen=True)
class Counted:
    """One step."""

    flops: int
    """Of matrix products, convolutions and attention."""
    moved: int
    """Bytes that operators read and write, each from memory: what caches and fusion save isn't known."""
    dtype: torch.dtype
    """That most of the products' inputs have."""

    @property
    def flop_per_byte(self) -> float:
        return self.flops / self.moved if self.moved else 0.0


@dataclass(frozen=True)
class Limits:
    """What the device can do, measured."""

    flops: float
    """Per second, the fastest square matrix product."""
    bandwidth: float
    """Bytes per second, read and written by a copy."""

    @property
    def ridge(self) -> float:
        """FLOP per byte above which arithmetic, and not memory, is the limit (Williams et al. 2009, roofline)."""
        return self.flops / self.bandwidth


def limits(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> Limits:
    """Measured now: about three times `seconds`."""
    return Limits(matmul_peak(device, dtype, seconds), copy_bandwidth(device, seconds))


def count(step: Callable[[], None]) -> Counted:
    """Runs the step once, slower than usual."""
    traffic, products = _Traffic(), FlopCounterMode(display=False)
    with products, traffic:
        step()
    dtype = traffic.dtypes.most_common(1)[0][0] if traffic.dtypes else torch.float32
    return Counted(int(products.get_total_flops()), traffic.moved, dtype)


class _Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums what operators read and write; views move nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved = 0
        self.dtypes: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        name = func.overloadpacket.__name__
        read = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        written = [each for each in tree_iter(result) if isinstance(each, Tensor)]
        if name in PRODUCTS or name.startswith("_scaled_dot_product"):
            self.dtypes.update({each.dtype: each.numel() for each in read})
        if name in LOOKUPS:
            read = written
        self.moved += sum(map(bytes_of, read)) + sum(map(bytes_of, written))
        return result
