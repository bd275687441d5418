"""Rows, weights and updates, and with a small model: the gradient can't depend on how a batch is cut."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stoker.config import schema
from stoker.errors import RunError
from stoker.rl.batches import (
    KlPenalty,
    gae_advantages,
    group_advantages,
    mean_sequence_kl,
    rows_from_groups,
    with_advantages,
    with_scores,
)
from stoker.rl.losses import Terms, evaluate
from stoker.rl.types import Group, Objective, Prompt, Sample, SamplingParams, Scored, TrainBatch, TrainRow
from stoker.rl.updates import skippable, updates, weigh

EOS, VOCABULARY, MAX_NEW_TOKENS = 0, 11, 64
POLICY = Objective("policy")


def make_sample(prompt: str, index: int, length: int, finish: str = "stop", model_mask=None) -> Sample:
    rng = np.random.default_rng([len(prompt), *prompt.encode(), index])
    tokens = rng.integers(1, VOCABULARY, length).astype(np.int32)
    if finish == "stop" and length:
        tokens[-1] = EOS
    return Sample(
        prompt=Prompt(id=prompt, token_ids=(1, 2, 3), content="", answer=None),
        index=index,
        params=SamplingParams(max_new_tokens=MAX_NEW_TOKENS),
        weight_version=0,
        token_ids=tokens,
        logprobs=rng.normal(-1, 0.1, length).astype(np.float32),
        text="",
        finish=finish,
        model_mask=None if model_mask is None else np.array(model_mask),
    )


def make_group(prompt: str, rewards, lengths, finishes=None) -> Group:
    samples = [
        make_sample(prompt, i, length, (finishes or ["stop"] * len(lengths))[i]) for i, length in enumerate(lengths)
    ]
    scored = tuple(Scored(one, {}, reward) for one, reward in zip(samples, rewards, strict=True))
    return Group(samples[0].prompt, scored)


GROUPS = [
    make_group("a:0", [1, 0, 0, 0], [3, 30, 7, 12]),
    make_group("a:1", [1, 1, 0, 1], [5, 2, 50, 1]),
    make_group("a:2", [0, 0, 0, 0], [9, 8, 7, 6]),
]


def make_rows(groups=GROUPS, **rules) -> list[TrainRow]:
    return group_advantages(rows_from_groups(groups, **rules), groups)


def whole_update(rows, weighting="token", max_new_tokens=MAX_NEW_TOKENS) -> tuple[TrainRow, ...]:
    (batch,) = updates(
        rows, samples_per_update=0, epochs=1, weighting=weighting, max_new_tokens=max_new_tokens, seed=0, step=0
    )
    return batch.rows


# --- a small model: each token's distribution hangs on the token before it -----------------------------

TABLE = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def padded(rows, name: str, width: int) -> Tensor:
    return torch.stack([torch.tensor(np.pad(getattr(row, name), (0, width - len(row.mask)))) for row in rows])


def loss_of(table: Tensor, rows, objective: Objective, extra_width: int = 0) -> Tensor:
    """sum(weights * loss) of one padded micro-batch."""
    width = max(len(row.mask) for row in rows) + extra_width
    if width == 0:
        return table.sum() * 0
    tokens = padded(rows, "token_ids", width).long()
    before = torch.cat([torch.tensor([[row.prompt_ids[-1]] for row in rows]), tokens[:, :-1]], dim=1)
    logits = table[before].log_softmax(-1)  # (B, T, vocabulary)
    terms = Terms(
        mask=padded(rows, "mask", width),
        logprobs=logits.gather(-1, tokens[..., None])[..., 0],
        entropy=-(logits.exp() * logits).sum(-1),
        advantages=padded(rows, "advantages", width),
        sampler_logprobs=padded(rows, "sampler_logprobs", width),
        reference_logprobs=padded(rows, "sampler_logprobs", width),
    )
    loss, _ = evaluate(terms, objective)
    return (padded(rows, "weights", width) * loss).sum()


def gradient(microbatches, objective: Objective = POLICY, extra_width: int = 0) -> Tensor:
    """Accumulated over micro-batches (or ranks: gradients add there too)."""
    table = TABLE.clone().requires_grad_()
    for rows in microbatches:
        loss_of(table, rows, objective, extra_width).backward()
    assert table.grad is not None
    return table.grad


def by_hand(rows, denominator_of) -> Tensor:
    """One unpadded token at a time: -A grad log p / its denominator, by softmax's closed form."""
    total = torch.zeros_like(TABLE)
    for row in rows:
        for t in np.flatnonzero(row.mask):
            before = row.prompt_ids[-1] if t == 0 else int(row.token_ids[t - 1])
            pull = -TABLE[before].softmax(-1)
            pull[int(row.token_ids[t])] += 1
            total[before] -= float(row.advantages[t]) * pull / denominator_of(row)
    return total


