#!/usr/bin/env bash
# Style, types, who may import whom, a test for every fault, and the reference of metrics.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/setup.sh
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy
.venv/bin/lint-imports
.venv/bin/python scripts/fault_table.py --check
.venv/bin/python scripts/metrics_reference.py --check
