#!/usr/bin/env bash
# The GPU bench, in under eight minutes: bench/gpu.sh [folder for gpu.md and gpu.json] [--cpu-rehearsal]
# PYTHON: an interpreter with torch (CUDA build) and stoker's dependencies; the repository's own .venv is tried first.
set -euo pipefail
cd "$(dirname "$0")/.."
out=gpu
if [ $# -gt 0 ] && [ "${1#--}" = "$1" ]; then
  out=$1
  shift
fi
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
fi
export PYTHONPATH="$PWD/src:$PWD" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
exec timeout 480 "$PYTHON" -m bench.gpu --out "$out" "$@"
