#!/usr/bin/env bash
# Runs every test: first those without engines, which often wait, in five processes; then the ones on
# real vLLM, in three. With arguments, which go to pytest, it is one run of what they choose.
#
#   scripts/test.sh            # all of them
#   scripts/test.sh --quick    # without those marked `full`, and with fewer examples of each property
#   scripts/test.sh tests/api  # what pytest is told
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/setup.sh
# The hundreds of programs that tests start would each compile this project's modules.
export PYTHONDONTWRITEBYTECODE=
if [ "${1-}" = --quick ]; then
    # Each of the processes would import these, of which no test is quick or none runs without a GPU.
    exec .venv/bin/python -m pytest -m "not full" --hypothesis-profile quick -n 4 --ignore tests/e2e \
        --ignore tests/gpu --ignore tests/ui/test_page.py --ignore tests/ec_store/vllm_connector \
        --ignore tests/vllm_wire "${@:2}"
fi
./scripts/fetch_multi_turn.sh ||
    echo "vLLM's source could not be fetched and unpacked, which a test in tests/e2e/test_conversations.py needs"
# The release before or after the installed one, whose sources the contract tests read (docs/compatibility.md).
other=0.33.0
./scripts/check_vllm.sh --unpack "$other" ||
    echo "vLLM $other could not be fetched and unpacked: the contract tests read the installed release alone"
[ $# = 0 ] || exec .venv/bin/python -m pytest "$@"
failed=0
# Test processes fork vLLM from this server, which ends with this script.
forking=$(mktemp -d)
trap 'rm -rf "$forking"' EXIT
export VLLM_FORK_SERVER=$forking/server
tail --pid=$$ -f /dev/null | .venv/bin/python -m scripts.forked "$VLLM_FORK_SERVER" &
.venv/bin/python -m pytest --ignore tests/e2e -n 5 || failed=$?
[ $failed != 2 ] || exit 2 # interrupted
# The contract tests, in one process, import another vLLM. They take less time than the tests with engines.
log=.run/check_vllm.log
checking=
if [ -d ".run/vllm-sources/$other" ]; then
    ./scripts/check_vllm.sh "$other" > "$log" 2>&1 &
    checking=$!
    trap 'rm -rf "$forking"; [ -z "$checking" ] || kill $checking 2> /dev/null || true' EXIT
fi
.venv/bin/python -m pytest tests/e2e -n 3 || failed=$?
if [ -n "$checking" ]; then
    wait $checking || failed=$?
    cat "$log"
    checking=
fi
exit $failed
