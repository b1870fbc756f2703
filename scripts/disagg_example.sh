#!/usr/bin/env bash
# Starts a fleet, measures it, sends it a question about a picture in a file, and stops it.
#   disagg_example.sh TOPOLOGY
# Takes the variables of vLLM's examples of the same names: MODEL, GPU_E, ENCODE_PORT, NUM_PROMPTS, …
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
media=$root/examples/media
PATH=$PATH:$root/.venv/bin
command -v epd >/dev/null || { echo "epd is not installed: pip install '$root/ec_store' '$root[vllm]'" >&2; exit 1; }

export MODEL=${MODEL:-Qwen/Qwen2.5-VL-3B-Instruct}
export DEVICE_PLATFORM=${DEVICE_PLATFORM:-cuda}
export ENCODE_PORT=${ENCODE_PORT:-19534}
export PREFILL_PORT=${PREFILL_PORT:-19535} PREFILL_DECODE_PORT=${PREFILL_DECODE_PORT:-19535}
export DECODE_PORT=${DECODE_PORT:-19536}
export PROXY_PORT=${PROXY_PORT:-10001}
[ -z "${ENDPOINT_PORT:-}" ] || echo "ENDPOINT_PORT is ignored: PROXY_PORT is the proxy's port, now $PROXY_PORT" >&2
if [ "$DEVICE_PLATFORM" != cpu ]; then
    export MAX_NUM_SEQS=${MAX_NUM_SEQS:-128} MAX_MODEL_LEN=${MAX_MODEL_LEN:-32768}
fi
url=http://127.0.0.1:$PROXY_PORT

epd up --topology "$1" --served-model-name "$MODEL" --allowed-local-media-path "$media" &
up=$!
trap 'kill "$up" 2>/dev/null || true; wait "$up" || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
until curl --fail --silent --output /dev/null "$url/health"; do
    kill -0 "$up" 2>/dev/null || exit 1 # epd up has printed the reason
    sleep 1
done

epd bench serve --url "$url" --model "$MODEL" --num-prompts "${NUM_PROMPTS:-100}"

echo "What is in $media/cat.jpg?"
curl --fail-with-body --silent --show-error "$url/v1/chat/completions" \
    -H 'Content-Type: application/json' -d '{
  "model": "'"$MODEL"'", "max_tokens": 128,
  "messages": [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": [
      {"type": "image_url", "image_url": {"url": "file://'"$media"'/cat.jpg"}},
      {"type": "text", "text": "What is in this image?"}]}]}'
echo
