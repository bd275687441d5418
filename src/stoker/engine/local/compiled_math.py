"""`StepMath` by the compiled functions of decode.cpp: one pass over memory where operators take up to twelve, and a
whole step in one call where every product is compiled, too.
"""

from collections.abc import Callable
from ctypes import byref

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from stoker.engine.local import structures
from stoker.engine.local.compiler import Library
from stoker.engine.local.dense import Dense, Layer, Norm
from stoker.engine.local.group_cache import GroupCache
from stoker.engine.local.products import CompiledProduct, Product
from stoker.engine.local.structures import NAMES, int32, int64, pointer

__all__ = ["GELU", "SILU", "CompiledMath", "uncompilable"]

_MOST_DIMS = 512
SILU = (nn.SiLU, type(ACT2FN["silu"]))
GELU = type(ACT2FN["gelu_pytorch_tanh"])


def uncompilable(dense: Dense) -> str | None:
    """Why the compiled functions don't fit this model, as a clause; None: they do."""
    if dense.device.type != "cpu" or dense.dtype not in NAMES:
        return f"they are for float32 and bfloat16 on a CPU, not {dense.dtype} on {dense.device.type}"
    if dense.head_dim % 2 or dense.head_dim > _MOST_DIMS:
        return f"a head has {dense.head_dim} dimensions"
    return None


