import pytest

from stoker.batch.longest import LongestExamples
from stoker.errors import DataError


def test_peer_fault_25_a_late_long_sample_is_in_every_batch() -> None:
    rows = [[0] * 3] * 1000 + [[1] * 500]  # the long one comes last
    batches = LongestExamples(rows, lambda picked: [len(row) for row in picked])
    assert batches.longest == 500
    assert batches(1) == [500]
    assert batches(4) == [500, 3, 3, 3]
    assert batches.most == 1001


def test_length_is_whatever_is_asked_for() -> None:
    rows = [{"ids": [1]}, {"ids": [1, 2]}]
    assert LongestExamples(rows, lambda picked: picked, length=lambda row: len(row["ids"]))(1) == [rows[1]]


def test_peer_fault_25_a_batch_larger_than_the_data_set_is_refused() -> None:
    with pytest.raises(DataError, match="larger than the data set, which has 2"):
        LongestExamples(["a", "b"], list)(3)
    with pytest.raises(DataError, match="no examples"):
        LongestExamples([], list)
