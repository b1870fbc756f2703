# vLLM with the encoder-cache connector, for encode, prefill and decode instances.
# Build it in the root of the repository:
#     docker build --file deploy/engine.Dockerfile --tag epd-engine .
ARG VLLM=v0.32.0
FROM vllm/vllm-openai:${VLLM}
COPY pyproject.toml README.md LICENSE /src/
COPY epd /src/epd
COPY ec_store /src/ec_store
# vLLM's own packages stay as they are: a build that would have to change one fails.
RUN python3 -m pip freeze | grep --ignore-case '^[a-z0-9._-]*==' > /tmp/theirs \
    && python3 -m pip install --no-cache-dir --break-system-packages --constraint /tmp/theirs /src \
    && rm -r /src /tmp/theirs
