"""What a loss may be the mean of: every way of counting a batch that its own tensors suggest."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stoker.batch import nest

__all__ = ["IGNORED", "Unit", "units"]

IGNORED = -100
"""The label that PyTorch's cross-entropy leaves out."""


@dataclass(frozen=True)
class Unit:
    """One way to count."""

    name: str
    code: str
    """As a function of `batch`, to give as `count`."""
    count: Callable[[Any], float]


def units(batch: Any) -> list[Unit]:
    """Of tensors with a dim beside the examples': labels that aren't ignored, values that aren't padding, weights, and
    all of them; with and without the first place, which a causal loss never predicts. Of vectors: lengths.
    """
    found = [unit for path, leaf in nest.leaves(batch).items() if isinstance(leaf, Tensor) for unit in _of(path, leaf)]
    return sorted(found, key=lambda unit: str(IGNORED) not in unit.code)  # who ignores labels means the others to count


def _of(path: str, leaf: Tensor) -> Iterator[Unit]:
    if leaf.ndim == 1 and leaf.dtype in (torch.int64, torch.int32):
        yield _unit(path, "", "the lengths in {}", "{}.sum()", lambda t: t.sum())
        yield _unit(path, "", "the lengths in {} less one", "({} - 1).sum()", lambda t: (t - 1).sum())
    if leaf.ndim not in (1, 2) or (leaf.ndim == 1 and not leaf.is_floating_point()):
        return
    for columns, where in (("", ""),) if leaf.ndim == 1 else (("", ""), ("[:, 1:]", " after the first place")):
        for name, code, count in _counts(leaf):
            yield _unit(path, columns, name + where, code, count)


def _counts(leaf: Tensor) -> Iterator[tuple[str, str, Callable[[Tensor], Tensor]]]:
    if leaf.dtype == torch.bool:
        yield "true values of {}", "{}.sum()", lambda t: t.sum()
        yield "false values of {}", "(~{}).sum()", lambda t: (~t).sum()
        return
    if leaf.is_floating_point():
        yield "the weights in {}", "{}.sum()", lambda t: t.sum()
        yield "values of {} that aren't 0", "({} != 0).sum()", lambda t: (t != 0).sum()
        return
    padding, times = Counter(leaf[:, -1].tolist() if leaf.shape[1] else [0]).most_common(1)[0]
    likely = [padding] if 2 * times >= len(leaf) > 1 < times else []  # what at least half of the texts end with
    for ignored in dict.fromkeys((IGNORED, 0, *likely)):
        if bool((leaf == ignored).any()):
            what = "labels" if ignored == IGNORED else "values"
            yield (
                f"{what} of {{}} that aren't {ignored}",
                f"({{}} != {ignored}).sum()",
                partial(_others, ignored),
            )


def _others(ignored: int, tensor: Tensor) -> Tensor:
    return (tensor != ignored).sum()


def _unit(path: str, columns: str, name: str, code: str, count: Callable[[Tensor], Tensor]) -> Unit:
    reach = f"batch{path}{columns}"

    def counted(batch: Any) -> float:
        tensor = nest.leaves(batch)[path]
        return float(count(tensor[:, 1:] if columns else tensor))

    return Unit(name.format(f"batch{path}"), f"lambda batch: {code.format(reach)}", counted)