class CompiledMath:
    """Serves a model that is not `uncompilable`."""

    def __init__(
        self, library: Library, dense: Dense, cache: GroupCache, tables: dict[str | None, tuple[Tensor, Tensor]]
    ) -> None:
        name = NAMES[dense.dtype]
        self._attend = library.function(f"attend_{name}", pointer, pointer, *[pointer, int64] * 3, pointer)
        self._add_norm = library.function(f"add_norm_{name}", *[pointer] * 5, int64, int64, int32)
        self._gated = library.function(
            f"gated_{name}", pointer, int64, pointer, int64, int32, pointer, int64, int64, int32
        )
        self._dense = dense
        self._cache = cache
        self._tables = tables  # their memory is read by address
        self._threads = torch.get_num_threads()
        self._rows = structures.Rows(heads=dense.key_value_heads, dim=dense.head_dim, threads=self._threads)
        self._norms: dict[int, tuple[structures.Norm, Tensor]] = {}
        self._layers = (structures.Layer * len(dense.layers))()
        for told, layer in zip(self._layers, dense.layers, strict=True):
            attention = told.attention
            attention.query_norm, attention.key_norm = self._norm(layer.query_norm), self._norm(layer.key_norm)
            attention.cosines, attention.sines = (table.data_ptr() for table in tables[layer.rotary])
            attention.window, attention.scale, attention.softcap = layer.window or 0, layer.scale, layer.softcap or 0.0
        self._step, self._most_rows = self._whole_step(library)

    def begin_step(self) -> None:
        rows, cache = self._rows, self._cache
        rows.rows, rows.column = len(cache.rows), cache.column
        where = cache.rows
        rows.prompts, rows.lengths, rows.starts = (t.data_ptr() for t in (where.prompts, where.lengths, where.starts))
        rows.own_room, rows.shared_room = cache.own[0].keys.shape[2], cache.shared[0].keys.shape[2]
        for told, own, shared in zip(self._layers, cache.own, cache.shared, strict=True):
            attention = told.attention
            attention.own_keys, attention.own_values = own.keys.data_ptr(), own.values.data_ptr()
            attention.shared_keys, attention.shared_values = shared.keys.data_ptr(), shared.values.data_ptr()

    def step(self, x: Tensor) -> Tensor | None:
        if self._step is None or len(x) > self._most_rows:
            return None
        x = x.contiguous()
        layer, out = self._layers[0], torch.empty_like(x)
        heads = [each.outputs for each in (layer.query, layer.key, layer.value)]
        widths = (*heads, layer.output.depth, x.shape[1], layer.gate.outputs, layer.up.outputs, layer.down.depth)
        rooms = [x, out, *(x.new_empty(len(x), width) for width in widths)]
        room = structures.Room(*(tensor.data_ptr() for tensor in rooms))
        self._rows.group = layer.output.depth // (self._rows.heads * self._rows.dim)
        first = self._norm(self._dense.norms[0])
        self._step(self._layers, len(self._layers), byref(first), byref(self._rows), byref(room), x.shape[1])
        return out

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = map(_rows_apart, (query, key, value))
        seen = query.new_empty(query.shape)
        self._rows.group = query.shape[1] // key.shape[1]
        heads = [number for tensor in (query, key, value) for number in (tensor.data_ptr(), tensor.stride(0))]
        self._attend(byref(self._layers[index].attention), byref(self._rows), *heads, seen.data_ptr())
        return seen

    def add_norm(self, x: Tensor, more: Tensor | None, after: Norm | None, norm: Norm) -> tuple[Tensor, Tensor]:
        x, out = x.contiguous(), x.new_empty(x.shape)
        more = None if more is None else more.contiguous()
        added = None if more is None else more.data_ptr()
        norms = byref(self._norm(after)), byref(self._norm(norm))
        self._add_norm(x.data_ptr(), added, *norms, out.data_ptr(), *x.shape, self._threads)
        return x, out

    def gate(self, layer: Layer, gate: Tensor, up: Tensor) -> Tensor:
        if not _compiled(layer):
            return layer.activation(gate) * up
        gate, up = _rows_apart(gate), _rows_apart(up)
        out = gate.new_empty(gate.shape)
        halves = gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0)
        self._gated(*halves, isinstance(layer.activation, GELU), out.data_ptr(), *gate.shape, self._threads)
        return out

    def _norm(self, norm: Norm | None) -> structures.Norm:
        """With its weight in float32, which is kept: the structure has but its address."""
        if norm is None:
            return structures.Norm()
        if id(norm) not in self._norms:
            weight = norm.weight.detach().float().contiguous()
            self._norms[id(norm)] = structures.Norm(weight.data_ptr(), norm.eps), weight
        return self._norms[id(norm)][0]

    def _whole_step(self, library: Library) -> tuple[Callable[..., None] | None, int]:
        """The compiled step, and the most rows that it is the fastest for; none where a part of a layer isn't compiled.

        Describes the layers whole.
        """
        dense, kinds = self._dense, {}
        for told, layer, following in zip(self._layers, dense.layers, dense.norms[1:], strict=True):
            if not _compiled(layer):
                return None, 0
            for product, names in _maps(layer):
                if not isinstance(product, CompiledProduct):
                    return None, 0
                kinds[product.kind] = product.most_rows
                for name, matrix in zip(names, product.matrices, strict=True):
                    setattr(told, name, matrix)
            if not told.output.outputs == told.down.outputs == len(following.weight):  # tiles may round it up
                return None, 0
            told.after_attention, told.before_mlp = self._norm(layer.after_attention), self._norm(layer.before_mlp)
            told.after_mlp, told.following = self._norm(layer.after_mlp), self._norm(following)
            told.gelu = isinstance(layer.activation, GELU)
        if len(kinds) != 1:
            return None, 0
        ((kind, most_rows),) = kinds.items()
        return library.function(f"step_{kind}", pointer, int64, *[pointer] * 3, int64), most_rows


def _maps(layer: Layer) -> tuple[tuple[Product, tuple[str, ...]], ...]:
    """A layer's products, and what their maps are called in C."""
    return (
        (layer.heads, ("query", "key", "value")),
        (layer.output, ("output",)),
        (layer.gate_up, ("gate", "up")),
        (layer.down, ("down",)),
    )


def _compiled(layer: Layer) -> bool:
    """True where decode.cpp knows the activation."""
    return isinstance(layer.activation, (*SILU, GELU))


def _rows_apart(x: Tensor) -> Tensor:
    """Each row in one piece, whatever lies between rows."""
    return x if x.stride(1) == 1 else x.contiguous()
