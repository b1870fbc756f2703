#!/usr/bin/env bash
# Measures the proxy's own cost, and fails if it is much higher than the recorded one.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/setup.sh
exec .venv/bin/python -m scripts.overhead --scenario text-json text-sse picture-100kb epd-sse \
    --rounds 3 --seconds 1 \
    --against "relay=.venv/bin/python scripts/overhead/relay.py {port} {decode_urls}" \
    --check docs/benchmarks/overhead*.json "$@"
