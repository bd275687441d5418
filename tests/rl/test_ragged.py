import numpy as np
import pytest

from stoker.rl import ragged

ROWS = [np.array([1.0, 2.0, 3.0], np.float32), np.array([], np.float32), np.array([4.0], np.float32)]


def test_rows_end_to_end_and_back():
    flat, counts = ragged.joined(ROWS, np.float32), ragged.lengths(ROWS)

    assert flat.tolist() == [1, 2, 3, 4]
    assert counts.tolist() == [3, 0, 1]
    assert ragged.places(counts).tolist() == [0, 1, 2, 0]
    assert [row.tolist() for row in ragged.split(flat, counts)] == [[1, 2, 3], [], [4]]


def test_sums_leave_out_empty_rows_wherever_they_stand():
    assert ragged.sums(ragged.joined(ROWS, np.float32), ragged.lengths(ROWS)).tolist() == [6, 0, 4]
    assert ragged.sums(np.array([5.0, 1.0]), np.array([0, 0, 2, 0])).tolist() == [0, 0, 6, 0]
    assert ragged.sums(np.array([True, True, False]), np.array([1, 2])).tolist() == [1, 1]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 127, 129, 5000, 20000])
def test_a_row_sums_to_the_same_bits_alone_and_among_others(length):
    rng = np.random.default_rng(length)
    rows = [rng.normal(size=n).astype(np.float32) for n in (3, length, 5)]

    found = ragged.sums(ragged.joined(rows, np.float32), ragged.lengths(rows))

    assert found.tolist() == [row.sum(dtype=np.float64) for row in rows]


def test_no_rows_at_all():
    counts = ragged.lengths([])

    assert ragged.joined([], np.bool_).dtype == np.bool_
    assert ragged.places(counts).tolist() == []
    assert ragged.split(np.empty(0), counts) == []
    assert ragged.sums(np.empty(0), counts).tolist() == []
