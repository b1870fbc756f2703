#!/usr/bin/env bash
# Unpacks vLLM's multi-turn benchmark, which is in its source alone, into .venv/share. Does nothing where it
# is there. Nothing is built: pip asks only for the source's own metadata, which is told of no device, and to
# leave the suffix off its version.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.33.0
to=.venv/share/vllm-multi-turn-$version
[ ! -d "$to" ] || exit 0

mkdir -p .venv/share
folder=$(mktemp -d -p .venv/share)  # beside it: to be moved at once, or not at all
trap 'rm -rf "$folder"' EXIT
VLLM_TARGET_DEVICE=empty VLLM_SKIP_VERSION_SUFFIX=1 .venv/bin/python -m pip download --quiet \
    --disable-pip-version-check --no-deps --no-build-isolation --no-binary vllm --dest "$folder" "vllm==$version"
tar -xzf "$folder/vllm-$version.tar.gz" -C "$folder" "vllm-$version/benchmarks/multi_turn"
mv "$folder/vllm-$version/benchmarks/multi_turn" "$to"
