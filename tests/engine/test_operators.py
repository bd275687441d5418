"""Traces by hand: whose time is whose, which phase it falls in, and what shapes give away."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stoker.engine.operators import Event, Operator, by_phase, executed_flops, flops_of, phase_at, self_times, switches
from stoker.engine.profiling import events_of, torch_profiler


def test_an_operators_own_time_leaves_out_the_operators_inside_it() -> None:
    events = [
        Event("outer", 0, 100),
        Event("inner", 10, 40),
        Event("innermost", 20, 25),
        Event("second", 50, 60),
        Event("elsewhere", 30, 90, thread=2),
        Event("after", 100, 107),
    ]
    assert self_times(events) == [100 - 30 - 10, 30 - 5, 5, 10, 60, 7]


def test_an_inner_phase_interrupts_the_outer_one() -> None:
    events = [Event("stoker/update", 10, 50), Event("stoker/checkpoint", 20, 30), Event("stoker/sample", 60, 70)]
    changes = switches(events)
    times = (5, 10, 19, 20, 29, 30, 49, 50, 60, 69, 70, 99)
    expected = [
        "other",
        "update",
        "update",
        "checkpoint",
        "checkpoint",
        "update",
        "update",
        "other",
        "sample",
        "sample",
    ]
    assert [phase_at(changes, at) for at in times] == [*expected, "other", "other"]


def test_operators_of_each_phase_the_longest_first() -> None:
    events = [
        Event("stoker/sample", 0, 1000),
        Event("aten::linear", 0, 500),
        Event("aten::mm", 100, 400),
        Event("aten::mm", 600, 800),
        Event("aten::add", 1500, 1600),
    ]
    found = by_phase(events)
    assert found["sample"] == [Operator("aten::mm", 500e-9, 2), Operator("aten::linear", 200e-9, 1)]
    assert found["other"] == [Operator("aten::add", 100e-9, 1)]


def test_on_an_accelerator_kernels_count_for_the_operator_that_launched_them() -> None:
    """Kernels run late: the third when the next phase has begun. One of a replayed graph has no operator."""
    events = [
        Event("stoker/sample", 0, 100, id=1),
        Event("aten::linear", 0, 90, id=2),
        Event("aten::mm", 10, 20, id=3),
        Event("stoker/update", 100, 200, id=4),
        Event("gemm", 15, 65, launched_by=3),
        Event("bias", 66, 76, launched_by=2),
        Event("gemm", 120, 170, launched_by=3),
        Event("replayed", 150, 153, launched_by=4),
    ]
    found = by_phase(events)
    assert found["sample"] == [Operator("aten::mm", 100e-9, 2), Operator("aten::linear", 10e-9, 1)]
    assert found["update"] == [Operator("replayed", 3e-9, 1)]


@pytest.mark.parametrize("causal", [False, True])
def test_flops_of_attention_kernels(causal: bool) -> None:
    """2 sequences, 4 heads of 8, 5 queries and keys: 25 pairs, or the lower 15; a backward has 5 products, not 2."""
    shapes = [[2, 4, 5, 8], [2, 2, 5, 8], [2, 2, 5, 8]]
    name, pairs = "aten::_scaled_dot_product_flash_attention_for_cpu", 15 if causal else 25
    forward = Event(name, 0, 1, shapes=shapes, arguments=[None, None, None, 0.0, causal])
    assert flops_of(forward) == 2 * 4 * pairs * 4 * 8
    backward = Event(
        f"{name}_backward", 0, 1, shapes=[shapes[0], *shapes], arguments=[None] * 6 + [0.0, causal, None, None]
    )
    assert flops_of(backward) == 2 * 4 * pairs * 10 * 8


def test_executed_flops_of_a_real_trace_agree_with_torchs_counter() -> None:
    layer = torch.nn.Linear(16, 24)
    left, right = torch.randn(3, 7, 16, requires_grad=True), torch.randn(3, 24, 5)

    def work() -> None:
        (layer(left) @ right).sum().backward()

    counter = FlopCounterMode(display=False)
    with counter:
        work()
    trace = torch_profiler()
    with trace:
        with torch.profiler.record_function("stoker/update"):
            work()
        torch.mm(torch.ones(2, 3), torch.ones(3, 4), out=torch.empty(2, 4))
    found = executed_flops(events_of(trace))
    assert found == {"update": counter.get_total_flops(), "other": 2 * 2 * 3 * 4}


def test_the_real_trace_knows_causal_attention_and_its_backward() -> None:
    heads = torch.randn(1, 2, 6, 8, requires_grad=True)
    trace = torch_profiler()
    with trace:
        torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()
    triangle = 2 * 21  # heads x pairs
    assert sum(executed_flops(events_of(trace)).values()) == triangle * 4 * 8 + triangle * 10 * 8
