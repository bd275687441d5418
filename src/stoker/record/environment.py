"""What a run ran on: hardware, threads, versions. Says after a resume whether bit-exactness can be expected.

Only named environment variables are recorded, so that no key or token can slip into a run folder.
"""

import os
import platform
import socket
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from stoker.record.memory import total_bytes

__all__ = ["collect", "cpu", "differences"]

_PACKAGES = ("stoker", "torch", "transformers", "tokenizers", "safetensors", "numpy", "peft", "vllm")
_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_CBWR",
    "KMP_AFFINITY",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_TF32_OVERRIDE",
    "PYTHONHASHSEED",
)
_ISA_PREFIXES = ("sse4", "avx", "fma", "f16c", "bmi", "amx", "asimd", "sve", "sme", "bf16", "i8mm")
"""CPU flags by which math libraries choose their kernels, and with them the order of additions."""
_EXACT = ("machine", "cpu", "gpus", "threads", "sampling", "update", "variables", "versions")
"""What must agree for the same bits; where the run ran and how much memory it had don't matter."""


def collect(*, device: str, threads: int, sampling: str, update: str) -> dict[str, Any]:
    """Facts for environment.json and checkpoint manifests. `threads`: the CPU threads that compute uses; `sampling`,
    `update`: what computes a token, and norms, gates and attention of an update.
    """
    model, flags = cpu()
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": {"model": model, "cores": psutil.cpu_count(logical=False), "logical": psutil.cpu_count(), "isa": flags},
        "memory_bytes": total_bytes(),
        "device": device,
        "gpus": _gpus(),
        "threads": threads,
        "sampling": sampling,
        "update": update,
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "versions": {"python": platform.python_version(), **_versions()},
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What changed among the things that decide the bits of a result; empty: a resume is bit-exact."""
    lines: list[str] = []
    for key in _EXACT:
        lines += _differ(key, before.get(key), now.get(key))
    lines += _differ("device", before.get("device"), now.get("device"))
    return lines


def _differ(name: str, before: Any, now: Any) -> list[str]:
    if before == now:
        return []
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        keys = [*before, *(key for key in now if key not in before)]
        return [line for key in keys for line in _differ(f"{name}.{key}", before.get(key), now.get(key))]
    if name == "cpu.isa" and isinstance(before, list) and isinstance(now, list):
        lost, gained = sorted(set(before) - set(now)), sorted(set(now) - set(before))
        changes = [f"{word} {', '.join(flags)}" for word, flags in (("lost", lost), ("gained", gained)) if flags]
        return [f"cpu.isa: {'; '.join(changes)}"]
    return [f"{name}: {_text(before)} -> {_text(now)}"]


def _text(value: Any) -> str:
    return "not set" if value is None else str(value)


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # absent packages are simply not listed
    return found


def cpu() -> tuple[str, list[str]]:
    """Model name and the instruction sets that matter, from the system's own description."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or sys.platform, []
    fields: dict[str, str] = {}
    for line in info.read_text().split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    isa = sorted(flag for flag in flags if flag.startswith(_ISA_PREFIXES))
    return fields.get("model name", platform.machine()), isa


def _gpus() -> list[str]:
    """NVIDIA devices as the driver names them; asking it needs no library."""
    names: list[str] = []
    for info in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        model = next((line for line in info.read_text().splitlines() if line.startswith("Model:")), "")
        names.append(model.partition(":")[2].strip() or "unknown")
    return names
