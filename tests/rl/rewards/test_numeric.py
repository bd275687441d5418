from fractions import Fraction

import pytest

from stoker.rl.rewards.numeric import parse, same

READ = [
    ("42", Fraction(42)),
    ("-3", Fraction(-3)),
    ("- 3", Fraction(-3)),
    ("+3", Fraction(3)),
    ("007", Fraction(7)),
    ("1,234,567", Fraction(1234567)),
    ("1 234 567", Fraction(1234567)),
    (".5", Fraction(1, 2)),
    ("5.", Fraction(5)),
    ("3.140", Fraction(157, 50)),
    ("1.2e5", Fraction(120000)),
    ("1E-2", Fraction(1, 100)),
    (r"1.2 \times 10^{5}", Fraction(120000)),
    (r"1.2\times10^5", Fraction(120000)),
    (r"3 \cdot 10^{-2}", Fraction(3, 100)),
    ("2*10^3", Fraction(2000)),
    ("3/4", Fraction(3, 4)),
    ("-3/4", Fraction(-3, 4)),
    (r"\frac{3}{4}", Fraction(3, 4)),
    (r"-\frac{3}{4}", Fraction(-3, 4)),
    (r"\frac34", Fraction(3, 4)),
    (r"\frac{-3}{4}", Fraction(-3, 4)),
    ("1 1/2", Fraction(3, 2)),
    (r"1\frac{1}{2}", Fraction(3, 2)),
    ("-1 1/2", Fraction(-3, 2)),
    ("$18", Fraction(18)),
    ("-$18.50", Fraction(-37, 2)),
    ("$-18.50", Fraction(-37, 2)),
    ("€1,000", Fraction(1000)),
    ("50%", Fraction(50)),
    ("18 dollars", Fraction(18)),
    ("18 red apples per day", Fraction(18)),
    ("5 cm", Fraction(5)),
    ("5cm", Fraction(5)),
    ("5 cm^2", Fraction(5)),
    ("10 km/h", Fraction(10)),
    (r"90^\circ", Fraction(90)),
    ("90°", Fraction(90)),
    ("(7)", Fraction(7)),
]
NOT_NUMBERS = [
    "",
    "x",
    "5x",
    "5 x",
    "3i",
    "2 + 3",
    "3 or 4",
    "1, 2",
    "3,14",
    "1,23,456",
    "--3",
    "1/0",
    r"\frac{1}{0}",
    r"2\pi",
    r"\sqrt{2}",
    "1e999999",
    "9" * 5000,
    "18 and 19",
    "18 not 19",
    "5!",
    "3:1",
    "$5 euros",
]


@pytest.mark.parametrize(("text", "value"), READ)
def test_reads_numbers(text: str, value: Fraction) -> None:
    number = parse(text)
    assert number is not None
    assert number.value == value


@pytest.mark.parametrize("text", NOT_NUMBERS)
def test_does_not_read_what_is_no_number(text: str) -> None:
    assert parse(text) is None


@pytest.mark.parametrize(
    ("reference", "answer", "equal"),
    [
        ("42", "42.0", True),
        ("42", "43", False),
        ("1/3", "0.3333333", True),
        ("1/3", "0.33", False),
        ("0.1", "1/10", True),
        ("1000000", "1000001", False),
        ("12345678", "12345679", False),
        ("12345678", "12345679.0", False),
        ("1/3", "33333333/100000000", False),
        ("18", "$18.00", True),
        ("18 dollars", "$18", True),
        ("5 cm", "5", True),
        ("5", "5 cm", True),
        ("5 cm", "5 centimeters", True),
        ("5 cm", "5 m", False),
        ("50%", "50", True),
        ("50%", "0.5", True),
        ("0.5", "50%", True),
        ("50%", "5", False),
        ("50%", "50%", True),
        ("50%", "0.5%", False),
        ("0", "-0", True),
        ("5", "-5", False),
    ],
)
def test_compares_numbers(reference: str, answer: str, equal: bool) -> None:
    a, b = parse(reference), parse(answer)
    assert a is not None and b is not None
    assert same(a, b) is equal


def test_the_tolerance_is_the_callers() -> None:
    a, b = parse("10/3"), parse("3.33")
    assert a is not None and b is not None
    assert not same(a, b)
    assert same(a, b, tolerance=0.01)
