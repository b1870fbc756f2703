#!/usr/bin/env bash
# Builds the wheels and sdists of both distributions into dist/, checks them, and tests what they install.
#
#   scripts/wheels.sh                                   # and tests the store alone, and both beside the vLLM of .venv
#   scripts/wheels.sh python3.11 python3.12 python3.13  # and runs the quick tests, in a new environment of each Python
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK=1
here=$PWD
export WHEELS=$here/dist
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# Each wheel is built from its sdist.
build() {
    "$1" -m venv "$folder/tools"
    "$folder/tools/bin/pip" install --quiet build twine
    rm -rf "$WHEELS"
    for project in ec_store .; do
        "$folder/tools/bin/python" -m build --outdir "$WHEELS" "$project" >"$folder/build.log" 2>&1 ||
            { cat "$folder/build.log"; exit 1; }
    done
    "$folder/tools/bin/twine" check --strict "$WHEELS"/*
}

# The files of the checkout without its packages, so that tests import the installed ones.
copy_tests() {
    mkdir "$folder/copy"
    git ls-files -z --cached --others --exclude-standard -- . ':!epd' ':!ec_store' |
        tar --create --null --files-from - | tar --extract --directory "$folder/copy"
}

# Tests of the repository and not of the packages, and those that need vLLM or a browser.
left_out=(
    tests/compat tests/deploy tests/docs tests/scripts tests/security/test_documents.py
    tests/e2e tests/gpu tests/ui/test_page.py tests/ec_store/vllm_connector tests/vllm_sources tests/vllm_wire
)

test_on() {
    local started=$SECONDS environment=$folder/${1##*/}
    "$1" -m venv "$environment"
    "$environment/bin/pip" install --quiet "$WHEELS"/ec_store-*.whl "$(echo "$WHEELS"/epd_proxy-*.whl)[test]"
    "$environment/bin/pip" check
    echo "$("$1" --version): installed after $((SECONDS - started)) s"
    (
        cd "$folder/copy"
        PATH=$environment/bin:$PATH
        epd --help >/dev/null
        ec-store --help >/dev/null
        epd up --model Qwen/Qwen2.5-VL-3B-Instruct --device cpu --dry-run >/dev/null
        PYTHONDONTWRITEBYTECODE='' python -m pytest -m "not full" --hypothesis-profile quick -n 4 "${left_out[@]/#/--ignore=}"
        python -m pytest tests/packaging
    )
    rm -rf "$environment"
    echo "$("$1" --version): $((SECONDS - started)) s"
}

if [ $# = 0 ]; then
    ./scripts/setup.sh
    build .venv/bin/python
    .venv/bin/python -m pytest tests/packaging
    exit
fi
build "$1"
copy_tests
for python; do
    test_on "$python"
done
