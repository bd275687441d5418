"""The order of training prompts: epochs, weights, and exact resume."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import CheckpointError, DataError
from stoker.rl.tasks import PromptStream
from stoker.rl.types import Prompt


def stream(
    sizes: dict[str, int], weights: dict[str, float] | None = None, *, seed: int = 0, shuffle: bool = True
) -> PromptStream:
    prompts = {name: [Prompt(f"{name}:{i}", (i,), "", None) for i in range(n)] for name, n in sizes.items()}
    return PromptStream(prompts, weights or dict.fromkeys(sizes, 1.0), seed=seed, shuffle=shuffle)


def ids(found: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in found]


def test_each_epoch_holds_every_row_once_in_another_order() -> None:
    s = stream({"a": 10})
    first, second = ids(s.take(10)), ids(s.take(10))
    assert sorted(first) == sorted(second) == sorted(f"a:{i}" for i in range(10))
    assert first != second
    assert s.epochs == 2.0


def test_without_shuffle_rows_come_in_order() -> None:
    assert ids(stream({"a": 3}, shuffle=False).take(3)) == ["a:0", "a:1", "a:2"]


def test_the_seed_sets_the_order() -> None:
    assert ids(stream({"a": 20}).take(20)) == ids(stream({"a": 20}).take(20))
    assert ids(stream({"a": 20}).take(20)) != ids(stream({"a": 20}, seed=1).take(20))


def test_weights_set_the_shares_at_every_point() -> None:
    s = stream({"a": 100, "b": 100, "c": 100}, {"a": 5, "b": 3, "c": 2})
    seen: Counter[str] = Counter()
    for step in range(1, 60):
        seen.update(prompt.id[0] for prompt in s.take(4))
        for name, share in (("a", 0.5), ("b", 0.3), ("c", 0.2)):
            assert abs(seen[name] - share * 4 * step) < 2


def test_more_prompts_than_rows_are_refused() -> None:
    with pytest.raises(DataError, match="5 different prompts asked for, the task has 4"):
        stream({"a": 4}).take(5)


sizes = st.dictionaries(st.sampled_from("abc"), st.integers(1, 7), min_size=1)


@settings(max_examples=60, deadline=None)
@given(
    sizes=sizes,
    takes=st.lists(st.integers(1, 7), min_size=1, max_size=12),
    cut=st.integers(0, 12),
    seed=st.integers(0, 3),
)
def test_peer_fault_21_resume_anywhere_gives_the_same_prompts(
    sizes: dict[str, int], takes: list[int], cut: int, seed: int
) -> None:
    takes = [min(n, sum(sizes.values())) for n in takes]
    whole = stream(sizes, seed=seed)
    expected = [ids(whole.take(n)) for n in takes]
    cut = min(cut, len(takes))
    before = stream(sizes, seed=seed)
    got = [ids(before.take(n)) for n in takes[:cut]]
    saved = json.loads(json.dumps(before.state()))
    after = stream(sizes, seed=seed)
    after.take(1)  # a used stream is put back too
    after.restore(saved)
    got += [ids(after.take(n)) for n in takes[cut:]]
    assert got == expected
    assert after.state() == whole.state()


def test_peer_fault_21_resume_at_the_end_of_an_epoch_goes_on() -> None:
    whole = stream({"a": 6})
    whole.take(6)
    rest = [ids(whole.take(3)) for _ in range(4)]
    resumed = stream({"a": 6})
    resumed.take(6)
    again = stream({"a": 6})
    again.restore(resumed.state())
    assert [ids(again.take(3)) for _ in range(4)] == rest


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 9), takes=st.lists(st.integers(1, 9), min_size=1, max_size=30), seed=st.integers(0, 3))
def test_no_step_holds_a_prompt_twice_and_no_row_falls_behind(rows: int, takes: list[int], seed: int) -> None:
    s = stream({"a": rows}, seed=seed)
    seen = Counter({f"a:{i}": 0 for i in range(rows)})
    for n in takes:
        found = ids(s.take(min(n, rows)))
        assert len(set(found)) == len(found)
        seen.update(found)
        assert max(seen.values()) - min(seen.values()) <= 2
        assert len(s.state()["a"]["waiting"]) <= rows


def test_restore_refuses_other_rows_and_other_sources() -> None:
    saved = stream({"a": 5}).state()
    with pytest.raises(CheckpointError, match="'a' no longer has the rows"):
        stream({"a": 6}).restore(saved)
    with pytest.raises(CheckpointError, match="task sources are a, the run's b"):
        stream({"b": 5}).restore(saved)


def test_the_longest_prompt_of_all_sources() -> None:
    lengths = {"a": [3, 7, 1], "b": [5]}
    prompts = {
        name: [Prompt(f"{name}:{place}", (0,) * length, "", None) for place, length in enumerate(found)]
        for name, found in lengths.items()
    }
    assert PromptStream(prompts, {"a": 1.0, "b": 1.0}, seed=0).longest == 7
