# syntax=docker/dockerfile:1
# Image of the service, without torch, for amd64 and arm64. The first stage builds the wheels, and the second installs them.
# All dependencies have wheels for both architectures, so only the solver's kernels are compiled.
# A tag can change. To pin it, pass --build-arg PYTHON_IMAGE=python:3.12-slim@sha256:...
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --wheel-dir /wheels './packaging/eplb-core[planner,wire]' '.[kubernetes]' \
    && pip wheel --no-cache-dir --no-deps --wheel-dir /agent ./packaging/eplb-core ./packaging/eplb-agent

FROM ${PYTHON_IMAGE}
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index --find-links /wheels 'eplb-service[kubernetes]'
# The agent's wheels. Pods of engines install them in an init container.
COPY --from=build /agent/ /usr/local/share/eplb/
COPY deploy/healthcheck.py /usr/local/bin/eplb-healthcheck
RUN useradd --system --uid 10001 --home-dir /var/lib/eplb --create-home eplb \
    && install --directory --owner=eplb --group=eplb /var/cache/eplb
USER 10001
WORKDIR /var/lib/eplb
ENV PYTHONUNBUFFERED=1 \
    NUMBA_CACHE_DIR=/var/cache/eplb \
    EPLB_LISTEN=0.0.0.0:50551 \
    EPLB_METRICS=0.0.0.0:9464 \
    EPLB_HEALTH=127.0.0.1:50552 \
    EPLB_STORE=/var/lib/eplb/eplb-state.sqlite3
# Compile the kernels for the build host's CPU. On another CPU, the service compiles them again when it starts.
RUN eplb warmup
VOLUME /var/lib/eplb
EXPOSE 50551 9464
STOPSIGNAL SIGTERM
# The start period covers the compilation of kernels on another CPU. It does not delay a container that is healthy earlier.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "/usr/local/bin/eplb-healthcheck"]
ENTRYPOINT ["eplb"]
CMD ["serve"]
