"""A batch sampler whose batch changes: every example once an epoch, and resumes anywhere, with workers too."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from stoker.batch.changing import ChangingBatches, Granularity, Last
from stoker.batch.stages import Progress, Stages
from stoker.errors import CheckpointError, ConfigError, RunError
from tests.batch.places import Places

T = TypeVar("T")


@st.composite
def stages(draw: st.DrawFn, ranks: int = 1) -> Stages:
    by = draw(st.sampled_from(["epoch", "step", "samples"]))
    starts = (0, *sorted(draw(st.sets(st.integers(1, 40), max_size=4))))
    sizes = tuple(ranks * draw(st.integers(1, 9)) for _ in starts)
    return Stages(sizes, starts, by)


def flat(lists: Iterable[list[T]]) -> list[T]:
    return list(chain.from_iterable(lists))


def epochs(batches: ChangingBatches, count: int) -> list[list[list[int]]]:
    return [list(batches.through(batches)) for _ in range(count)]


def endless(batches: ChangingBatches) -> Iterator[list[int]]:
    while True:
        yield from batches.through(batches)


GRANULARITIES = st.sampled_from(["epoch", "step"])


@given(st.data(), st.integers(1, 50), GRANULARITIES, st.integers(0, 3), st.booleans())
def test_every_example_once_an_epoch(
    data: st.DataObject, examples: int, granularity: Granularity, seed: int, shuffle: bool
) -> None:
    batches = ChangingBatches(examples, data.draw(stages()), granularity=granularity, seed=seed, shuffle=shuffle)
    for epoch in range(3):
        assert batches.epoch == epoch
        expected = list(batches.sizes())
        assert len(batches) == len(expected)
        made = list(batches.through(batches))
        assert list(map(len, made)) == expected
        assert sorted(flat(made)) == list(range(examples))
    assert (batches.epoch, batches.samples) == (3, 3 * examples)


@given(st.data(), st.integers(1, 60), GRANULARITIES)
def test_batches_have_the_sizes_asked_for_at_their_progress(
    data: st.DataObject, examples: int, granularity: Granularity
) -> None:
    schedule = data.draw(stages())
    batches = ChangingBatches(examples, schedule, granularity=granularity)
    step = samples = 0
    for epoch in range(3):
        size = schedule(Progress(epoch, step, samples))
        left = examples
        for indices in batches.through(batches):
            if granularity == "step":
                size = schedule(Progress(epoch, step, samples))
            assert len(indices) == batches.handed == min(size, left)
            left, step, samples = left - len(indices), step + 1, samples + len(indices)
            assert (batches.progress.step, batches.samples) == (step, samples)


@given(st.data(), st.integers(1, 4), st.sampled_from(["keep", "repeat", "drop"]), GRANULARITIES)
def test_ranks_share_each_batch(data: st.DataObject, ranks: int, last: Last, granularity: Granularity) -> None:
    each = data.draw(st.integers(10, 20))
    examples = each * ranks if last == "keep" else data.draw(st.integers(9 * ranks, 60))
    schedule = data.draw(stages(ranks))
    made = [
        epochs(ChangingBatches(examples, schedule, granularity=granularity, last=last, rank=rank, ranks=ranks), 2)
        for rank in range(ranks)
    ]
    whole = epochs(ChangingBatches(examples, schedule, granularity=granularity, last=last), 2)
    for epoch in range(2):
        of_ranks = [one[epoch] for one in made]
        assert len({tuple(map(len, one)) for one in of_ranks}) == 1, "ranks hold unequally many"
        assert {len(one) for one in of_ranks} == {len(of_ranks[0])}
        counts = Counter(index for one in of_ranks for indices in one for index in indices)
        assert set(counts) <= set(range(examples))
        total = sum(counts.values())
        if last == "drop":
            assert max(counts.values()) == 1
        else:
            assert set(counts) == set(range(examples))
            assert total == (examples if last == "keep" else examples + -examples % ranks)
        if last != "repeat" and (epoch == 0 or last == "keep"):  # the same updates, whoever computes them
            for place, indices in enumerate(whole[epoch]):
                assert sorted(flat(one[place] for one in of_ranks)) == sorted(indices)


@given(st.data(), st.integers(2, 40), GRANULARITIES, st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_resumed_anywhere_it_is_as_if_it_had_never_stopped(
    data: st.DataObject, examples: int, granularity: Granularity, stops: list[int]
) -> None:
    schedule = data.draw(stages())

    def made() -> ChangingBatches:
        return ChangingBatches(examples, schedule, granularity=granularity, seed=5)

    wanted = list(islice(endless(made()), sum(stops) + 20))
    batches, found = made(), []
    for stop in stops:
        found += list(islice(endless(batches), stop))
        state = json.loads(json.dumps(batches.state_dict()))
        batches = made()
        batches.load_state_dict(state)
        assert len(batches) > 0
    found += list(islice(endless(batches), 20))
    assert found == wanted


def test_state_in_the_last_batch_of_an_epoch_goes_on_with_the_next() -> None:
    batches = ChangingBatches(10, 4)
    *_, _ = (state := batches.state_dict() for _ in batches.through(batches))
    assert (state["epoch"], state["position"]) == (0, 10)
    again = ChangingBatches(10, 4)
    again.load_state_dict(state)
    assert (again.epoch, len(again), again.samples) == (1, 3, 10)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (2, True), (3, False), (4, True)])
def test_workers_that_fetch_ahead_lose_nothing(workers: int, persistent: bool) -> None:
    schedule = Stages((7, 2, 5), (0, 4, 11), "step")

    def made() -> tuple[ChangingBatches, DataLoader[int]]:
        batches = ChangingBatches(53, schedule, granularity="step", seed=1)
        return batches, DataLoader(Places(), batch_sampler=batches, num_workers=workers, persistent_workers=persistent)

    alone = ChangingBatches(53, schedule, granularity="step", seed=1)
    wanted = list(islice(endless(alone), 25))
    batches, loader = made()
    found: list[list[int]] = []
    for place, batch in enumerate(batches.through(loader)):
        found.append(batch.tolist())
        if place == 2:
            break
    assert batches.samples == 21
    state = batches.state_dict()
    batches, loader = made()  # as another process would
    batches.load_state_dict(state)
    assert len(loader) == len(batches)
    while batches.epoch < 2:
        for batch in batches.through(loader):
            found.append(batch.tolist())
            state = batches.state_dict()  # in the middle of an iteration, with batches fetched ahead
            assert state["samples"] == sum(map(len, found))
    assert found == wanted[: len(found)]
    assert sorted(flat(found)) == sorted([*range(53)] * 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_left_early_it_goes_on_where_it_was_left(workers: int) -> None:
    batches = ChangingBatches(20, 4)
    loader = DataLoader(Places(), batch_sampler=batches, num_workers=workers, persistent_workers=workers > 0)
    found = [place for batch in islice(batches.through(loader), 2) for place in batch.tolist()]
    found += [place for batch in batches.through(loader) for place in batch.tolist()]
    assert sorted(found) == list(range(20))
    assert batches.epoch == 1


def test_a_schedule_with_a_state_is_asked_once_an_epoch() -> None:
    asked: list[Progress] = []

    def size(progress: Progress) -> int:
        asked.append(progress)
        return 3

    batches = ChangingBatches(7, size)
    assert len(batches) == 3 and len(batches) == 3
    list(batches.through(batches))
    assert asked == [Progress(0, 0, 0)]
    state = batches.state_dict()
    again = ChangingBatches(7, size)
    again.load_state_dict(state)
    assert len(asked) == 1, "asked before its own state could be loaded"
    next(iter(again.through(again)))
    assert asked == [Progress(0, 0, 0), Progress(1, 3, 7)]
    middle = ChangingBatches(7, size)
    middle.load_state_dict(again.state_dict())
    list(middle.through(middle))
    assert len(asked) == 2, "in the middle of an epoch its size is the one that was saved"


def test_another_number_of_ranks_goes_on_with_the_same_updates() -> None:
    def made(ranks: int) -> list[ChangingBatches]:
        return [ChangingBatches(24, 8, rank=rank, ranks=ranks) for rank in range(ranks)]

    two = made(2)
    before = [list(islice(one.through(one), 1)) for one in two]
    assert two[0].state_dict() == two[1].state_dict()
    four = made(4)
    for one in four:
        one.load_state_dict(two[0].state_dict())
    after = [list(one.through(one)) for one in four]
    assert sorted(flat(flat(before + after))) == list(range(24))


def test_epochs_are_shuffled_by_seed_and_epoch() -> None:
    first, second = epochs(ChangingBatches(100, 10, seed=1), 2)
    assert first != second
    assert epochs(ChangingBatches(100, 10, seed=1), 2) == [first, second]
    assert epochs(ChangingBatches(100, 50, seed=1), 1)[0][0] == flat(first[:5]), "the order isn't the batch's"
    assert epochs(ChangingBatches(100, 10, seed=2), 1) != [first]
    assert epochs(ChangingBatches(10, 4, shuffle=False), 1) == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]]


@settings(max_examples=20)
@given(st.integers(1, 30), st.integers(1, 12))
def test_drop_leaves_incomplete_batches_out(examples: int, size: int) -> None:
    batches = ChangingBatches(examples, size, last="drop")
    if size > examples:
        with pytest.raises(ConfigError, match="an epoch without a batch"):
            len(batches)
    else:
        made = epochs(batches, 2)
        assert [list(map(len, one)) for one in made] == [[size] * (examples // size)] * 2


def test_what_goes_wrong_is_named() -> None:
    batches = ChangingBatches(12, 4)
    loader = DataLoader(Places(), batch_sampler=batches)
    with pytest.raises(RunError, match=r"batches\.through\(loader\)"):
        next(iter(loader))
    with pytest.raises(RunError, match="didn't ask for"):
        list(batches.through(DataLoader(Places(), batch_size=4)))
    with pytest.raises(ConfigError, match="in_order"):
        list(batches.through(DataLoader(Places(), batch_sampler=batches, in_order=False)))


def test_the_latest_loop_has_the_batches() -> None:
    """As one that failed in a notebook is kept alive by its traceback."""
    batches = ChangingBatches(12, 4)
    loader = DataLoader(Places(), batch_sampler=batches)
    failed = batches.through(loader)
    found = [next(failed).tolist()]
    again = batches.through(loader)
    found.append(next(again).tolist())
    with pytest.raises(RunError, match="another iteration"):
        next(failed)
    found += [batch.tolist() for batch in again]
    assert sorted(flat(found)) == list(range(12))
    going = batches.through(loader)
    next(going)
    batches.load_state_dict(batches.state_dict())
    with pytest.raises(RunError, match="a state was loaded"):
        next(going)


def test_states_of_something_else_are_refused() -> None:
    batches = ChangingBatches(12, 4, seed=3)
    for other in (
        ChangingBatches(11, 4, seed=3),
        ChangingBatches(12, 4),
        ChangingBatches(12, 4, seed=3, shuffle=False),
    ):
        with pytest.raises(CheckpointError, match="was saved with"):
            batches.load_state_dict(other.state_dict())
    with pytest.raises(CheckpointError, match="a state of batches has"):
        batches.load_state_dict({"epoch": 0})
    odd = ChangingBatches(12, 3, seed=3)
    next(iter(odd.through(odd)))
    with pytest.raises(CheckpointError, match="2 ranks can't share out"):
        ChangingBatches(12, 4, seed=3, ranks=2).load_state_dict(odd.state_dict())


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: ChangingBatches(0, 4), "the data set is empty"),
        (lambda: ChangingBatches(10, 4, ranks=4), "'repeat' takes 2 of them twice an epoch"),
        (lambda: ChangingBatches(10, 4, rank=2, ranks=2), "from 0 to 1"),
        (lambda: ChangingBatches(10, 4, seed=-1), "seed = -1"),
        (lambda: ChangingBatches(10, 4, granularity="batch"), "one of epoch, step"),  # type: ignore[arg-type]
        (lambda: ChangingBatches(10, 4, last="pad"), "one of keep, repeat, drop"),  # type: ignore[arg-type]
        (lambda: len(ChangingBatches(10, 0)), "at least 1"),
        (lambda: len(ChangingBatches(10, lambda at: 2.5)), "gives 2.5 examples"),  # type: ignore[arg-type,return-value]
        (lambda: len(ChangingBatches(10, 5, ranks=2)), "a multiple of the 2 ranks, such as 4"),
    ],
)
def test_what_cannot_be_is_refused(made, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        made()
