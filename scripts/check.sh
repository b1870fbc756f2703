#!/usr/bin/env bash
# Checks style, types, import rules, English, that all faults have tests, that generated references are current,
# and that documents have no broken links.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/setup.sh
.venv/bin/ruff format --check .
.venv/bin/ruff check .
# mypy takes as long as all other checks: it has a core to itself.
.venv/bin/mypy &
types=$!
site=$(mktemp --directory)
trap 'kill "$types" 2>/dev/null || true; rm -rf "$site"' EXIT
.venv/bin/lint-imports
.venv/bin/python scripts/language_check.py
.venv/bin/python scripts/fault_table.py --check
.venv/bin/python scripts/recovery_table.py --check
.venv/bin/python scripts/metrics_reference.py --check
.venv/bin/python scripts/model_matrix.py --check
.venv/bin/python scripts/package_table.py --check
.venv/bin/python scripts/published_reports.py --check
.venv/bin/python scripts/config_reference.py --check
NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet --site-dir "$site"
wait "$types"
