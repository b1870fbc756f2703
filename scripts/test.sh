#!/usr/bin/env bash
# Runs every test, the ones against real vLLM too. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/setup.sh
exec .venv/bin/python -m pytest "$@"
