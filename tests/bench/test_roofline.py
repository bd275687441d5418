"""The least time of sampling by hand, and exponents of known curves."""

import pytest
from transformers import AutoConfig

from bench.roofline import Answer, Limits, Sequences, cache_elements, exponent
from stoker.batch.flops import Attention, Work

WORK = Work(linear=100, head=10, attention=(Attention(1, 2),))  # 8 FLOPs a pair of positions


def test_the_slower_of_arithmetic_and_memory_decides() -> None:
    limits = Limits(flops=10.0, bandwidth=2.0)
    assert limits.seconds(100, 4) == 10.0
    assert limits.seconds(100, 400) == 200.0


def test_sampling_by_hand_of_two_answers_to_one_prompt() -> None:
    answers = [Answer("p", 3, 3), Answer("p", 3, 1)]
    sequences = Sequences(answers, WORK, element_bytes=4, cache_elements=5)
    prefill, steps = WORK.prefill(3), WORK.decode(3) + WORK.decode(4)
    assert sequences.seconds(Limits(1.0, 1e12)) == pytest.approx(prefill + steps)
    weights, token = 4 * 110, 4 * 5
    # the prompt's pass, then two steps: 3 shared tokens and 1, then 2 of the answer that goes on
    expected = 3 * weights + (3 + 1) * token + (3 + 2) * token
    assert sequences.seconds(Limits(1e12, 1.0)) == pytest.approx(expected)


def test_groups_share_their_prompts_cache_only() -> None:
    apart = Sequences([Answer("p", 50, 2), Answer("q", 50, 2)], WORK, 4, 5).seconds(Limits(1e12, 1.0))
    shared = Sequences([Answer("p", 50, 2), Answer("p", 50, 2)], WORK, 4, 5).seconds(Limits(1e12, 1.0))
    assert apart - shared == pytest.approx(50 * 4 * 5)


def test_nothing_to_sample_takes_the_prompts_pass() -> None:
    assert Sequences([], WORK, 4, 5).seconds(Limits(1.0, 1.0)) == 4 * 110


def test_cache_elements_of_a_known_model() -> None:
    """Llama-3.1-8B: 131,072 bytes a token in 16 bit."""
    config = AutoConfig.for_model(
        "llama", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
    )
    assert 2 * cache_elements(config) == 131_072


def test_exponents() -> None:
    assert exponent([(x, 3 * x**1.5) for x in (1, 2, 4, 8)]) == {"exponent": 1.5, "error": 0.0}
    assert exponent([(1, 5), (10, 50)]) == {"exponent": 1.0, "error": 0.0}
    rough = exponent([(1, 1), (2, 4), (4, 4)])  # logs to base 2: 0 2 2 over 0 1 2: slope 1, residuals -1/3 2/3 -1/3
    assert rough == {"exponent": 1.0, "error": round((2 / 3 / 2) ** 0.5, 3)}
