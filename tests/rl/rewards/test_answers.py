import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.rl.rewards.answers import DEFAULT_FORMS, FORMS, candidates, clean, extract

EXTRACTED = [
    # boxed
    (r"So we get \boxed{42}.", "42"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\frac{\sqrt{3}}{2}} and done", r"\frac{\sqrt{3}}{2}"),
    (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}"),
    (r"\fbox{7}", "7"),
    (r"$\boxed{ -3 }$", "-3"),
    (r"\boxed{1,234}", "1,234"),
    (r"\boxed{1{,}234}", "1,234"),
    (r"\boxed{1\,234}", "1,234"),
    (r"\boxed{5 \text{ cm}}", "5 cm"),
    (r"\boxed{\text{Tuesday}}", "Tuesday"),
    (r"\boxed{\textbf{(B)}}", "(B)"),
    (r"\boxed{x = 5}", "x = 5"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\left(1, 2\right)}", "(1, 2 )"),
    (r"\boxed{1, 2, 3}", "1, 2, 3"),
    (r"\boxed {9}", "9"),
    (r"\boxed 42", "42"),
    (r"\boxed{\boxed{8}}", "8"),
    (r"\boxed{1} no, wait: \boxed{2}", "2"),
    (r"\boxed{1} and then \boxed{2 unclosed", "1"),
    (r"\boxed{\$18}", "$18"),
    (r"\boxed{50\%}", "50%"),
    (r"\boxed{−7}", "-7"),
    (r"} stray } braces { \boxed{6}", "6"),
    (r"\boxed{42.}", "42"),
    (r"\boxed{$42$}", "42"),
    (r"\boxed{\mathrm{no\ solution}}", "no solution"),
    # hash
    ("He pays 3 * 14 = 42.\n#### 42", "42"),
    ("#### $1,200", "$1,200"),
    ("#### -5\n", "-5"),
    ("####42", "42"),
    ("  #### 3.50 ", "3.50"),
    ("#### 18 dollars", "18 dollars"),
    ("#### Step 2\n\\boxed{3}", "3"),
    ("\\boxed{3}\n#### Step 2: check", "3"),
    ("#### 1\n#### 2", "2"),
    # tag
    ("<answer>42</answer>", "42"),
    ("<ANSWER> 42 </ANSWER>", "42"),
    ("<think>maybe 41</think><answer>42</answer>", "42"),
    ("<answer>41</answer> no <answer>42</answer>", "42"),
    ("<answer>42", "42"),
    (r"<answer>\boxed{42}</answer>", "42"),
    ("<answer>\n42\n</answer>", "42"),
    (r"<answer>$\frac{3}{4}$</answer>", r"\frac{3}{4}"),
    # phrase
    ("Answer: 42", "42"),
    ("answer = 42", "42"),
    ("The answer is 42.", "42"),
    ("The answer is: 42", "42"),
    ("The final answer is 3.14.", "3.14"),
    ("The answer to the question is 17, as shown\nabove", "17, as shown"),
    ("**Answer:** 42", "42"),
    ("**Answer**: 42", "42"),
    ("The answer is **42**.", "42"),
    ("Final Answer: $42$", "42"),
    ("Final answer:\n\n42\n", "42"),
    ("The answer is:\n$$\\frac{7}{8}$$", r"\frac{7}{8}"),
    ("The answer is $1,234.50. That is all.", "$1,234.50"),
    ("The answer is (C)", "(C)"),
    ("The answer is Paris.", "Paris"),
    ("ANSWER: yes!", "yes"),
    ("The answer is \\(x+1\\).", "x+1"),
    ("The answer is -4", "-4"),
    ("The answer is 3. No: the answer is 4.", "4"),
    ("The answer is 3/4", "3/4"),
    ("The answer is 1.5e-3.", "1.5e-3"),
    # across forms the last one counts
    ("#### 1\n<answer>2</answer>\n\\boxed{3}\nAnswer: 4", "4"),
    ("Answer: 1\n\\boxed{2}", "2"),
    (r"\boxed{2}. The answer is correct.", "2"),
    (r"The answer is \boxed{42}.", "42"),
    (r"<think>\boxed{1}</think> I say \boxed{2}", "2"),
]

