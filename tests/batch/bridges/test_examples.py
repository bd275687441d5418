from dataclasses import dataclass

import numpy as np
import pytest
import torch

from stoker.batch.bridges.examples import extent, readable
from stoker.errors import DataError


@dataclass
class Row:
    ids: list[int]
    text: str


@pytest.mark.parametrize(
    ("example", "numbers"),
    [
        (torch.zeros(3, 4), 12),
        (np.zeros((2, 5)), 10),
        ({"input_ids": [1, 2, 3], "label": 0}, 4),
        ((torch.zeros(3), 1), 4),
        ([[1, 2], [3]], 3),
        ("word", 4),
        (Row([1, 2], "abc"), 5),
        (7, 1),
        ([], 0),
    ],
)
def test_extent_by_hand(example: object, numbers: int) -> None:
    assert extent(example) == numbers


def test_a_stream_is_refused() -> None:
    with pytest.raises(DataError, match="a generator can't be read by place"):
        readable(x for x in range(3))
    rows = [1, 2]
    assert readable(rows) is rows
