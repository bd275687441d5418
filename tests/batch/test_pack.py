import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.batch.pack import pack, padded_tokens
from stoker.errors import ConfigError


def cost(lengths, rows):
    return len(rows) * max(lengths[row] for row in rows)


def test_peer_fault_22_eight_rows_of_seven_tokens_under_a_cap_of_eight():
    microbatches = pack([7] * 8, 8)
    assert len(microbatches) == 8
    assert max(cost([7] * 8, rows) for rows in microbatches) == 7


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(50, 400))
def test_peer_fault_22_the_budget_is_a_ceiling(lengths, ceiling):
    microbatches = pack(lengths, ceiling)
    assert sorted(row for rows in microbatches for row in rows) == list(range(len(lengths)))
    assert all(0 < cost(lengths, rows) <= ceiling for rows in microbatches)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 100))
def test_a_row_above_the_ceiling_stands_alone(lengths, ceiling):
    for rows in pack(lengths, ceiling, oversized="alone"):
        assert cost(lengths, rows) <= ceiling or len(rows) == 1


def fewest(lengths, ceiling):
    """By trying every partition."""

    def fill(rest, bins):
        if not rest:
            return len(bins)
        first, *rest = rest
        options = [fill(rest, [*bins, [first]])]
        for i, rows in enumerate(bins):
            if cost(lengths, [*rows, first]) <= ceiling:
                options.append(fill(rest, [*bins[:i], [*rows, first], *bins[i + 1 :]]))
        return min(options)

    return fill(list(range(len(lengths))), [])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(9, 30))
def test_no_packing_needs_fewer_microbatches(lengths, ceiling):
    assert len(pack(lengths, ceiling)) == fewest(lengths, ceiling)


def test_microbatches_are_balanced():
    # Greedily 10 rows of 10 tokens under 80 are 8 + 2; two are needed, so 5 + 5.
    assert [len(rows) for rows in pack([10] * 10, 80)] == [5, 5]


def test_long_and_short_rows_are_not_padded_to_each_other():
    lengths = [100, 5, 100, 5, 100, 5, 100, 5]
    assert pack(lengths, 400) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert padded_tokens(lengths, pack(lengths, 400)) == sum(lengths)


def test_too_long_a_row_is_named_with_the_setting_to_raise():
    with pytest.raises(
        ConfigError, match=r"2 of 3 rows .* of 10 tokens \(row 2 has 40\): raise update.tokens_per_micro"
    ):
        pack([20, 5, 40], 10)
    assert pack([20, 5, 40], 10, oversized="alone") == [[2], [0], [1]]


def test_nothing_and_empty_rows():
    assert pack([], 8) == []
    assert pack([0, 0, 0], 8) == [[0, 1, 2]]


def every_cut(lengths, ceiling):
    """All packings of the lengths in descending order that fit."""
    if not lengths:
        yield []
    for size in range(1, len(lengths) + 1):
        if size * lengths[0] <= ceiling:
            for rest in every_cut(lengths[size:], ceiling):
                yield [lengths[:size], *rest]


@given(st.lists(st.integers(1, 9), max_size=8), st.integers(9, 40), st.integers(0, 20))
def test_with_an_overhead_no_packing_in_order_of_length_costs_less(lengths, ceiling, overhead):
    found = pack(lengths, ceiling, overhead=overhead)
    least = min(
        len(cut) * overhead + sum(len(rows) * rows[0] for rows in cut)
        for cut in every_cut(sorted(lengths, reverse=True), ceiling)
    )

    assert sorted(row for rows in found for row in rows) == list(range(len(lengths)))
    assert all(cost(lengths, rows) <= ceiling for rows in found)
    assert len(found) * overhead + padded_tokens(lengths, found) == least


def test_an_overhead_decides_whether_a_cut_pays():
    # Together 4 x 10 tokens, apart 2 x 10 + 2 x 4: the cut saves 12.
    assert pack([10, 4, 10, 4], 100, overhead=11) == [[0, 2], [1, 3]]
    assert pack([10, 4, 10, 4], 100, overhead=13) == [[0, 2, 1, 3]]
    assert pack([10, 4, 10, 4], 30, overhead=13) == [[0, 2], [1, 3]]


def test_a_row_above_the_ceiling_stands_alone_with_an_overhead_too():
    assert pack([3, 50, 3], 10, oversized="alone", overhead=5) == [[1], [0, 2]]
