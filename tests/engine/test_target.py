"""The steps of a run file as trials take them: full micro-batches, both peaks, and a lack of memory that shows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.batch.target import Maker
from stoker.config import load as config_load
from stoker.config.schema import RunConfig
from stoker.engine.local import budget
from stoker.engine.local.learner import LocalLearner
from stoker.engine.local.sampler import LocalSampler
from stoker.engine.target import RunWorkload, filling, make, workload
from stoker.errors import ConfigError, RunError
from stoker.rl.types import Objective, Sample, TrainBatch, TrainRow
from tests.runs import short_run

LONGEST = 63
"""Tokens of the tiny model's longest row: 64 positions, the answer's last token left out."""


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """Steps of 4 prompts x 4 samples, answers of up to 24 tokens."""
    return lambda *overrides: short_run(tmp_path, "sampling.max_new_tokens=24", *overrides)


class Seen:
    """What a workload's sampler and learner were given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.microbatches: list[tuple[int, int]] = []  # (lines, tokens of each)
        self.samples: list[Sample] = []
        self.batches: list[TrainBatch] = []
        self.objectives: list[Objective] = []
        self.scored: list[str] = []
        cut, sample, score = budget.TokenBudget.microbatches, LocalSampler.collect, LocalLearner.score
        learn = LocalLearner.forward_backward

        def microbatches(own: budget.TokenBudget, rows: Any, width: int) -> Any:
            for lines in cut(own, rows, width):
                self.microbatches.append((len(lines), max(line.length for line in lines)))
                yield lines

        def collect(own: LocalSampler) -> Any:
            for one in sample(own):
                self.samples.append(one)
                yield one

        def forward_backward(own: LocalLearner, batch: TrainBatch, objective: Objective) -> Any:
            self.batches.append(batch)
            self.objectives.append(objective)
            return learn(own, batch, objective)

        def scores(own: LocalLearner, rows: Any, role: Any) -> Any:
            self.scored.append(role)
            return score(own, rows, role)

        monkeypatch.setattr(budget.TokenBudget, "microbatches", microbatches)
        monkeypatch.setattr(LocalSampler, "collect", collect)
        monkeypatch.setattr(LocalLearner, "forward_backward", forward_backward)
        monkeypatch.setattr(LocalLearner, "score", scores)

    def forget(self) -> None:
        self.microbatches, self.samples, self.batches, self.scored = [], [], [], []

    @property
    def padded(self) -> list[int]:
        return [lines * length for lines, length in self.microbatches]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


# -- what fills a micro-batch -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "rows", "length"),
    [
        (1, 1, 100),  # an update gives the longest row a micro-batch of its own
        (100, 1, 100),
        (101, 2, 50),
        (200, 2, 100),
        (399, 4, 99),
        (1600, 16, 100),
        (1650, 16, 100),  # no more than an update has
    ],
)
def test_filling_by_hand(size: int, rows: int, length: int) -> None:
    assert filling(size, longest=100, samples=16) == (rows, length)


@given(st.integers(1, 300), st.integers(1, 64), st.data())
def test_filling_leaves_less_than_a_token_a_row(longest: int, samples: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(longest, longest * samples))
    rows, length = filling(size, longest, samples)
    assert size - rows < rows * length <= size
    assert rows <= samples and length <= longest


@pytest.mark.parametrize("size", [63, 100, 126, 300, 500])
def test_a_micro_batch_is_really_full_and_none_is_fuller(
    make_config: Callable[..., RunConfig], seen: Seen, size: int
) -> None:
    run = workload(make_config("kl.coefficient=0.0"))
    seen.forget()
    run.step(size)
    assert max(seen.padded) <= size
    assert max(seen.padded) > size - filling(size, LONGEST, 16)[0]
    longest = max(len(row.prompt_ids) + len(row.token_ids) - 1 for row in seen.batches[0].rows)
    assert longest == LONGEST
    assert len(seen.batches[0].rows) <= 16


