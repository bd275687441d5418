from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding

from stoker.batch import nest
from stoker.errors import ConfigError

Pair = namedtuple("Pair", "x y")


@dataclass
class Record:
    x: Tensor
    name: str


X = torch.arange(12.0).reshape(4, 3)
Y = torch.arange(4)


@pytest.mark.parametrize(
    ("batch", "reach"),
    [
        (X, lambda b: b),
        ((X, Y), lambda b: b[0]),
        ([X, Y], lambda b: b[0]),
        ({"x": X, "deep": {"y": (Y,)}, "scale": 2.0, "none": None}, lambda b: b["x"]),
        (Pair(X, Y), lambda b: b.x),
        (Record(X, "a"), lambda b: b.x),
        (BatchEncoding({"input_ids": X}), lambda b: b["input_ids"]),
    ],
)
def test_examples_are_taken_along_dim_0_of_whatever_holds_tensors(batch: Any, reach: Any) -> None:
    assert nest.examples(batch) == 4
    taken = nest.take(batch, [2, 0])
    assert type(taken) is type(batch)
    assert torch.equal(reach(taken), X[[2, 0]])
    assert nest.examples(taken) == 2


def test_paths_are_python() -> None:
    batch = {"x": X, "deep": Record(Y, "a")}
    assert list(nest.leaves(batch)) == ["['x']", "['deep'].x", "['deep'].name"]


def test_lists_of_one_value_an_example_are_cut_too() -> None:
    taken = nest.take({"x": X, "length": [3, 1, 2, 3], "step": 7, "t": torch.tensor(1.0)}, [1, 3])
    assert (taken["length"], taken["step"], taken["t"].item()) == ([1, 3], 7, 1.0)


def test_floats_are_cast_and_whole_numbers_stay() -> None:
    cast = nest.cast((X, Y, "a"), torch.float64)
    assert (cast[0].dtype, cast[1].dtype, cast[2]) == (torch.float64, torch.int64, "a")


def test_what_can_not_be_cut_names_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"batch\['x'\] has 4, batch\['y'\] has 3.*give the target `take=function`"):
        nest.examples({"x": X, "y": Y[:3]})
    with pytest.raises(ConfigError, match=r"type str holds no tensor.*take=function"):
        nest.examples("text")
    with pytest.raises(ConfigError, match=r"batch\['odd'\] is a object, which has no examples to take"):
        nest.take({"x": X, "odd": object()}, [0])


def test_what_a_loss_takes_out_of_a_shell_stays_in_the_batch() -> None:
    """`batch.pop("labels")` in a loss, as a label smoother does: the second pass had none."""
    batches: list[Any] = [
        {"x": torch.ones(2), "labels": torch.ones(2)},
        BatchEncoding({"x": torch.ones(2), "labels": torch.ones(2)}),
    ]
    for batch in batches:
        made = nest.shell(batch)
        assert type(made) is type(batch)
        made.pop("labels")
        assert made["x"] is batch["x"]
        assert "labels" in batch
    inner = nest.shell(({"x": 1}, ["a"], None))
    assert inner == ({"x": 1}, ["a"], None)
    pair = namedtuple("pair", "x y")(torch.ones(1), None)
    assert nest.shell(pair) is pair


def test_tensors_are_found_in_every_kind_of_batch() -> None:
    """A fit listed none of a BatchEncoding's or a dataclass's, and checked none."""

    @dataclass
    class Rows:
        x: Tensor

    class Plain:
        def __init__(self) -> None:
            self.x, self.names = {"inner": torch.ones(2)}, ["a", "b"]

    one = torch.ones(2)
    for batch in (one, {"x": one}, BatchEncoding({"x": one}), Rows(one), [(one, None), "word"], Plain()):
        assert [tuple(tensor.shape) for tensor in nest.tensors(batch)] == [(2,)]
    assert nest.tensors("word") == []


def test_complex_numbers_are_cast_to_the_same_precision() -> None:
    batch = {"x": torch.ones(2, dtype=torch.complex64), "y": torch.ones(2, dtype=torch.long)}
    made = nest.cast(batch, torch.float64)
    assert (made["x"].dtype, made["y"].dtype) == (torch.complex128, torch.long)