def same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-6, atol=1e-9) and bool(a.abs().sum() > 0)


def prompt_of(row) -> str:
    return row.sample_id.partition("/")[0]


WEIGHTINGS = {
    "token": lambda rows: lambda row: sum(len(one.mask) for one in rows),
    "sample": lambda rows: lambda row: len(rows) * len(row.mask),
    "fixed": lambda rows: lambda row: len(rows) * MAX_NEW_TOKENS,
    "prompt": lambda rows: (
        lambda row: len(GROUPS) * sum(len(one.mask) for one in rows if prompt_of(one) == prompt_of(row))
    ),
}
OBJECTIVES = [POLICY, Objective("policy", kl_coefficient=0.1, kl_level="sequence", entropy_coefficient=0.1)]


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_peer_fault_01_uneven_microbatches_give_the_gradient_of_the_whole(weighting, objective):
    rows = whole_update(make_rows(), weighting)
    whole = gradient([rows], objective)
    assert same(gradient([rows[:1], rows[1:7], rows[7:]], objective), whole)
    if objective is POLICY:
        assert same(whole, by_hand(rows, WEIGHTINGS[weighting](rows)))


def test_peer_fault_02_ranks_of_10_and_1000_tokens_equal_one_rank():
    groups = [make_group("a:0", [1, 0], [4, 6]), make_group("a:1", [1, 0], [400, 600])]
    rows = whole_update(make_rows(groups))
    assert same(gradient([rows[:2]]) + gradient([rows[2:]]), gradient([rows]))
    assert same(gradient([rows]), by_hand(rows, lambda row: 1010))


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_peer_fault_03_padded_width_does_not_move_the_loss(weighting):
    rows = whole_update(make_rows(), weighting)
    losses = [loss_of(TABLE, rows, OBJECTIVES[1], extra_width=extra) for extra in (0, 1, 100)]
    torch.testing.assert_close(losses, [losses[0]] * 3)
    assert same(gradient([rows]), gradient([rows[:5], rows[5:]], extra_width=33))


def test_peer_fault_04_no_mean_of_means():
    lengths, losses = [100, 900], [0.5, 0.3]
    rows = weigh(rows_from_groups([make_group("a:0", [0, 0], lengths)]), "token", MAX_NEW_TOKENS)
    assert sum(float(row.weights.sum()) * loss for row, loss in zip(rows, losses, strict=True)) == pytest.approx(0.32)
    by_sample = weigh(rows, "sample", MAX_NEW_TOKENS)  # where a mean of means is asked for
    assert sum(float(row.weights.sum()) * one for row, one in zip(by_sample, losses, strict=True)) == pytest.approx(0.4)


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), max_size=5))
def test_peer_fault_05_the_update_is_invariant_to_accumulation_steps(cuts):
    rows = whole_update(make_rows())
    edges = sorted({0, *cuts, len(rows)})
    microbatches = [rows[a:b] for a, b in pairwise(edges)]
    assert same(gradient(microbatches), gradient([rows]))


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_peer_fault_06_masked_and_rejected_samples_equal_the_batch_without_them(weighting):
    full = make_group(
        "a:0", [1, 0, 5, None, 0.5, 9], [3, 4, 50, 6, 7, 0], ["stop", "stop", "length", "stop", "stop", "stop"]
    )
    kept = Group(full.prompt, tuple(full.scored[i] for i in (0, 1, 4)))
    rows = whole_update(make_rows([full], mask_truncated=True), weighting)
    without = whole_update(make_rows([kept], mask_truncated=True), weighting)
    assert same(gradient([rows]), gradient([without]))
    for i, row in zip((0, 1, 4), without, strict=True):
        np.testing.assert_array_equal(rows[i].weights, row.weights)
        np.testing.assert_array_equal(rows[i].advantages, row.advantages)
    for i in (2, 3, 5):
        assert not rows[i].mask.any() and not rows[i].weights.any() and not rows[i].advantages.any()


def test_peer_fault_08_mask_sum_is_the_true_length_and_eos_carries_gradient():
    rows = whole_update(make_rows([make_group("a:0", [1, 0], [4, 9])]))
    assert [int(row.mask.sum()) for row in rows] == [4, 9]
    assert all(row.token_ids[-1] == EOS and row.weights[-1] > 0 for row in rows)
    assert gradient([rows])[:, EOS].abs().sum() > 0  # here pads have the id of EOS, too


