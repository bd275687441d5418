"""What a trace says of each phase: operators by their own time, and the FLOPs that their shapes give away.

Pure functions on `Event`s, so that any trace can be read; `engine.profiling` takes them from torch's profiler.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["Event", "Operator", "by_phase", "executed_flops", "flops_of", "phase_at", "self_times", "switches"]

MARK = "stoker/"
"""Events of this prefix are phases, the rest operators."""


class Event(NamedTuple):
    """A stretch of one thread's or device queue's time. Times in ns, on one clock."""

    name: str
    start: int
    end: int
    thread: int = 0
    shapes: Sequence[Sequence[int]] = ()
    """Of an operator's arguments, empty for those that are no tensors."""
    arguments: Sequence[object] = ()
    """Their values, None for tensors."""
    id: int = 0
    launched_by: int | None = None
    """None: it ran on the CPU. Else the id of the operator that launched this kernel."""


class Operator(NamedTuple):
    """All calls of one name in one phase."""

    name: str
    seconds: float
    """Its own: without the operators inside it; on an accelerator that of its kernels."""
    calls: int
    """On an accelerator the kernels launched."""


def by_phase(events: Sequence[Event]) -> dict[str, list[Operator]]:
    """Operators of each phase, the longest first. Outside every mark the phase is "other".

    Where there are kernels, they alone count: the CPU's time only says when they were launched.
    """
    changes = switches(events)
    totals: defaultdict[str, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for name, at, nanoseconds in _own_times(events):
        entry = totals[phase_at(changes, at)][name]
        entry[0] += nanoseconds
        entry[1] += 1
    return {
        phase: sorted((Operator(n, ns / 1e9, calls) for n, (ns, calls) in found.items()), key=lambda o: -o.seconds)
        for phase, found in totals.items()
    }


def executed_flops(events: Iterable[Event]) -> dict[str, int]:
    """FLOPs by phase of the products in the trace. Kernels replayed from a graph, or fused, leave no shapes."""
    events = list(events)
    changes = switches(events)
    totals: defaultdict[str, int] = defaultdict(int)
    for event in events:
        if flops := flops_of(event):
            totals[phase_at(changes, event.start)] += flops
    return dict(totals)


def self_times(events: Sequence[Event]) -> list[int]:
    """ns of each event, without the events of its thread inside it."""
    own = [event.end - event.start for event in events]
    order = sorted(range(len(events)), key=lambda i: (events[i].thread, events[i].start, -events[i].end))
    stack: list[int] = []
    for i in order:
        while stack and (events[stack[-1]].thread, events[stack[-1]].end) <= (events[i].thread, events[i].start):
            stack.pop()
        if stack:
            own[stack[-1]] -= events[i].end - events[i].start
        stack.append(i)
    return own


def switches(events: Iterable[Event]) -> list[tuple[int, str]]:
    """When which phase began, in order; an inner phase interrupts the outer one."""
    marks = sorted((e for e in events if e.name.startswith(MARK)), key=lambda e: (e.start, -e.end))
    changes, stack = [(-1, "other")], list[tuple[int, str]]()

    def close(until: int) -> None:
        while stack and stack[-1][0] <= until:
            end, _ = stack.pop()
            changes.append((end, stack[-1][1] if stack else "other"))

    for mark in marks:
        close(mark.start)
        stack.append((mark.end, mark.name.removeprefix(MARK)))
        changes.append((mark.start, stack[-1][1]))
    close(max((mark.end for mark in marks), default=0))
    return changes


def phase_at(changes: Sequence[tuple[int, str]], at: int) -> str:
    """The phase at a moment, of `switches`."""
    return changes[bisect_right(changes, at, key=lambda change: change[0]) - 1][1]


def _own_times(events: Sequence[Event]) -> Iterator[tuple[str, int, int]]:
    """(operator, when it was called, ns of its own); a kernel that no operator launched goes by its own name."""
    operators = [event for event in events if event.launched_by is None and not event.name.startswith(MARK)]
    kernels = [event for event in events if event.launched_by is not None]
    if not kernels:
        yield from ((e.name, e.start, own) for e, own in zip(operators, self_times(operators), strict=True))
    by_id = {operator.id: operator for operator in operators}
    for kernel in kernels:
        launcher = by_id.get(kernel.launched_by or 0, kernel)
        yield launcher.name, launcher.start, kernel.end - kernel.start


# -- FLOPs from shapes -------------------------------------------------------------------------------

_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1}
"""Where the first of the two factors stands among the arguments."""
_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (0, 4),
    "aten::_scaled_dot_product_flash_attention": (0, 4),
    "aten::_scaled_dot_product_efficient_attention": (0, 6),
    "aten::_scaled_dot_product_cudnn_attention": (0, 6),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (1, 7),
    "aten::_scaled_dot_product_flash_attention_backward": (1, 11),
    "aten::_scaled_dot_product_efficient_attention_backward": (1, 11),
    "aten::_scaled_dot_product_cudnn_attention_backward": (1, 14),
}
"""Where the queries stand (1: after the output's gradient, in a backward), and where `is_causal`."""


def flops_of(event: Event) -> int:
    """FLOPs of a product or an attention kernel, 0 for everything else.

    An attention kernel told to be causal does the lower triangle, else the whole rectangle. Its backward
    recomputes the scores: five products instead of two.
    """
    if event.name in _PRODUCTS:
        first = _PRODUCTS[event.name]
        *batch, m, k = event.shapes[first]
        n = event.shapes[first + 1][-1]
        return 2 * (batch[0] if batch else 1) * m * k * n
    if event.name not in _ATTENTION:
        return 0
    query, causal = _ATTENTION[event.name]
    batch_size, heads, queries, width = event.shapes[query]
    keys, value_width = event.shapes[query + 1][2], event.shapes[query + 2][3]
    pairs = batch_size * heads * queries * keys
    if len(event.arguments) > causal and event.arguments[causal] is True:
        pairs = batch_size * heads * sum(min(t + 1, keys) for t in range(queries))
    return 2 * pairs * (3 * width + 2 * value_width if query else width + value_width)
