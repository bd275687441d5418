"""Batch numbers of one device and of all; expected values by hand."""

import json

import pytest

from stoker.batch.scope import Scope, follow, from_update, largest_divisor, predicted_all_reduce_s
from stoker.errors import ConfigError


def test_global_is_per_device_times_accumulation_times_ranks() -> None:
    scope = Scope(examples_per_microbatch=8, microbatches_per_update=4, data_parallel_ranks=16)
    assert (scope.examples_per_rank, scope.examples_per_update, scope.devices) == (32, 512, 16)
    text = str(scope)
    assert "examples per update" in text and "512" in text and "8 x 4 x 16" in text and "global, one update" in text


def test_both_ways() -> None:
    made = from_update(512, examples_per_microbatch=8, data_parallel_ranks=16)
    assert made == Scope(8, 4, 16)
    assert from_update(made.examples_per_update, examples_per_microbatch=8, data_parallel_ranks=16) == made


def test_pipeline_and_tensor_ranks_multiply_devices_but_not_examples() -> None:
    scope = Scope(2, 8, 4, pipeline_stages=4, tensor_parallel_ranks=2)
    assert (scope.examples_per_update, scope.devices) == (64, 32)
    assert scope.pipeline_bubble == pytest.approx(3 / 11)
    assert "leave each stage idle for 27% of an update; 16 of 1 examples would make it 16%" in scope.warnings[0]
    assert Scope(2, 16, 4, pipeline_stages=4).warnings == ()
    assert Scope(2, 1).pipeline_bubble == 0


def test_what_does_not_divide_names_what_does() -> None:
    with pytest.raises(
        ConfigError,
        match=r"100 examples per update are not a multiple of 8 per micro-batch x 4 data-parallel ranks = 32: "
        r"take 96 or 128, or a micro-batch of 5",
    ):
        from_update(100, examples_per_microbatch=8, data_parallel_ranks=4)
    with pytest.raises(ConfigError, match=r"none: 3 ranks don't divide 100"):
        from_update(100, examples_per_microbatch=8, data_parallel_ranks=3)
    with pytest.raises(ConfigError, match="data_parallel_ranks = 0: at least 1"):
        Scope(1, 1, 0)
    with pytest.raises(ConfigError, match="examples_per_update = 0"):
        from_update(0, examples_per_microbatch=8)


def test_the_learning_rate_follows_the_global_batch_whatever_made_it() -> None:
    before = Scope(8, 4)
    assert follow(1e-3, before, Scope(8, 4, 4)) == pytest.approx({"sqrt": 2e-3, "linear": 4e-3})
    assert follow(1e-3, before, Scope(8, 1, 4)) == pytest.approx({"sqrt": 1e-3, "linear": 1e-3})


def test_ring_all_reduce() -> None:
    # 4 ranks, 100 MB at 10 GB/s: 2 x 3/4 x 10 ms = 15 ms; 2 calls of 6 messages of 50 us: 0.6 ms
    assert predicted_all_reduce_s(1e8, 4, 1e10, 5e-5, calls=2) == pytest.approx(0.0156)
    assert predicted_all_reduce_s(1e8, 1, 1e10, 5e-5) == 0


def test_it_is_json() -> None:
    made = json.loads(json.dumps(Scope(2, 8, 4, pipeline_stages=4).to_json()))
    assert made["examples_per_update"] == 64 and made["warnings"]


def test_the_largest_divisor_that_is_no_more() -> None:
    assert [largest_divisor(12, most) for most in (1, 5, 6, 11, 12, 99)] == [1, 4, 6, 6, 12, 12]
    assert largest_divisor(13, 12) == 1
