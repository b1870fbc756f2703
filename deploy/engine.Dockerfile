# vLLM with the encoder-cache connector, for encode, prefill and decode instances.
# Build it in the root of the repository:
#     docker build --file deploy/engine.Dockerfile --tag epd-engine .
# v0.32.0 is run in the tests, on the CPU; v0.33.0 is contract-tested (docs/compatibility.md).
ARG VLLM=v0.32.0
FROM vllm/vllm-openai:${VLLM}
COPY pyproject.toml README.md LICENSE /src/
COPY epd /src/epd
COPY ec_store /src/ec_store
# The build fails if it would have to change a package that vLLM depends on.
RUN uv pip freeze --system | grep == > /tmp/theirs \
    && uv pip install --system --no-cache --constraints /tmp/theirs /src \
    && rm -r /src /tmp/theirs
