#!/usr/bin/env bash
# Starts a real stack on this machine's CPU and sends a picture twice: --help
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # its engines compile what setup.sh has not
./scripts/setup.sh demo
exec .venv/bin/python scripts/demo.py "$@"