def test_model_mask_keeps_tool_tokens_out():
    sample = make_sample("a:0", 0, 4, model_mask=[True, False, False, True])
    rows = rows_from_groups([Group(sample.prompt, (Scored(sample, {}, 1.0),))])
    assert weigh(rows, "token", MAX_NEW_TOKENS)[0].weights.tolist() == [0.5, 0, 0, 0.5]
    assert weigh(rows, "sample", MAX_NEW_TOKENS)[0].weights.tolist() == [0.5, 0, 0, 0.5]


@given(st.randoms(use_true_random=False))
def test_peer_fault_16_advantages_follow_prompt_ids_when_groups_move_and_samples_drop(random):
    rewards = {"a:0": [1, 0, 0], "a:1": [0, None, 1, 1], "b:0": [None, None], "b:1": [0.5]}
    by_id = {
        row.sample_id: row.advantages for row in make_rows([make_group(p, r, [2] * len(r)) for p, r in rewards.items()])
    }
    moved = list(rewards.items())
    random.shuffle(moved)
    groups = [make_group(p, r, [2] * len(r)) for p, r in moved]
    for row in make_rows(groups):
        np.testing.assert_array_equal(row.advantages, by_id[row.sample_id])
    np.testing.assert_allclose(by_id["a:1/0"], -2 / np.sqrt(3), rtol=1e-6)  # of [0, 1, 1]: mean 2/3, std 1/sqrt(3)


def test_peer_fault_16_rows_that_lost_their_order_are_refused():
    rows = rows_from_groups(GROUPS)
    for wrong in (rows[1:], rows[::-1], []):
        with pytest.raises(RunError, match="pass all rows"):
            group_advantages(wrong, GROUPS)


def test_failure_22_empty_completions_are_masked_and_denominators_stay_above_zero():
    nothing = [make_group("a:0", [1, 0], [0, 0])]
    for weighting in WEIGHTINGS:
        rows = whole_update(make_rows(nothing), weighting)
        assert [len(row.weights) for row in rows] == [0, 0]
        assert all(skippable(row, POLICY) for row in rows)
    assert cut([], samples_per_update=0) == []


# --- skipping -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_skippable_rows_change_nothing_when_skipped(weighting):
    rows = whole_update(make_rows(), weighting)
    skipped = [row for row in rows if skippable(row, POLICY)]
    assert [row.sample_id for row in skipped] == [f"a:2/{i}" for i in range(4)]
    assert same(gradient([[row for row in rows if not skippable(row, POLICY)]]), gradient([rows]))


def test_a_row_is_skippable_only_if_no_gradient_can_come_from_it():
    row = make_rows()[-1]
    assert not skippable(row, replace(POLICY, kl_coefficient=0.1))
    assert not skippable(row, replace(POLICY, entropy_coefficient=-0.1))
    assert not skippable(row, Objective("value"))
    assert not skippable(row, Objective("sft"))
    assert not skippable(row, replace(POLICY, surrogate="mine.py:loss"))  # may reach beyond the advantages
    assert skippable(replace(row, mask=row.mask & False), Objective("value"))


# --- updates ------------------------------------------------------------------------------------------


def cut(rows, **changes) -> list[TrainBatch]:
    settings = {"samples_per_update": 4, "epochs": 1, "weighting": "token", "max_new_tokens": 64, "seed": 7, "step": 3}
    return list(updates(rows, **{**settings, **changes}))


def ids(batches) -> list[list[str]]:
    return [[row.sample_id for row in batch.rows] for batch in batches]


MANY = make_rows([make_group(f"a:{i}", [1, 0, 0, 1], [2, 3, 4, 5]) for i in range(8)])


def test_every_epoch_sees_every_sample_once_in_whole_groups():
    batches = cut(MANY, samples_per_update=8, epochs=3)
    assert len(batches) == 12
    for epoch in range(3):
        seen = [one for batch in ids(batches)[4 * epoch : 4 * epoch + 4] for one in batch]
        assert sorted(seen) == sorted(row.sample_id for row in MANY)
    for batch in ids(batches):
        prompts = [one.partition("/")[0] for one in batch]
        assert all(prompts.count(prompt) == 4 for prompt in prompts)


