"""What a forward pass keeps for the backward pass, and which module keeps it."""

import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["SavedTensors", "bytes_of", "storages"]


class SavedTensors:
    """Counts, while open, the bytes of the tensors that autograd keeps, by the innermost of `modules` at work.

    A storage counts once, for the module that keeps it first, and in full even where a view of it is kept: that is
    what stays in memory. Storages of `given` tensors (weights, buffers, the batch) don't count. `count` gives what
    the graph still holds at that moment, so ask while the loss is alive.
    """

    def __init__(self, modules: Mapping[nn.Module, Hashable], given: Iterable[Tensor] = ()) -> None:
        """`modules`: each with the key that its bytes come under."""
        self._modules = modules
        self._working: list[Hashable] = []
        # The storages are held, so that no address is used twice.
        self._given: dict[int, torch.UntypedStorage] = {}
        self.give(given)
        self._kept: list[tuple[Hashable, weakref.ref[_Packed]]] = []
        self._hooks = saved_tensors_hooks(self._pack, lambda packed: packed.tensor)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Leave these out too, from now on."""
        self._given.update((part.data_ptr(), part) for tensor in tensors for part in storages(tensor))

    def count(self) -> dict[Hashable, int]:
        """Bytes by key; None is the key of what no module keeps (a loss function, say)."""
        found: dict[Hashable, int] = {}
        seen = set(self._given)
        for key, reference in self._kept:
            packed = reference()
            for part in storages(packed.tensor) if packed is not None else ():
                if part.data_ptr() not in seen:
                    seen.add(part.data_ptr())
                    found[key] = found.get(key, 0) + part.nbytes()
        return found

    def __enter__(self) -> "SavedTensors":
        for module in self._modules:
            self._handles += [
                module.register_forward_pre_hook(self._begin, prepend=True),
                module.register_forward_hook(self._end, always_call=True),
            ]
        self._hooks.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._hooks.__exit__(*failure)
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._working.append(self._modules[module])

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._working.pop()

    def _pack(self, tensor: Tensor) -> "_Packed":
        packed = _Packed(tensor)
        # Weakly: a branch of the graph that is dropped before the end keeps nothing.
        self._kept.append((self._working[-1] if self._working else None, weakref.ref(packed)))
        return packed


class _Packed:
    """A tensor as the graph holds it; gone when the graph lets go of it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        # An operator's own output would hold the graph that holds it.
        self.tensor = tensor.detach()


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory behind a tensor; several pieces where it is sparse or wraps others (DTensor, quantised)."""
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        for name in wrapper.__tensor_flatten__()[0]:
            yield from storages(getattr(wrapper, name))
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices().untyped_storage(), tensor._values().untyped_storage())
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
    else:  # compressed sparse
        rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        inner = (tensor.crow_indices(), tensor.col_indices()) if rows else (tensor.ccol_indices(), tensor.row_indices())
        yield from (part.untyped_storage() for part in (*inner, tensor.values()))


def bytes_of(tensor: Tensor) -> int:
    """Of its elements: no more than its storage where it is expanded; a sparse one's values and their places."""
    held = sum(part.nbytes() for part in storages(tensor))
    return min(tensor.numel() * tensor.element_size(), held) if tensor.layout is torch.strided else held
