"""A decoder's matrix products on CPU: which of the equal ways to compute them is the fastest there.

bfloat16 weights are packed once for each decoder, those with the same input together: at 1 to 64 rows a plain product
takes 1.2 to 1.8 times as long, most of it spent on laying out the same weights again. The copy is as large as the
weights and lives as long as the decoder: one `collect`. With AMX `tiles.h` multiplies, which at 1 to 32 rows takes
0.7 of oneDNN's time, because it reads ahead; else oneDNN does. float32 weights stay where they are: with AVX-512
`dots.h` multiplies, which at 4 to 24 rows takes 0.3 (a head) to 0.9 of MKL's time, and as long with one row or 64.
"""

from collections.abc import Callable, Sequence
from ctypes import byref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stoker.engine.local.compiler import Library
from stoker.engine.local.structures import Matrix, int32, int64, pointer

__all__ = ["Product", "RowProduct", "TiledProduct", "can_pack", "together"]

Product = Callable[[Tensor], Sequence[Tensor]]
"""(N, in) -> one (N, out) for each map."""

_DEPTH, _OUTPUTS = 32, 32
"""Inputs and outputs that tiles.h packs together."""
_TILED_ROWS = 512
"""Beyond these a plain product, which blocks its inputs for the processor's cache, is the faster one."""
_DOTTED_ROWS = 64
"""Beyond these MKL is as fast."""
_FEW_ROWS = 128
_TALL, _PIECE, _PIECE_TURNED = 16384, 1024, 4096
"""Outputs of a matrix that is multiplied in pieces where MKL is up to a third slower on the whole, and of a piece."""


def can_pack(modules: Sequence[Any]) -> bool:
    """True where packing pays and nothing but plain bfloat16 linears on CPU is asked for."""
    plain = all(
        type(module) is nn.Linear and module.weight.dtype == torch.bfloat16 and module.weight.device.type == "cpu"
        for module in modules
    )
    # Without oneDNN (macOS) torch has no such operator to ask.
    return plain and torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def together(modules: Sequence[Any], library: Library | None, *, pack: bool) -> Product:
    """The maps of modules with the same input. What isn't a plain linear, an adapted one say, is called as it is."""
    if pack and library is not None and library.tiles and modules[0].in_features % _DEPTH == 0:
        return TiledProduct(modules, library)
    if library is not None and library.dots and _in_rows(modules):
        return RowProduct(modules, library)
    return _by_onednn(modules) if pack else _apart(modules)


def _apart(modules: Sequence[Any]) -> Product:
    each = [_plain(module) for module in modules]
    return lambda x: [product(x) for product in each]


def _by_onednn(modules: Sequence[Any]) -> Product:
    weights, widths = [module.weight.detach() for module in modules], [module.out_features for module in modules]
    weight = torch.ops.mkldnn._reorder_linear_weight(weights[0] if len(weights) == 1 else torch.cat(weights), None)
    bias = torch.cat([_bias(module) for module in modules]) if _biased(modules) else None
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "").split(widths, -1)


