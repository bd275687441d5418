from collections import defaultdict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from stoker.batch import nest
from stoker.errors import ConfigError

Pair = namedtuple("Pair", "x y")


@dataclass
class Record:
    x: Tensor
    name: str


@dataclass(frozen=True, slots=True)
class Derived:
    x: Tensor
    mask: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask", self.x > 0)


class Named(list[Tensor]):
    def __init__(self, name: str, values: list[Tensor]) -> None:
        super().__init__(values)
        self.name = name


class Own:
    """A batch that moves itself."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> "Own":
        return Own(self.x.to(device))


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
        (Derived(X), lambda b: b.x),
        (Named("a", [X]), lambda b: b[0]),
        (BatchEncoding({"input_ids": X}), lambda b: b["input_ids"]),
        (BaseModelOutput(last_hidden_state=X), lambda b: b.last_hidden_state),
        (defaultdict(list, x=X), lambda b: b["x"]),
        (MappingProxyType({"x": X}), lambda b: b["x"]),
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


META = torch.device("meta")


@pytest.mark.parametrize("pinned", [False, True])
def test_a_batch_is_moved_whatever_holds_its_tensors(pinned: bool) -> None:
    batch = {"x": [X, (X, "word")], "y": Pair(X, 7), "record": Record(X, "a"), "own": [Own(X)], "lengths": [3, 1]}
    moved = nest.move(batch, META, pinned=pinned)
    tensors = [moved["x"][0], moved["x"][1][0], moved["y"].x, moved["record"].x, moved["own"][0].x]
    assert {tensor.device for tensor in tensors} == {META}
    assert (moved["x"][1][1], moved["y"].y, moved["record"].name, moved["lengths"]) == ("word", 7, "a", [3, 1])


@pytest.mark.parametrize(
    "batch",
    [defaultdict(list, x=X), BatchEncoding({"x": X}), MappingProxyType({"x": X})],
    ids=lambda b: type(b).__name__,
)
def test_a_moved_mapping_is_of_its_own_kind(batch: Mapping[str, Tensor]) -> None:
    moved = nest.move(batch, META, pinned=False)
    assert (type(moved), moved["x"].device) == (type(batch), META)


def test_a_container_keeps_what_it_carries_besides() -> None:
    named = nest.move(Named("a", [X]), META, pinned=False)
    assert (type(named), named.name, named[0].device) == (Named, "a", META)
    derived = nest.move(Derived(X), META, pinned=False)
    assert (derived.x.device, derived.mask.device) == (META, META)
    packed = nest.move(pack_sequence([X[0], X[1]]), torch.device("cpu"), pinned=False)
    assert isinstance(packed, PackedSequence)


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
    inner = ({"x": X}, [3, 1, 2, 3], Pair({"y": Y}, None), Record(X, "a"))
    made = nest.shell(inner)
    made[0].pop("x")
    made[1].clear()
    made[2].x.pop("y")
    made[3].x = None
    assert inner[0]["x"] is X and inner[1] == [3, 1, 2, 3] and inner[2].x["y"] is Y and inner[3].x is X


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
