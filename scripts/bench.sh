#!/usr/bin/env bash
# Measures what the proxy itself costs, and fails where that is much more than was recorded.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/setup.sh
exec .venv/bin/epd bench overhead --scenario text-json text-sse picture-100kb epd-sse \
    --rounds 3 --seconds 1 \
    --against "relay=.venv/bin/python scripts/contenders/relay.py {port} {decode_urls}" \
    --check docs/benchmarks/overhead*.json "$@"