class TiledProduct:
    """Products by tiles.h."""

    def __init__(self, modules: Sequence[Any], library: Library) -> None:
        self.widths = [module.out_features for module in modules]
        rooms = [-(-width // _OUTPUTS) * _OUTPUTS for width in self.widths]
        self.starts = [sum(rooms[:n]) for n in range(len(rooms))]
        """Where each module's outputs begin: in a tile of its own."""
        self._threads = torch.get_num_threads()
        self._apart = _apart(modules)
        self._product = library.function("product", pointer, int64, int64, pointer, pointer, int32)
        depth, outputs = modules[0].in_features, sum(rooms)
        self._packed = modules[0].weight.new_empty(outputs, depth)
        self._bias = self._packed.new_zeros(outputs) if _biased(modules) else None
        pack = library.function("pack", pointer, int64, int64, pointer, int32)
        for module, start, width in zip(modules, self.starts, self.widths, strict=True):
            weight = module.weight.detach().contiguous()
            pack(weight.data_ptr(), width, depth, self._packed[start:].data_ptr(), self._threads)
            if self._bias is not None:
                self._bias[start : start + width] = _bias(module)
        bias = None if self._bias is None else self._bias.data_ptr()
        self.matrix = Matrix(self._packed.data_ptr(), bias, outputs, depth)

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        if len(x) > _TILED_ROWS:
            return self._apart(x)
        x = x if x.stride(1) == 1 else x.contiguous()
        out = x.new_empty(len(x), self.matrix.outputs)
        self._product(x.data_ptr(), x.stride(0), len(x), byref(self.matrix), out.data_ptr(), self._threads)
        return [out[:, start : start + width] for start, width in zip(self.starts, self.widths, strict=True)]


class RowProduct:
    """Products by dots.h."""

    def __init__(self, modules: Sequence[Any], library: Library) -> None:
        self._modules = modules  # whose weights are pointed to
        self._threads = torch.get_num_threads()
        self._apart = _apart(modules)
        self._product = library.function(
            "row_products", pointer, int64, int64, int64, pointer, pointer, pointer, pointer, int32
        )
        self._widths = [module.out_features for module in modules]
        self._pointers = pointer * len(modules)
        self._weight_pointers = self._pointers(*(module.weight.data_ptr() for module in modules))
        self._bias_pointers = self._pointers(
            *(None if module.bias is None else module.bias.data_ptr() for module in modules)
        )
        self._outputs = (int64 * len(modules))(*self._widths)

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        if len(x) > _DOTTED_ROWS:
            return self._apart(x)
        inputs = x.contiguous()
        found = [x.new_empty(len(x), width) for width in self._widths]
        out = self._pointers(*(each.data_ptr() for each in found))
        given = self._weight_pointers, self._bias_pointers, self._outputs, out
        self._product(inputs.data_ptr(), *inputs.shape, len(found), *given, self._threads)
        return found


def _few_rows(x: Tensor) -> bool:
    """True where W x' beats x W' for x (N, width): on an AVX2 processor MKL's float32 product took up to three times
    as long the second way round with 2 to 64 rows, 1.1 to 1.4 times with 96 and 128, and as long from 256 on. With
    AVX-512 it was the first way that took longer.
    """
    return len(x) <= _FEW_ROWS and x.dtype == torch.float32 and _avx2(x)


def _plain(module: Any) -> Callable[[Tensor], Tensor]:
    if type(module) is not nn.Linear:
        adapted: Callable[[Tensor], Tensor] = module
        return adapted
    tall = module.out_features > _TALL

    def product(x: Tensor) -> Tensor:
        if not tall or not _avx2(x):
            return _one(x, module.weight, module.bias)
        out = x.new_empty(len(x), module.out_features)
        rows = _PIECE_TURNED if _few_rows(x) else _PIECE
        for start in range(0, module.out_features, rows):
            piece = slice(start, start + rows)
            out[:, piece] = _one(x, module.weight[piece], None if module.bias is None else module.bias[piece])
        return out

    return product


def _one(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not _few_rows(x):
        return F.linear(x, weight, bias)
    turned = torch.mm(weight, x.contiguous().t()).t()
    return turned if bias is None else turned + bias


def _in_rows(modules: Sequence[Any]) -> bool:
    """Whether dots.h can multiply by these modules' weights."""
    return all(
        type(module) is nn.Linear
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
        and module.weight.is_contiguous()
        and module.in_features % 16 == 0
        and module.out_features % 4 == 0
        for module in modules
    )


def _biased(modules: Sequence[Any]) -> bool:
    return any(module.bias is not None for module in modules)


def _bias(module: nn.Linear) -> Tensor:
    return module.weight.new_zeros(module.out_features) if module.bias is None else module.bias.detach()


def _avx2(x: Tensor) -> bool:
    return x.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