def test_order_is_drawn_from_seed_step_and_epoch_and_the_first_pass_keeps_it():
    first, second, third = (ids(cut(MANY, epochs=3))[8 * i : 8 * i + 8] for i in range(3))
    assert [one for batch in first for one in batch] == [row.sample_id for row in MANY]
    assert first != second != third
    assert ids(cut(MANY, epochs=3)) == [*first, *second, *third]
    assert ids(cut(MANY, epochs=2, seed=-1))[8:] != second
    assert ids(cut(MANY, epochs=2, step=4))[8:] != second


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("size", [1, 4, 6, 32])
def test_each_update_has_its_own_denominator(weighting, size):
    for batch in cut(MANY, samples_per_update=size, weighting=weighting):
        total = sum(float(row.weights.sum()) for row in batch.rows)
        tokens = sum(int(row.mask.sum()) for row in batch.rows)
        assert total == pytest.approx(tokens / (len(batch.rows) * 64) if weighting == "fixed" else 1.0)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 9), st.sampled_from([None, 0.0, 1.0])), min_size=1, max_size=5), max_size=5
    ),
    st.sampled_from(sorted(WEIGHTINGS)),
    st.integers(0, 7),
)
def test_weights_are_a_share_of_one_whatever_leaves(step, weighting, size):
    groups = [make_group(f"a:{i}", [r for _, r in g], [n for n, _ in g]) for i, g in enumerate(step)]
    for batch in cut(make_rows(groups), samples_per_update=size, weighting=weighting):
        total = sum(float(row.weights.sum()) for row in batch.rows)
        assert 0 <= total <= 1 + 1e-6
        assert all(np.isfinite(row.weights).all() and not row.weights[~row.mask].any() for row in batch.rows)
        if weighting != "fixed" and any(row.mask.any() for row in batch.rows):
            assert total == pytest.approx(1, abs=1e-6)


def test_prompt_weighting_gives_each_prompt_the_mean_over_its_tokens():
    rows = weigh(rows_from_groups([make_group("a:0", [1, 0], [1, 3]), make_group("b:0", [1], [2])]), "prompt", 64)
    assert [row.weights.tolist() for row in rows] == [[0.125], [0.125] * 3, [0.25] * 2]
    split = weigh(rows[1:], "prompt", 64)  # an update that has only part of a group
    assert [float(row.weights.sum()) for row in split] == pytest.approx([0.5, 0.5])


# --- REINFORCE++ ---------------------------------------------------------------------------------------


def test_reinforce_plus_plus_by_hand():
    """A_t = r - beta sum_{i >= t} KL_i, then zero mean and unit variance over the step's tokens."""
    groups = [make_group("a:0", [1.0], [2]), make_group("b:0", [0.0], [1])]
    rows = leashed(rows_from_groups(groups), 0.2)
    found = with_advantages(rows, groups, schema.Algorithm(name="reinforce_plus_plus"), KlPenalty(0.5))
    raw = np.array([1 - 0.2, 1 - 0.1, -0.1])
    wanted = (raw - raw.mean()) / raw.std(ddof=1)
    np.testing.assert_allclose(np.concatenate([row.advantages for row in found]), wanted, rtol=1e-5)


def test_reinforce_plus_plus_with_baseline_by_hand():
    groups = [make_group("a:0", [1.0, 0.0], [1, 2]), make_group("b:0", [1.0, 1.0], [1, 1])]
    rows = rows_from_groups(groups)
    found = with_advantages(rows, groups, schema.Algorithm(name="reinforce_plus_plus_baseline"))
    raw = np.array([0.5, -0.5, -0.5, 0, 0])
    wanted = (raw - raw.mean()) / raw.std(ddof=1)
    np.testing.assert_allclose(np.concatenate([row.advantages for row in found]), wanted, rtol=1e-5)
    equal = [make_group("a:0", [1.0, 1.0], [1, 2])]
    flat = with_advantages(rows_from_groups(equal), equal, schema.Algorithm(name="reinforce_plus_plus_baseline"))
    assert not any(row.advantages.any() for row in flat)


def test_remax_takes_the_greedy_answers_reward_from_the_groups():
    group = make_group("a:0", [1.0, 0.0], [1, 2])
    group = replace(group, greedy=Scored(make_sample("a:0", 2, 3), {}, 0.25))
    found = with_advantages(rows_from_groups([group]), [group], schema.Algorithm(name="remax"))
    assert [row.advantages.tolist() for row in found] == [[0.75], [-0.25] * 2]


# --- KL in the reward, PPO ----------------------------------------------------------------------------


def leashed(rows, d: float) -> list[TrainRow]:
    """Rows whose reference finds every token d nats less likely than the policy did."""
    return with_scores(rows, reference_logprobs=[row.sampler_logprobs - np.float32(d) for row in rows])


