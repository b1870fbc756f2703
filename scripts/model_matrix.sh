#!/usr/bin/env bash
# Serves every tiny model by real engines, compares the answers with one engine's, and writes
# docs/models.md: --help
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/setup.sh
exec .venv/bin/python scripts/model_matrix.py "$@"
