import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ConfigError, RunError
from stoker.rl.advantages import estimator, gae, reward_to_go, sample_advantages, token_rewards, whiten

NAN = float("nan")


def mask_of(*rows: str) -> np.ndarray:
    """ "x" counts, "." doesn't."""
    return np.array([[c == "x" for c in row] for row in rows])


# --- of samples ---------------------------------------------------------------------------------------


def padded(groups) -> np.ndarray:
    """(G, n) with NaN for None and for samples that a group doesn't have."""
    width = max((len(group) for group in groups), default=0)
    return np.array([[NAN if r is None else r for r in [*group, *[None] * (width - len(group))]] for group in groups])


def group_relative(groups, scale="group", name="group", greedy=None) -> list[np.ndarray]:
    """By group, without what pads it."""
    found = sample_advantages(padded(groups).reshape(len(groups), -1), greedy, name=name, scale=scale)
    return [line[: len(group)] for line, group in zip(found, groups, strict=True)]


def test_group_relative_by_hand():
    # [1, 0, 0, 0]: mean 1/4, squared deviations 9/16 + 3/16, over n - 1: 1/4, std 1/2
    (advantages,) = group_relative([[1, 0, 0, 0]])
    np.testing.assert_allclose(advantages, [1.5, -0.5, -0.5, -0.5])
    (unscaled,) = group_relative([[1, 0, 0, 0]], "none")
    np.testing.assert_allclose(unscaled, [0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("rewards", [[0.95] * 7, [0.1] * 3, [1e9] * 8, [0.0] * 4, [0.95], [], [-0.5, None, -0.5]])
def test_peer_fault_14_equal_rewards_and_lone_samples_give_exactly_zero(rewards, scale):
    other = [[1.0, 0.0], [0.3, 0.1 + 0.2]]
    alone, beside = group_relative([rewards], scale)[0], group_relative([rewards, *other], scale)[0]
    assert alone.tolist() == beside.tolist() == [0.0] * len(rewards)


def test_peer_fault_14_rounding_is_not_a_difference():
    assert 0.1 + 0.2 != 0.3
    assert group_relative([[0.3, 0.1 + 0.2, 0.3]])[0].tolist() == [0, 0, 0]


def test_peer_fault_14_one_outlier_is_not_residue():
    # [0, .95 x 7]: mean .83125, std = .95 sqrt((1/8)(7/8) 8/7) = .95 / sqrt(8)
    (advantages,) = group_relative([[0] + [0.95] * 7])
    np.testing.assert_allclose(advantages, np.array([-7 / 8] + [1 / 8] * 7) * np.sqrt(8))


def test_peer_fault_15_batch_scale_is_the_std_of_the_step():
    # rewards 0 2 4 6: std over the step sqrt(20/3), over each group sqrt(2); centred by their own groups
    first, second = group_relative([[0, 2], [4, 6]], "batch")
    np.testing.assert_allclose(first, np.array([-1, 1]) / np.sqrt(20 / 3))
    np.testing.assert_allclose(second, first)
    by_group, _ = group_relative([[0, 2], [4, 6]], "group")
    np.testing.assert_allclose(by_group, np.array([-1, 1]) / np.sqrt(2))


def test_failure_11_a_sample_without_reward_leaves_its_groups_statistics():
    with_none, without = group_relative([[1, None, 0, 0, None]])[0], group_relative([[1, 0, 0]])[0]
    assert with_none[[0, 2, 3]].tolist() == without.tolist()
    assert with_none[[1, 4]].tolist() == [0, 0]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize(
    "rewards", [[0.95] * 7, [0.1] * 3, [1e9] * 8, [0.3, 0.1 + 0.2], [0.95], [], [-0.5, None, -0.5]]
)
def test_peer_fault_14_leave_one_out_of_equal_rewards_is_exactly_zero(rewards, scale):
    found = group_relative([rewards, [1.0, 0.0]], scale, "leave_one_out")[0]
    assert found.tolist() == [0.0] * len(rewards)


@given(st.lists(st.none() | st.integers(-9, 9), min_size=2, max_size=9).filter(lambda g: len(g) - g.count(None) > 1))
def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others(rewards):
    (found,) = group_relative([rewards], "none", "leave_one_out")
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != i and r is not None]
        wanted = 0.0 if reward is None else reward - sum(others) / len(others)
        assert found[i] == pytest.approx(wanted, abs=1e-9)


def test_leave_one_out_is_unbiased_by_enumeration():
    """One token of two: over all pairs of draws, the mean of A grad log p is the exact gradient of the mean reward."""
    p, reward = np.array([0.3, 0.7]), np.array([1.0, -0.4])
    exact = p * (reward - p @ reward)  # d/d logits of sum p r
    total = np.zeros(2)
    for a in range(2):
        for b in range(2):
            pulls = [np.eye(2)[token] - p for token in (a, b)]
            (advantages,) = group_relative([[reward[a], reward[b]]], "none", "leave_one_out")
            total += p[a] * p[b] * sum(A * pull for A, pull in zip(advantages, pulls, strict=True)) / 2
    np.testing.assert_allclose(total, exact)


def test_greedy_answers_are_the_baseline():
    rewards, greedy = [[1, 0, None], [0.5, 1, 1]], np.array([1.0, NAN])
    first, second = group_relative(rewards, "none", "greedy", greedy)
    assert first.tolist() == [0, -1, 0]
    assert second.tolist() == [0, 0, 0]  # no reward for the greedy answer: nothing to measure against
    with pytest.raises(RunError, match="needs a greedy answer"):
        group_relative(rewards, "none", "greedy")


def test_greedy_baseline_is_unbiased_by_enumeration():
    p, reward = np.array([0.3, 0.7]), np.array([1.0, -0.4])
    total = np.zeros(2)
    for token in range(2):
        (advantage,) = group_relative([[reward[token]]], "none", "greedy", np.array([reward[p.argmax()]]))
        total += p[token] * advantage[0] * (np.eye(2)[token] - p)
    np.testing.assert_allclose(total, p * (reward - p @ reward))


def test_rewards_as_they_are():
    assert group_relative([[1, None], [2, 3]], "none", "reward")[0].tolist() == [1, 0]
    scaled = group_relative([[1, None], [2, 3]], "batch", "reward")[1]
    np.testing.assert_allclose(scaled, [2, 3])  # std of 1 2 3 is 1


@pytest.mark.parametrize("name", ["group", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch"])
def test_each_scale_divides_by_its_own_spread(name, scale):
    groups = [[0, 2], [4, 10]]
    plain, found = group_relative(groups, "none", name), group_relative(groups, scale, name)
    stds = [np.std([0, 2, 4, 10], ddof=1)] * 2 if scale == "batch" else [np.std(g, ddof=1) for g in groups]
    for a, b, std in zip(plain, found, stds, strict=True):
        np.testing.assert_allclose(b, a / std)


OWN = """
import numpy as np

def ranks(rewards):
    return np.argsort(np.argsort(rewards, axis=1), axis=1) - 1.0

def short(rewards):
    return rewards[:, :1]

def holes(rewards):
    return rewards * np.nan


def raises(rewards):
    return rewards.average()


def words(rewards):
    return [["good", "bad"]]
"""


def test_a_users_own_advantage_by_path(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    assert group_relative([[5, 7, 6]], "none", f"{file}:ranks")[0].tolist() == [-1, 1, 0]
    with pytest.raises(RunError, match=r"returned shape \(1, 1\) for rewards of shape \(1, 2\)"):
        group_relative([[5, 7]], "none", f"{file}:short")
    with pytest.raises(RunError, match="returned NaN or infinity"):
        group_relative([[5, 7]], "none", f"{file}:holes")
    with pytest.raises(RunError, match=r"raises' raised\n(.|\n)*no attribute 'average'"):
        group_relative([[5, 7]], "none", f"{file}:raises")
    with pytest.raises(RunError, match=r"advantage '.*:words' returned what isn't an array of numbers"):
        group_relative([[5, 7]], "none", f"{file}:words")
    with pytest.raises(ConfigError, match=r"algorithm.advantage .* has no 'rank'; did you mean 'ranks'"):
        estimator(f"{file}:rank")


@given(st.lists(st.integers(-20, 20), min_size=2, max_size=16), st.integers(-5, 5), st.integers(1, 9))
def test_group_scaling_forgets_offset_and_unit(rewards, offset, unit):
    (plain,) = group_relative([rewards])
    (moved,) = group_relative([[unit * r + offset for r in rewards]])
    np.testing.assert_allclose(plain, moved, atol=1e-9)
    assert abs(plain.sum()) < 1e-9
    if len(set(rewards)) > 1:
        assert plain.std(ddof=1) == pytest.approx(1)


# --- rewards per token --------------------------------------------------------------------------------


def test_terminal_reward_lands_on_the_last_counted_token():
    mask = mask_of("xxx..", "x.x.x", ".....")
    rewards = token_rewards([1.0, 2.0, 3.0], np.where(mask, 0.0, NAN), mask, kl_coefficient=0.0)
    np.testing.assert_array_equal(rewards, [[0, 0, 1, 0, 0], [0, 0, 0, 0, 2], [0, 0, 0, 0, 0]])


def test_kl_penalty_by_token_and_by_sequence():
    mask, d = mask_of("xx.x"), np.array([[1.0, 2.0, NAN, 4.0]])
    by_token = token_rewards([10.0], d, mask, kl_coefficient=0.5)
    by_sequence = token_rewards([10.0], d, mask, kl_coefficient=0.5, level="sequence")
    np.testing.assert_allclose(by_token, [[-0.5, -1.0, 0.0, 10 - 2.0]])
    np.testing.assert_allclose(by_sequence, [[0.0, 0.0, 0.0, 10 - 3.5]])


# --- GAE ----------------------------------------------------------------------------------------------


def test_gae_by_hand():
    # gamma .5, lam .5: delta = [0 + .5*2 - 1, 0 + .5*4 - 2, 8 - 4] = [0, 0, 4]; A = [.25^2 * 4, .25 * 4, 4]
    advantages, returns = gae(
        np.array([[0.0, 0.0, 8.0]]), np.array([[1.0, 2.0, 4.0]]), mask_of("xxx"), gamma=0.5, lam=0.5
    )
    np.testing.assert_allclose(advantages, [[0.25, 1.0, 4.0]])
    np.testing.assert_allclose(returns, [[1.25, 3.0, 8.0]])


def by_definition(rewards, values, gamma, lam, final):
    """A_t = sum_k (gamma lam)^k delta_{t+k} over a plain sequence, forwards."""
    following = [*values, final][1:]
    deltas = [r + gamma * after - before for r, before, after in zip(rewards, values, following, strict=True)]
    return [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


@given(st.data(), st.integers(1, 4), st.integers(0, 9))
def test_gae_of_a_masked_batch_is_that_of_each_compacted_row(data, b, t):
    numbers = st.floats(-5, 5)
    fill = lambda strategy: np.array(data.draw(st.lists(strategy, min_size=b * t, max_size=b * t))).reshape(b, t)  # noqa: E731
    rewards, values, mask = fill(numbers), fill(numbers), fill(st.booleans()).astype(bool)
    gamma, lam, final = data.draw(st.floats(0.1, 1)), data.draw(st.floats(0, 1)), data.draw(numbers)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam, final_values=final)
    for row in range(b):
        m = mask[row]
        wanted = by_definition(rewards[row][m], values[row][m], gamma, lam, final)
        np.testing.assert_allclose(advantages[row][m], wanted, atol=1e-9)
        np.testing.assert_allclose(returns[row][m], wanted + values[row][m], atol=1e-9)
        assert not advantages[row][~m].any() and not returns[row][~m].any()


def test_peer_fault_10_gae_never_reads_masked_values():
    mask = mask_of("xx.xx..", ".xxxxxx")
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=mask.shape), rng.normal(size=mask.shape)
    clean = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    for poison in (100.0, NAN):
        poisoned = gae(np.where(mask, rewards, poison), np.where(mask, values, poison), mask, gamma=0.9, lam=0.8)
        for before, after in zip(clean, poisoned, strict=True):
            np.testing.assert_array_equal(before, after)


def test_peer_fault_10_terminal_reward_reaches_the_first_token():
    mask = mask_of("x.x.x..")
    rewards = token_rewards([3.0], np.zeros(mask.shape), mask, kl_coefficient=0.0)
    advantages, _ = gae(rewards, np.zeros(mask.shape), mask, gamma=1.0, lam=1.0)
    np.testing.assert_allclose(advantages, [[3, 0, 3, 0, 3, 0, 0]])


def test_peer_fault_10_truncation_bootstraps_only_where_asked():
    # one token, no reward, V = 2 before it: ended -> A = -2; cut off in a state worth 5 -> A = 5 - 2
    rewards, values, mask = np.zeros((2, 1)), np.full((2, 1), 2.0), mask_of("x", "x")
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=0.95, final_values=[0.0, 5.0])
    np.testing.assert_allclose(advantages, [[-2], [3]])
    np.testing.assert_allclose(returns, [[0], [5]])


def test_gae_takes_one_row_as_well_as_a_batch():
    rewards, values, mask = np.array([0.0, 1.0]), np.array([0.5, 0.5]), np.array([True, True])
    one, many = (
        gae(r, v, m, gamma=0.9, lam=0.9)[0]
        for r, v, m in [(rewards, values, mask), (rewards[None], values[None], mask[None])]
    )
    np.testing.assert_array_equal(one, many[0])


def test_reward_to_go():
    np.testing.assert_allclose(reward_to_go(np.array([1.0, 9.0, 2.0]), np.array([True, False, True]), 0.5), [2, 0, 2])


# --- whitening and explained variance -----------------------------------------------------------------


def test_whiten_by_hand():
    np.testing.assert_allclose(whiten(np.array([[1.0, 3.0, NAN]]), mask_of("xx.")), [[-np.sqrt(0.5), np.sqrt(0.5), 0]])
    assert whiten(np.full((1, 3), 0.7), mask_of("xxx")).tolist() == [[0, 0, 0]]
    assert whiten(np.full((1, 3), 0.7), mask_of("...")).tolist() == [[0, 0, 0]]


def test_peer_fault_11_padding_does_not_leak_into_whitening_or_advantages():
    rng = np.random.default_rng(1)
    mask = mask_of("xxxx....", "xxxxxxxx", "xx.x....")
    values, rewards = rng.normal(size=mask.shape), rng.normal(size=mask.shape)
    results = []
    for padding in (0.0, -7.0, NAN):
        v, r = np.where(mask, values, padding), np.where(mask, rewards, padding)
        results.append(whiten(gae(r, v, mask, gamma=0.99, lam=0.95)[0], mask))
        assert whiten(v, mask)[mask].mean() == pytest.approx(0, abs=1e-12)
        assert whiten(v, mask)[mask].std(ddof=1) == pytest.approx(1)
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])
