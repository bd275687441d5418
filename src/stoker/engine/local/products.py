"""A decoder's matrix products on CPU: which of the equal ways to compute them is the fastest there.

With AVX-512 `dots.h` multiplies by weights where they lie. In float32 that takes 0.6 to 0.8 of MKL's time at 4 to 24
rows, and as long with one row or 64; in bfloat16 0.5 to 0.9 of oneDNN's, whose weights are packed before, up to 96.
With AMX bfloat16 weights are packed for `tiles.h`, which at 1 to 32 rows takes 0.7 of oneDNN's time, because it
reads ahead. Where neither serves oneDNN packs them, those with the same input together: a plain product takes 1.2 to
1.8 times as long, most of it spent on laying out the same weights again. A packed copy is as large as the weights and
lives as long as the decoder: one `collect`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stoker.engine.local.compiler import Library
from stoker.engine.local.structures import NAMES, Matrix, int32, int64, pointer

__all__ = ["CompiledProduct", "Product", "can_pack", "together"]

Product = Callable[[Tensor], Sequence[Tensor]]
"""(N, in) -> one (N, out) for each map."""

_TILES = "tiles"
_DEPTH, _OUTPUTS = 32, 32
"""Inputs and outputs that tiles.h packs together."""
_MOST_ROWS = {_TILES: 512, "rows_float32": 64, "rows_bfloat16": 128}
"""Beyond these a plain product, which blocks its inputs for the processor's cache, is as fast or faster."""
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
    """The maps of modules with the same input. What isn't a plain linear, an adapted one say, is called as it is.

    `pack`: these may be copied in another layout (`can_pack`).
    """
    if library is not None and (kind := _kind(modules, library, pack=pack)):
        return CompiledProduct(modules, library, kind)
    return _by_onednn(modules) if pack else _apart(modules)


def _kind(modules: Sequence[Any], library: Library, *, pack: bool) -> str | None:
    """Of the compiled functions that multiply these modules' weights; None: there is none."""
    if pack and library.tiles and modules[0].in_features % _DEPTH == 0:
        return _TILES
    kinds = {_row_kind(module) for module in modules}
    return kinds.pop() if library.dots and len(kinds) == 1 else None


def _row_kind(module: Any) -> str | None:
    if type(module) is not nn.Linear or module.weight.device.type != "cpu" or not module.weight.is_contiguous():
        return None
    depth = {torch.float32: 16, torch.bfloat16: 32}.get(module.weight.dtype)
    if depth is None or module.in_features % depth or module.out_features % 4:
        return None
    return f"rows_{NAMES[module.weight.dtype]}"


def _apart(modules: Sequence[Any]) -> Product:
    each = [_plain(module) for module in modules]
    return lambda x: [product(x) for product in each]


def _by_onednn(modules: Sequence[Any]) -> Product:
    weights, widths = [module.weight.detach() for module in modules], [module.out_features for module in modules]
    weight = torch.ops.mkldnn._reorder_linear_weight(weights[0] if len(weights) == 1 else torch.cat(weights), None)
    bias = torch.cat([_bias(module) for module in modules]) if _biased(modules) else None
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "").split(widths, -1)


class CompiledProduct:
    """Products by dots.h, or in tiles by tiles.h."""

    def __init__(self, modules: Sequence[Any], library: Library, kind: str) -> None:
        self.kind = kind
        """What the compiled functions' names end in."""
        self.matrices = (Matrix * len(modules))()
        """One for each map, for as long as this object is there; in tiles `outputs` is rounded up."""
        self.most_rows = _MOST_ROWS[kind]
        self._threads = torch.get_num_threads()
        self._widths = [module.out_features for module in modules]
        self._apart = _apart(modules)
        self._pointers = pointer * len(modules)
        self._products = library.function(f"products_{kind}", pointer, *[int64] * 3, pointer, pointer, int32)
        self._held = []  # what the matrices point to
        for place, module in enumerate(modules):
            weight, bias = _in_tiles(module, library) if kind == _TILES else (module.weight, module.bias)
            self._held += [weight, bias]
            to_bias = None if bias is None else bias.data_ptr()
            self.matrices[place] = Matrix(weight.data_ptr(), to_bias, len(weight), module.in_features)

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        if len(x) > self.most_rows:
            return self._apart(x)
        x = x if x.stride(1) == 1 else x.contiguous()
        found = [x.new_empty(len(x), matrix.outputs) for matrix in self.matrices]
        out = self._pointers(*(each.data_ptr() for each in found))
        given = x.data_ptr(), x.stride(0), len(x), len(found), self.matrices, out
        self._products(*given, self._threads)
        return [each[:, :width] for each, width in zip(found, self._widths, strict=True)]


def _in_tiles(module: nn.Linear, library: Library) -> tuple[Tensor, Tensor | None]:
    """Packed, and filled up to whole tiles."""
    depth, outputs = module.in_features, -(-module.out_features // _OUTPUTS) * _OUTPUTS
    packed, weight = module.weight.new_empty(outputs, depth), module.weight.detach().contiguous()
    pack = library.function("pack", pointer, int64, int64, pointer, int32)
    pack(weight.data_ptr(), module.out_features, depth, packed.data_ptr(), torch.get_num_threads())
    if module.bias is None:
        return packed, None
    return packed, F.pad(module.bias.detach(), (0, outputs - module.out_features))


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


def _biased(modules: Sequence[Any]) -> bool:
    return any(module.bias is not None for module in modules)


def _bias(module: nn.Linear) -> Tensor:
    return module.weight.new_zeros(module.out_features) if module.bias is None else module.bias.detach()


def _avx2(x: Tensor) -> bool:
    return x.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