NOTHING = [
    "",
    "   ",
    "42",
    "I think it is 42",
    r"\boxed{}",
    r"\boxed{   }",
    r"\boxed{42",
    r"boxed{42}",
    "<answer></answer>",
    "<answer>",
    "</answer>42",
    "#### ",
    "#### Conclusion",
    "##### 42",
    "Answer:",
    "The answer is",
    "The answer is correct",
    "an answerable question: 42",
    r"<think>\boxed{42}</think>",
]


@pytest.mark.parametrize(("text", "answer"), EXTRACTED)
def test_extracts_the_final_answer(text: str, answer: str) -> None:
    found = extract(text)
    assert found is not None
    assert found.text == answer


@pytest.mark.parametrize("text", NOTHING)
def test_finds_no_answer_where_there_is_none(text: str) -> None:
    assert extract(text) is None


def test_the_trailing_number_is_opt_in_and_last_resort() -> None:
    forms = (*DEFAULT_FORMS, "last_number")
    for text, answer in [
        ("3 apples and 4 pears make 7 fruits", "7"),
        ("about $1,234.50 in all", "$1,234.50"),
        ("down to −5 degrees", "-5"),
        ("that is 50% off", "50%"),
        ("half: 1/2", "1/2"),
    ]:
        assert extract(text) is None
        found = extract(text, forms)
        assert found is not None and found.text == answer, text
    boxed_first = extract(r"\boxed{7}, found in 3 steps", forms)
    assert boxed_first is not None and boxed_first.text == "7"


def test_only_the_chosen_forms_count() -> None:
    text = "\\boxed{1}\n#### 2"
    assert [extract(text, (form,)).text for form in ("boxed", "hash")] == ["1", "2"]  # type: ignore[union-attr]
    assert extract(text, ("tag",)) is None


@pytest.mark.parametrize("text", ["The answer is 4", "#### 4", "<answer>4", r"\boxed{4"])
def test_an_answer_that_runs_into_the_cut_does_not_count(text: str) -> None:
    assert extract(text, truncated=True) is None


def test_a_complete_answer_of_a_truncated_text_counts() -> None:
    found = extract(r"\boxed{4} and so on and", truncated=True)
    assert found is not None and found.text == "4"


def test_failure_38_catastrophic_text_takes_no_time() -> None:
    hostile = [
        "\\boxed{" * 20_000,
        "{" * 100_000 + "}" * 100_000,
        "answer" * 20_000,
        "answer to " * 12_000,
        "answer: " * 15_000,
        "answer" + " " * 200_000,
        "####" * 30_000,
        "<answer>" * 15_000,
        "$" * 100_000,
        "<answer>" + "$" * 90_000 + "</answer>",
        "<answer>" + "\\text{" * 15_000 + "}" * 15_000 + "</answer>",
        "1," * 60_000,
        "9" * 200_000,
    ]
    start = time.monotonic()
    for text in hostile:
        extract(text, tuple(FORMS))
    assert time.monotonic() - start < 10  # quadratic work on any of them takes minutes


def test_only_the_end_of_a_very_long_text_is_read() -> None:
    found = extract(r"\boxed{1}" + "x" * 200_000 + r"\boxed{2}")
    assert found is not None and found.text == "2"
    assert extract(r"\boxed{1}" + "x" * 200_000) is None


@given(st.text(alphabet="\\boxed{}<answer>/#$ 0123456789.,\nisx:", max_size=200))
def test_any_text_gives_cleaned_answers_inside_it(text: str) -> None:
    for candidate in candidates(text, tuple(FORMS)):
        assert 0 <= candidate.start <= candidate.end <= len(text)
    found = extract(text, tuple(FORMS))
    if found is not None:
        assert found.text == clean(found.text) != ""
