"""What every bench needs: arguments, a run in its own process, and an honest last line."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["ROOT", "arguments", "finish", "median_and_spread", "side_by_side", "stoker_train", "workspace"]

ROOT = Path(__file__).resolve().parent.parent
Job = TypeVar("Job")
Result = TypeVar("Result")


def arguments(description: str) -> argparse.Namespace:
    """`--quick`: the same comparison, smaller."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="the same comparison, smaller")
    return parser.parse_args()


def workspace(name: str) -> Path:
    """A folder of its own for the bench's runs; left behind, so that odd figures can be looked into."""
    return Path(tempfile.mkdtemp(prefix=f"stoker-{name}-"))


def stoker_train(run_file: Path, overrides: Sequence[str], *, resume: bool = False) -> subprocess.CompletedProcess[str]:
    """`stoker train` in a process of its own, at the repository's root."""
    command = [sys.executable, "-m", "stoker.cli", "train", str(run_file), *overrides, "--quiet"]
    if resume:
        command.append("--resume")
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=3600, env=os.environ, check=False)


def side_by_side(run: Callable[[Job], Result], jobs: Sequence[Job]) -> list[Result]:
    """`run` of every job, in order, where each starts processes of its own: as many at once as there are cores.

    One thread each: that takes less time than all cores on one run after the other. The first error ends all.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        started = [pool.submit(run, job) for job in jobs]
        try:
            return [one.result() for one in started]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def median_and_spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def finish(result: Mapping[str, Any]) -> None:
    """The bench's last line."""
    print(json.dumps(result))
