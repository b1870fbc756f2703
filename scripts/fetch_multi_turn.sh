#!/usr/bin/env bash
# Unpacks vLLM's multi-turn benchmark, which only its source distribution has, into .venv/share, unless it is
# there already. Nothing is built: pip only reads the source's metadata, for which the variables select no
# device and no version suffix.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.33.0
to=.venv/share/vllm-multi-turn-$version
[ ! -d "$to" ] || exit 0

mkdir -p .venv/share
folder=$(mktemp -d -p .venv/share)  # on the same file system, so that the move is atomic
trap 'rm -rf "$folder"' EXIT
VLLM_TARGET_DEVICE=empty VLLM_SKIP_VERSION_SUFFIX=1 .venv/bin/python -m pip download --quiet \
    --disable-pip-version-check --no-deps --no-build-isolation --no-binary vllm --dest "$folder" "vllm==$version"
tar -xzf "$folder/vllm-$version.tar.gz" -C "$folder" "vllm-$version/benchmarks/multi_turn"
mv "$folder/vllm-$version/benchmarks/multi_turn" "$to"
