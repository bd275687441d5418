"""`stoker train --profile N`: a few steps under torch's profiler, as a trace and as figures.

A step's books, draws and weights are what they would be without it: the ports are counted, the clock's phases are
marked in the trace, and the device is waited for at their borders, so that a phase's seconds are its own.
"""

import gzip
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, Self, cast

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import PreTrainedModel

from stoker.batch.flops import Work
from stoker.batch.speed import matmul_peak
from stoker.engine.counting import CountingLearner, CountingSampler, WorkTally, model_work
from stoker.engine.operators import MARK, Event, by_phase, executed_flops
from stoker.record.disk import write_json
from stoker.rl.ports import Learner, Role, Sampler
from stoker.rl.run import Run

__all__ = ["Profiler", "events_of", "torch_profiler"]

TOP = 8
"""Operators listed of each phase."""
HIDDEN = 0.8
"""Executed FLOPs below this share of the algorithmic ones: kernels hide their shapes. A little less is right: the
sampler leaves out what no answer needs of a prompt's last layer."""


class Profiler:
    """A watcher that profiles the steps after the first it sees, and a context that ends what the run left unended."""

    def __init__(self, run: Run, model: PreTrainedModel, folder: Path, steps: int) -> None:
        self._run, self._model, self._folder, self._steps = run, model, folder, steps
        self._trace: profile | None = None
        self._ports, self._around = (run.sampler, run.learner), run.clock.around
        self._tally = WorkTally(lambda: run.clock.current)
        self._records: list[Mapping[str, float]] = []
        self._first_step_seconds = 0.0
        self._before: dict[str, float] = {}
        self._done = False
        for name in ("profile.json", "trace.json.gz"):  # of an earlier attempt
            (folder / name).unlink(missing_ok=True)

    def __call__(self, record: Mapping[str, float]) -> None:
        """A step has ended: begin after the first, end after the last."""
        if self._done:
            return
        if self._trace is None:
            self._first_step_seconds = record["time/step"]
            self._begin()
            return
        self._records.append(record)
        if len(self._records) == self._steps:
            self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._done:
            return
        if self._records and kind is None:
            self._run.display.warn(f"the run ended after {len(self._records)} of the {self._steps} steps to profile")
            self._finish()
            return
        if self._trace is not None:
            self._end(self._trace)
        if kind is None:
            self._run.display.warn("nothing was profiled: the run ended before its second step was done")

    def _begin(self) -> None:
        run, work = self._run, model_work(self._model)
        works: dict[Role, Work] = {"policy": work}
        if run.config.algorithm.needs_critic:
            works["critic"] = replace(work, head=0)
        run.sampler = cast("Sampler", CountingSampler(self._ports[0], work, self._tally))
        run.learner = cast("Learner", CountingLearner(self._ports[1], works, self._tally))
        run.clock.around = self._mark
        self._trace = torch_profiler()
        self._trace.start()
        self._before = run.clock.totals()

    @contextmanager
    def _mark(self, phase: str) -> Iterator[None]:
        with record_function(MARK + phase):
            yield
            if self._model.device.type != "cpu":
                torch.accelerator.synchronize(self._model.device)

    def _end(self, trace: profile) -> None:
        self._done = True
        trace.stop()
        self._run.clock.around = self._around
        self._run.sampler, self._run.learner = self._ports

    def _finish(self) -> None:
        assert self._trace is not None
        now, trace = self._run.clock.totals(), self._trace
        self._end(trace)
        seconds = {phase: total - self._before.get(phase, 0.0) for phase, total in now.items()}
        count = len(self._records)
        self._run.display.say(f"profiled {count} step{'' if count == 1 else 's'}; writing the trace")
        try:
            _write_trace(trace, self._folder / "trace.json.gz")
            write_json(self._folder / "profile.json", self._report(seconds, events_of(trace)))
        except OSError as error:  # a full disk must not end a run that doesn't need the profile
            self._run.display.warn(f"the profile could not be written to {self._folder}: {error.strerror or error}")

    def _report(self, seconds: Mapping[str, float], events: list[Event]) -> dict[str, Any]:
        """profile.json: rates are per second of the phase, shares of the measured peak."""
        device, dtype = self._model.device, self._model.dtype
        peak = matmul_peak(device, dtype)
        operators, executed = by_phase(events), executed_flops(events)
        phases = {}
        for phase, spent in seconds.items():
            if spent <= 0:
                continue
            flops, done = self._tally.flops.get(phase, 0), executed.get(phase, 0)
            phases[phase] = {
                "seconds": spent,
                "tokens": self._tally.tokens.get(phase, 0),
                "algorithmic_flops": flops,
                "executed_flops": done,
                "mfu": flops / spent / peak if flops else None,
                "hfu": done / spent / peak if flops and done > HIDDEN * flops else None,
                "in_operators": sum(operator.seconds for operator in operators.get(phase, [])),
                "operators": [operator._asdict() for operator in operators.get(phase, [])[:TOP]],
            }
        drawn = sum(record["sample/tokens"] for record in self._records)
        padding = [record["batch/padding"] for record in self._records if "batch/padding" in record]
        return {
            "steps": [int(record["step"]) for record in self._records],
            "seconds": sum(seconds.values()),
            "unprofiled_step_seconds": self._first_step_seconds,
            "device": str(device),
            "dtype": str(dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "matmul_peak_flops": peak,
            "tokens_per_second": drawn / sum(seconds.values()),
            "padding": mean(padding) if padding else None,
            "phases": phases,
        }


def torch_profiler() -> profile:
    """Of the CPU and, where there is one, the accelerator; with shapes, from which FLOPs are counted."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it would write its own progress between a run's lines
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    return profile(activities=activities, record_shapes=True)


def events_of(trace: profile) -> list[Event]:
    """The stretches of a stopped profiler. (Its own list of them takes a hundred times as long to build.)"""
    results = trace.profiler.kineto_results if trace.profiler is not None else None
    assert results is not None
    events = []
    for event in results.events():
        on_cpu, linked, name = event.device_type().name == "CPU", event.linked_correlation_id(), event.name()
        # Of the CPU: operators and marks, not the runtime's calls inside. Of a device: kernels, not marks' shadows.
        if event.is_hidden_event() or on_cpu == (linked > 0) or (not on_cpu and name.startswith(MARK)):
            continue
        shapes, arguments = (event.shapes(), event.concrete_inputs()) if on_cpu else ((), ())
        times, thread, number = (event.start_ns(), event.end_ns()), event.start_thread_id(), event.correlation_id()
        events.append(Event(name, *times, thread, shapes, arguments, number, None if on_cpu else linked))
    return events


def _write_trace(trace: profile, path: Path) -> None:
    """Chrome's format, which https://ui.perfetto.dev opens."""
    plain = path.with_suffix("")
    try:
        trace.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=4) as target:
            shutil.copyfileobj(source, target)
    finally:
        plain.unlink(missing_ok=True)