def test_kl_penalty_of_groups_by_hand():
    group = make_group("a:0", [1, 0], [1, 3])
    rows = leashed(rows_from_groups([group]), 0.2)
    by_token = group_advantages(rows, [group], "group", "none", KlPenalty(0.5, "token"))
    np.testing.assert_allclose(by_token[1].advantages, [-0.5 - 0.3, -0.5 - 0.2, -0.5 - 0.1], rtol=1e-5)
    by_sequence = group_advantages(rows, [group], "group", "none", KlPenalty(0.5, "sequence"))
    np.testing.assert_allclose(by_sequence[0].advantages, [(0.9 + 0.3) / 2], rtol=1e-5)  # 1 - .1 against 0 - .3
    np.testing.assert_allclose(by_sequence[1].advantages, [-0.6] * 3, rtol=1e-5)


def test_mean_sequence_kl_sums_over_tokens_and_averages_over_samples_that_stay():
    group = make_group("a:0", [1, 0, None], [1, 3, 50])
    rows = leashed(rows_from_groups([group]), 0.2)
    assert mean_sequence_kl(rows) == pytest.approx((0.2 + 0.6) / 2, rel=1e-5)
    old = with_scores(rows, old_logprobs=[row.sampler_logprobs + 1 for row in rows])
    assert mean_sequence_kl(old) == pytest.approx((1.2 + 3.6) / 2, rel=1e-5)
    assert mean_sequence_kl([]) is None


def valued(groups, value: float, **rules) -> list[TrainRow]:
    rows = rows_from_groups(groups, **rules)
    return with_scores(rows, old_values=[np.full(len(row.mask), value, dtype=np.float32) for row in rows])


def test_gae_rows_by_hand():
    group = make_group("a:0", [1.0], [2])
    (row,) = gae_advantages(valued([group], 0.5), [group], gamma=1.0, lam=0.5)
    np.testing.assert_allclose(row.advantages, [0.25, 0.5])  # delta = [0, 0.5]
    np.testing.assert_allclose(row.returns, [0.75, 1.0])


def test_peer_fault_10_a_cut_answer_bootstraps_only_if_it_got_no_reward():
    groups = [make_group("a:0", [None, -0.5, None], [2, 2, 2], ["length", "length", "stop"])]
    cut_off, punished, abstained = gae_advantages(
        valued(groups, 0.5, bootstrap_truncated=True), groups, gamma=1.0, lam=0.95
    )
    np.testing.assert_allclose(cut_off.returns, [0.5, 0.5])  # worth what the critic says
    np.testing.assert_allclose(punished.returns[-1], -0.5)  # the penalty doesn't vanish
    assert not abstained.mask.any() and not abstained.returns.any()


def test_bootstrapping_without_a_critic_is_refused():
    groups = [make_group("a:0", [None, 1.0], [2, 2], ["length", "stop"])]
    with pytest.raises(RunError, match="needs a critic"):
        make_rows(groups, bootstrap_truncated=True)


def test_ppo_whitens_over_counted_tokens_of_the_step_and_keeps_returns():
    algorithm = schema.Algorithm(name="ppo", gae_lambda=1.0)
    groups = [make_group("a:0", [1.0, 0.0, None], [2, 3, 4]), make_group("a:1", [0.25], [0])]
    plain = with_advantages(valued(groups, 0.5), groups, algorithm.model_copy(update={"advantage_scale": "none"}))
    white = with_advantages(valued(groups, 0.5), groups, algorithm)
    counted = np.concatenate([row.advantages[row.mask] for row in white])
    assert counted.mean() == pytest.approx(0, abs=1e-6) and counted.std(ddof=1) == pytest.approx(1)
    for before, after in zip(plain, white, strict=True):
        np.testing.assert_array_equal(before.returns, after.returns)
        assert not after.advantages[~after.mask].any()
    assert with_advantages([], [], algorithm) == []


def test_grpo_takes_its_scale_from_the_run_file():
    rows = rows_from_groups(GROUPS)
    for scale in ("group", "batch", "none"):
        found = with_advantages(rows, GROUPS, schema.Algorithm(advantage_scale=scale))
        for a, b in zip(found, group_advantages(rows, GROUPS, scale=scale), strict=True):
            np.testing.assert_array_equal(a.advantages, b.advantages)


@pytest.mark.parametrize(
    ("penalty", "missing"), [(KlPenalty(0.1), "reference log-probs"), (KlPenalty(), "critic values")]
)
def test_missing_scores_are_named(penalty, missing):
    group = make_group("a:0", [1.0, 0.0], [2, 2])
    rows = rows_from_groups([group]) if missing == "critic values" else valued([group], 0.0)
    with pytest.raises(RunError, match=f"a:0/0 has no {missing}"):
        gae_advantages(rows, [group], gamma=1.0, lam=1.0, penalty=penalty)