def test_groups_lie_on_lines_of_their_prompt_as_in_a_run(make_config: Callable[..., RunConfig], seen: Seen) -> None:
    run = workload(make_config("sampling.prompts_per_step=16", "kl.coefficient=0.0"))
    seen.forget()
    run.step(300)
    lines = max(length for _, length in seen.microbatches)
    assert lines > LONGEST, "several answers behind one prompt"
    # 2 micro-batches of groups, then the fullest, which finds their gradients
    assert len(seen.padded) >= 3
    assert seen.padded[-1] == max(seen.padded)


def test_the_whole_update_is_the_largest_size(make_config: Callable[..., RunConfig], seen: Seen) -> None:
    run = workload(make_config("sampling.prompts_per_step=2", "kl.coefficient=0.0"))
    assert (run.unit, run.least, run.most) == ("tokens", LONGEST, 8 * LONGEST)
    seen.forget()
    run.step(8 * LONGEST)
    assert seen.padded == [8 * LONGEST]


def test_short_prompts_of_a_run_are_its_longest(make_config: Callable[..., RunConfig]) -> None:
    run = workload(make_config("task.max_prompt_tokens=10"))
    assert run.least == 10 + 24 - 1
    assert {len(one.prompt.token_ids) for one in run._samples(16, 4, 24)} == {10}


# -- both peaks ---------------------------------------------------------------------------------


def test_answers_are_as_many_and_as_long_as_a_run_may_draw(make_config: Callable[..., RunConfig], seen: Seen) -> None:
    run = workload(make_config("sampling.concurrent_samples=6", 'sampling.stop=["1", "2", "3", "+"]'))
    seen.forget()
    run.step(200)
    assert [len(one.token_ids) for one in seen.samples if len(one.token_ids) > 1] == [24] * 6
    assert {len(one.prompt.token_ids) for one in seen.samples} == {40}
    assert len(seen.samples) == 12, "as many enter while the caches are full"
    assert len({one.prompt.id for one in seen.samples}) == 3
    assert {one.finish for one in seen.samples} == {"length"}


def test_greedy_baselines_take_part(make_config: Callable[..., RunConfig], seen: Seen) -> None:
    run = workload(make_config("algorithm.name=remax", "sampling.samples_per_prompt=1"))
    seen.forget()
    run.step(100)
    assert len(seen.samples) == 8


def test_optimizers_hold_their_states_before_the_first_step_and_nothing_is_learned(
    make_config: Callable[..., RunConfig],
) -> None:
    run = workload(make_config("algorithm.name=ppo"))
    learner = run._engine.learner
    for role in ("policy", "critic"):
        states = learner._optimizers[role]._optimizer.state  # type: ignore[index]
        assert all({"exp_avg", "exp_avg_sq"} <= state.keys() for state in states.values())
        assert len(states) == len(learner._optimizers[role]._masters)  # type: ignore[index]
    before = {name: tensor.clone() for name, tensor in run._engine.model.state_dict().items()}
    run.step(100)
    run.step(200)
    assert all(torch.equal(before[name], tensor) for name, tensor in run._engine.model.state_dict().items())


def test_reference_old_policy_and_critic_score_as_the_run_asks(
    make_config: Callable[..., RunConfig], seen: Seen
) -> None:
    run = workload(make_config("algorithm.name=ppo", "update.epochs_per_step=2", "algorithm.entropy_coefficient=0.01"))
    seen.forget()
    run.step(150)
    assert seen.scored == ["policy", "reference", "critic"]
    assert seen.objectives[-1].entropy_coefficient == 0.01
    row = seen.batches[0].rows[0]
    assert all(one is not None for one in (row.old_logprobs, row.reference_logprobs, row.old_values, row.returns))
    seen.forget()
    plain = workload(make_config("kl.coefficient=0.0"))
    seen.forget()
    plain.step(150)
    assert seen.scored == []


