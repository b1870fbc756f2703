#!/usr/bin/env bash
# Style, types, who may import whom, tests for all faults, references that are made from the code,
# and documents without a broken link.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/setup.sh
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy
.venv/bin/lint-imports
.venv/bin/python scripts/fault_table.py --check
.venv/bin/python scripts/metrics_reference.py --check
.venv/bin/python scripts/config_reference.py --check
site=$(mktemp --directory)
trap 'rm -rf "$site"' EXIT
NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet --site-dir "$site"
