"""`stoker eval`'s table."""

from stoker.evaluating import table


def test_the_table_says_what_was_drawn_and_what_stands_behind_the_sign() -> None:
    metrics = {
        "accuracy": 0.5,
        "accuracy_error": 0.1,
        "reward": 0.25,
        "reward_error": 0.2,
        "tokens": 3.5,
        "prompts": 25.0,
    }
    assert table({"holdout": metrics}, 1).splitlines() == [
        "holdout: 25 prompts, a greedy answer each (+- is the standard error over prompts)",
        "  accuracy       0.5000 +- 0.1000",
        "  reward         0.2500 +- 0.2000",
        "  tokens         3.5000",
    ]
    assert "25 prompts, 4 samples each" in table({"holdout": metrics}, 4)
