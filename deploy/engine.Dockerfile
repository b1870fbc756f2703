# vLLM with the encoder-cache connector, for encode, prefill and decode instances. Of this project it has only the
# distribution ec-store. Build it in the root of the repository:
#     docker build --file deploy/engine.Dockerfile --tag epd-engine .
# This line is the one place that sets the default release; docs/compatibility.md has the rule.
ARG VLLM=v0.32.0
ARG BASE=vllm/vllm-openai:${VLLM}

FROM ${BASE} AS wheel
COPY ec_store /src
RUN uv build --wheel --out-dir /wheels /src

FROM ${BASE}
# The build fails if it would have to change a package that vLLM depends on.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    uv pip freeze --system | grep == > /tmp/theirs \
    && uv pip install --system --no-cache --constraints /tmp/theirs "$(ls /wheels/ec_store-*.whl)[redis]" \
    && rm /tmp/theirs