def test_every_row_has_something_to_teach(make_config: Callable[..., RunConfig], seen: Seen) -> None:
    run = workload(make_config("algorithm.name=dapo", "sampling.top_p=0.9"))  # which masks truncated samples
    seen.forget()
    run.step(200)
    for row in seen.batches[0].rows:
        assert row.mask.all() and row.advantages.all() and row.weights.all()
        assert row.kept is not None
        assert len(row.kept.offsets) == len(row.token_ids) + 1
        assert len(row.kept.ids) == row.kept.offsets[-1]
        assert all(token in row.kept.ids[a:b] for token, a, b in zip(row.token_ids, *spans(row), strict=True))
    assert sum(float(row.weights.sum()) for row in seen.batches[0].rows) == pytest.approx(1.0)


def spans(row: TrainRow) -> tuple[Any, Any]:
    assert row.kept is not None
    return row.kept.offsets[:-1], row.kept.offsets[1:]


def test_adapters_train_beside_a_frozen_base(make_config: Callable[..., RunConfig], seen: Seen) -> None:
    run = workload(make_config("lora.rank=4", "lora.checkpoint=merged", "kl.coefficient=0.05"))
    names = list(run._engine.learner._optimizers["policy"]._masters)
    assert names and all("lora_" in name for name in names)
    seen.forget()
    run.step(200)
    assert max(seen.padded) > 200 - 4
    assert seen.scored == ["reference"]


def test_a_16_bit_policy_holds_masters(make_config: Callable[..., RunConfig]) -> None:
    run = workload(make_config("model.dtype=bfloat16"))
    run.step(100)
    masters = run._engine.learner._optimizers["policy"]._masters.values()
    assert {master.dtype for master in masters} == {torch.float32}


# -- a lack of memory ---------------------------------------------------------------------------


def test_out_of_memory_in_the_update_surfaces_and_leaves_no_gradient(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = workload(make_config("kl.coefficient=0.0"))
    learner = run._engine.learner
    terms, calls = LocalLearner._terms, [0]

    def third(own: LocalLearner, role: Any, micro: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return terms(own, role, micro)

    monkeypatch.setattr(LocalLearner, "_terms", third)
    with pytest.raises(torch.OutOfMemoryError):
        run.step(100)
    assert learner._optimizers["policy"].norm() == 0
    assert learner.notes == [note for note in learner.notes if "memory ran out" not in note]
    run.step(50)


def test_out_of_memory_while_sampling_surfaces(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = workload(make_config())

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("stoker.engine.local.drawing.Drawing.advance", fail)
    with pytest.raises(MemoryError):
        run.step(100)
    assert run._engine.sampler.concurrent_samples == 64


def test_a_refused_update_is_an_error(make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    run = workload(make_config())
    monkeypatch.setattr(LocalLearner, "_reason_to_refuse", lambda *_: "the loss isn't finite")
    with pytest.raises(RunError, match="refused .the loss isn't finite"):
        run.step(100)


# -- made from a run file -----------------------------------------------------------------------


def test_a_maker_makes_it_from_a_run_file_and_overrides(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(config_load.to_toml(make_config('update.tokens_per_microbatch="auto"')))
    made = Maker("stoker.engine.target:make", (str(file), "sampling.max_new_tokens=8", "task.max_prompt_tokens=20"))()
    assert isinstance(made, RunWorkload)
    assert (made.least, made.device.type) == (27, "cpu")
    made.step(60)


def test_a_run_file_that_can_not_be_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        make(str(tmp_path / "absent.toml"))


def test_no_two_prompts_are_equal(make_config: Callable[..., RunConfig]) -> None:
    run = workload(make_config())
    prompts = [run._prompt(number, 2) for number in range(54 * 54)]
    assert len(set(prompts)) == 54 * 54
    assert np.array(prompts).max() < 54
