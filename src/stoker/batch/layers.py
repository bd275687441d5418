"""Which layer gives an example another output because of how the batch was split, or when it is run again.

The whole batch runs once, and what goes into and comes out of every module is kept. Then a part of it runs, and each is
held against its examples' rows of the whole. What differs is replaced by them, so that modules further on get right
inputs and every one that is found is at fault itself: a module for its output, and for what it computes between its
children.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stoker.batch import nest

__all__ = ["LOSS", "MODEL", "bypassed", "differing"]

MODEL = "the model"
"""The path of the outermost module, in words."""
LOSS = "the loss"
"""What calls it."""

Key = tuple[str, int, str]
"""A module's path, the number of its call, "in" or "out"."""


@torch.no_grad()
def differing(
    model: nn.Module,
    whole: Callable[[], object],
    parts: Sequence[tuple[Callable[[], object], Sequence[int]]],
    size: int,
    tolerance: float,
) -> list[str]:
    """Paths of modules whose output for an example isn't that in the whole batch, in the order of the forward.

    `whole()` runs the model on all `size` examples, each of `parts` on those at its places. `tolerance`: of the largest
    value of an output.
    """
    passed: dict[Key, dict[str, Tensor]] = {}

    def keep(key: Key, value: Any, _: str) -> None:
        # cloned: an in-place activation would change what is kept
        passed[key] = {place: leaf.detach().clone() for place, leaf in _tensors(value).items()}

    with _watched(model, keep):
        whole()
    found: list[str] = []
    for run, rows in parts:

        def compare(key: Key, value: Any, maker: str, rows: Sequence[int] = rows) -> Any:
            kept = passed.get(key, {})
            right: dict[str, Tensor] = {}
            for place, leaf in _tensors(value).items():
                expected = _rows(kept[place], leaf.shape, rows, size) if place in kept else None
                if expected is not None and _apart(leaf, expected, kept[place]) > tolerance:
                    right[place] = expected.clone()
            if not right:
                return None
            if maker not in found:
                found.append(maker)
            return _replaced(value, right)

        with _watched(model, compare):
            run()
    return found


@contextmanager
def bypassed(model: nn.Module, paths: Sequence[str]) -> Any:
    """The modules at those paths, but for the outermost, give their input back, where input and output are of one
    shape.
    """

    def through(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        same = bool(inputs) and isinstance(inputs[0], Tensor) and isinstance(output, Tensor)
        return inputs[0] * 1 if same and inputs[0].shape == output.shape else None

    inner = [path for path in paths if path not in (LOSS, MODEL)]
    hooks = [model.get_submodule(path).register_forward_hook(through) for path in inner]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _watched(model: nn.Module, see: Callable[[Key, Any, str], Any]) -> Any:
    """`see` gets what goes into and comes out of each module, and which module made it; it may return something
    else.
    """
    calls: Counter[str] = Counter()
    inside: list[str] = []

    def before(path: str) -> Callable[..., Any]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
            calls[path] += 1
            caller = inside[-1] if inside else LOSS
            inside.append(path)
            return see((path, calls[path], "in"), (args, kwargs), caller)

        return hook

    def after(path: str) -> Callable[..., Any]:
        def hook(_: nn.Module, args: Any, output: Any) -> Any:
            inside.pop()
            return see((path, calls[path], "out"), output, path)

        return hook

    hooks = []
    for name, module in model.named_modules():
        path = name or MODEL
        hooks.append(module.register_forward_pre_hook(before(path), with_kwargs=True))
        hooks.append(module.register_forward_hook(after(path)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(value: Any) -> dict[str, Tensor]:
    return {place: leaf for place, leaf in nest.leaves(value).items() if isinstance(leaf, Tensor) and leaf.ndim}


def _rows(whole: Tensor, shape: Sequence[int], rows: Sequence[int], size: int) -> Tensor | None:
    """What `shape` should hold for those examples; None where the output has no clear dim of examples.

    Other dims may be shorter, where a part is padded to its own longest.
    """
    if len(whole.shape) != len(shape):
        return None
    if list(whole.shape) == list(shape):
        return whole
    dims = [
        dim
        for dim, (all_, some) in enumerate(zip(whole.shape, shape, strict=True))
        if all_ % size == 0 and some * size == all_ * len(rows) and some != all_
    ]
    if not dims:
        return None
    dim, each = dims[0], whole.shape[dims[0]] // size  # several rows an example, where tokens were flattened
    places = [row * each + inner for row in rows for inner in range(each)]
    taken = whole.index_select(dim, torch.tensor(places, device=whole.device))
    if any(wanted > there for wanted, there in zip(shape, taken.shape, strict=True)):
        return None
    return taken[tuple(slice(0, wanted) for wanted in shape)]


def _apart(found: Tensor, expected: Tensor, whole: Tensor) -> float:
    """The largest difference, as a share of the output's largest value."""
    if not (found.is_floating_point() or found.is_complex()):
        return float(not torch.equal(found, expected))
    scale = float(whole.nan_to_num(0, 0, 0).abs().max()) if whole.numel() else 0.0
    gap = float((found.nan_to_num(0, 0, 0) - expected.nan_to_num(0, 0, 0)).abs().max()) if found.numel() else 0.0
    return gap / scale if scale else gap


def _replaced(value: Any, right: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor | tuple | list | dict):
        return nest.rebuild(value, nest.leaves(value) | right)
    return None  # an output of a kind of its own is compared only
