"""`update.tokens_per_microbatch = "auto"`: the fit that gives a run its number, under what memory there is."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from stoker.batch.certificate import Fit, Trial
from stoker.batch.fitting import fit
from stoker.batch.target import Maker
from stoker.config import load as config_load
from stoker.config.schema import RunConfig
from stoker.engine.local.load import pick_device
from stoker.errors import RunError
from stoker.record.memory import address_space_left, available_bytes

__all__ = ["explained", "fit_microbatch", "host_limit"]

RESERVE = 0.1
"""Share of the available memory that isn't counted on: for what other programs take while the run goes on."""
PRECISION = 0.05
"""To which the limit is looked for: freed memory stays with the process and has holes (heap.py), so that the peaks of
equal steps differ by as much on a CPU, and a step of a run takes long.
"""
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}
"""Else as in the run, which keeps freed memory (heap.py) unless the user's environment has settings of its own."""
DEADLINE_SECONDS = 3600.0
"""Of one trial. On a CPU a step of a large run takes minutes, and a trial has several."""


def fit_microbatch(
    config: RunConfig, prompt_tokens: int, on_trial: Callable[[Trial, int | None], None] | None = None
) -> Fit:
    """The most padded tokens of a micro-batch with which the steps of a run fit, prompts of up to `prompt_tokens`.

    `on_trial`: see `stoker.batch.fit.fit`. Raises RunError that says what to lower where nothing fits.
    """
    on_cpu = pick_device(config.model.device).type == "cpu"
    task = config.task.model_copy(update={"max_prompt_tokens": prompt_tokens})
    with tempfile.TemporaryDirectory(prefix="stoker-fit-") as folder:
        run_file = Path(folder) / "run.toml"
        run_file.write_text(config_load.to_toml(config.model_copy(update={"task": task})), encoding="utf-8")
        try:
            return fit(
                Maker("stoker.engine.target:make", (str(run_file),)),
                limit_bytes=host_limit() if on_cpu else None,
                steps=2,  # the workload's optimizers hold their states from the first on
                precision=PRECISION,
                deadline_seconds=DEADLINE_SECONDS,
                environment=ENVIRONMENT,
                on_trial=on_trial,
            )
        except RunError as error:
            raise RunError(
                f"update.tokens_per_microbatch = 'auto': no size was found ({error}). Where memory is short lower "
                "sampling.concurrent_samples, sampling.max_new_tokens, task.max_prompt_tokens or "
                "update.logits_per_chunk, set update.activation_gib = 0, lora.rank or kl.coefficient = 0, or take "
                "model.dtype = 'bfloat16'"
            ) from error


def explained(found: Fit) -> str:
    """What was found and why, for the user of a run."""
    limit = "the device's memory" if found.limit_bytes is None else f"{found.limit_bytes / 2**30:.3g} GiB"
    ends = {
        "memory": "ran out of memory",
        "host memory": "was ended by the operating system for want of memory",
        "deadline": f"wasn't done within {DEADLINE_SECONDS:.0f} s a trial",
    }
    most = f"{found.without_headroom:,} tokens ran under {limit}"
    if found.bound in ends:
        reason = f"{most}, {found.first_failed:,} {ends[found.bound]}"
    else:
        reason = f"{most}, which is a whole update"
    spent = sum(trial.seconds for trial in found.trials)
    return (
        f"update.tokens_per_microbatch = {found.size}: {reason}; {found.headroom:.0%} of it stay free "
        f"({len(found.trials)} trials in {spent:.0f} s; fit.json has them all). The run keeps this number"
    )


def host_limit() -> int:
    """Bytes that a run may take on a CPU: what RLIMIT_AS leaves this process where it is set, else a share of what is
    available, in its container where that has less.
    """
    left = address_space_left()
    return left if left is not None else int(available_bytes() * (1 - RESERVE))
