"""Tables in text."""

from stoker.batch.table import as_table


def test_columns_are_right_aligned_and_those_without_a_cell_left_out() -> None:
    assert as_table([("size", ["8", "16"]), ("unknown", ["", ""]), ("s", ["0.25", ""])]) == [
        "size     s",
        "   8  0.25",
        "  16      ",
    ]
