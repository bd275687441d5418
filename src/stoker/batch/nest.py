"""Batches as trainings make them: tensors, and dicts, lists, tuples and dataclasses of them.

Their examples lie along dim 0 of every tensor. Whatever else a batch may be, its target says how to take examples of
it.
"""

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch
from torch import Tensor

from stoker.errors import ConfigError

__all__ = ["cast", "examples", "in_dtype", "inexact", "leaves", "move", "rebuild", "shell", "take", "tensors"]

FIX = (
    "give the target `take=function`, where `function(batch, rows)` makes the batch of the examples at those places "
    "(stoker.batch.Target), and a `count` to accumulate by"
)


def leaves(batch: Any, path: str = "") -> dict[str, Any]:
    """Everything in a batch that is no container, by its path: `['labels']`, `[0]`, `.mask`; a lone tensor by
    ``""``.
    """
    inside = _inside(batch)
    if inside is None:
        return {path: batch}
    return {place: leaf for key, value in inside.items() for place, leaf in leaves(value, path + key).items()}


def tensors(batch: Any) -> list[Tensor]:
    """The tensors in a batch, also in an object that is none of the containers but has attributes."""
    found = list(leaves(batch).values())
    if len(found) == 1 and found[0] is batch and not isinstance(batch, Tensor) and hasattr(batch, "__dict__"):
        found = [leaf for value in vars(batch).values() for leaf in leaves(value).values()]
    return [leaf for leaf in found if isinstance(leaf, Tensor)]


def rebuild(batch: Any, new: Mapping[str, Any], path: str = "") -> Any:
    """A batch of the same containers with other leaves, by the paths of `leaves`."""
    inside = _inside(batch)
    if inside is None:
        return new[path]
    return _holding(batch, [rebuild(value, new, path + key) for key, value in inside.items()])


def shell(batch: Any) -> Any:
    """The same leaves in new containers: what a loss takes out of its batch (`batch.pop("labels")`) is there again for
    the next pass.
    """
    inside = _inside(batch)
    if inside is None:
        return copy.copy(batch) if isinstance(batch, MutableSequence) else batch  # a list of lengths, say
    return _holding(batch, [shell(value) for value in inside.values()])


def examples(batch: Any) -> int:
    """Examples in a batch: the length of dim 0, the same for all its tensors. ConfigError where there is no such
    length.
    """
    sizes = {path: leaf.shape[0] for path, leaf in leaves(batch).items() if isinstance(leaf, Tensor) and leaf.ndim > 0}
    if not sizes:
        raise ConfigError(f"a batch of type {type(batch).__name__} holds no tensor whose dim 0 counts examples: {FIX}")
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"batch{path} has {size}" for path, size in sizes.items())
        raise ConfigError(f"the tensors of a batch differ along dim 0, where examples should lie ({listed}): {FIX}")
    return next(iter(sizes.values()))


def take(batch: Any, rows: Sequence[int]) -> Any:
    """The batch of the examples at those places, with its padding as it was. ConfigError for what can't be taken apart.

    Tensors are indexed along dim 0, as are lists of one plain value an example; tensors without dims, numbers, words
    and None stay.
    """
    size = examples(batch)
    return rebuild(batch, {path: _taken(leaf, path, rows, size) for path, leaf in leaves(batch).items()})


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating tensors in another dtype, complex ones in the one of its precision; the others as
    they are.
    """

    def one(leaf: Any) -> Any:
        return in_dtype(leaf, dtype) if isinstance(leaf, Tensor) and inexact(leaf) else leaf

    return rebuild(batch, {path: one(leaf) for path, leaf in leaves(batch).items()})


def move(batch: Any, device: torch.device, *, pinned: bool) -> Any:
    """The batch with its tensors on the device, and by its own `to` whatever else has one.

    `pinned`: its tensors are in memory that the device can read by itself, so that the host needn't wait.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=pinned)
    if hasattr(batch, "to"):  # a container may have one too, and knows more of itself
        return batch.to(device)
    inside = _inside(batch)
    return batch if inside is None else _holding(batch, [move(one, device, pinned=pinned) for one in inside.values()])


def inexact(tensor: Tensor) -> bool:
    """Whether it holds numbers that are rounded: floating or complex ones."""
    return tensor.is_floating_point() or tensor.is_complex()


def in_dtype(tensor: Tensor, dtype: torch.dtype, *, copy: bool = False) -> Tensor:
    """A floating tensor in that dtype, a complex one in the complex dtype of its precision."""
    return tensor.to(dtype.to_complex() if tensor.is_complex() and not dtype.is_complex else dtype, copy=copy)


def _inside(batch: Any) -> dict[str, Any] | None:
    """What a container holds, by the text that reaches it in Python; None for what is none."""
    if isinstance(batch, Mapping):
        return {f"[{key!r}]": value for key, value in batch.items()}
    if isinstance(batch, tuple | list) and not _plain(batch):
        return {f"[{place}]": value for place, value in enumerate(batch)}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {f".{field.name}": getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return None


def _holding(batch: Any, values: list[Any]) -> Any:
    """The same container with those values in the order of `_inside`, and with whatever else it carries.

    Copied and filled where that can be: its type may not be one that is made from what it holds.
    """
    if isinstance(batch, tuple):
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if isinstance(batch, Mapping) and not isinstance(batch, MutableMapping):
        return type(batch)(dict(zip(batch, values, strict=True)))  # type: ignore[call-arg]
    made = copy.copy(batch)
    if isinstance(batch, Mapping):
        for key, value in zip(batch, values, strict=True):
            made[key] = value
    elif isinstance(batch, list):
        made[:] = values
    else:
        for field, value in zip(dataclasses.fields(batch), values, strict=True):
            object.__setattr__(made, field.name, value)  # a frozen one, too
    return made


def _plain(batch: Sequence[Any]) -> bool:
    """A list of lengths, say, is one leaf."""
    return isinstance(batch, list) and bool(batch) and all(isinstance(item, int | float | str) for item in batch)


def _taken(leaf: Any, path: str, rows: Sequence[int], size: int) -> Any:
    if isinstance(leaf, Tensor):
        return leaf[torch.as_tensor(rows, device=leaf.device)] if leaf.ndim else leaf
    if isinstance(leaf, list) and len(leaf) == size:
        return [leaf[row] for row in rows]
    if leaf is None or isinstance(leaf, int | float | str | bool):
        return leaf
    raise ConfigError(f"batch{path} is a {type(leaf).__name__}, which has no examples to take: {FIX}")
