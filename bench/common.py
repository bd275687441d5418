"""What every bench needs: arguments, a run in its own process, and an honest last line."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "arguments", "finish", "median_and_spread", "stoker_train", "workspace"]

ROOT = Path(__file__).resolve().parent.parent


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


def median_and_spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def finish(result: Mapping[str, Any]) -> None:
    """The bench's last line."""
    print(json.dumps(result))
