#!/usr/bin/env bash
# What only a GPU can settle, on one GPU in some minutes, without a download: outputs/gpu_check.json and a line a check.
# Without a GPU the same code runs small: launch/gpu_check.sh --device cpu --tiny. README.md here says what each settles.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-.venv/bin/python}" -m tests.gpu_check "$@"
