# syntax=docker/dockerfile:1
# The control plane without torch: wheels are built in one stage, installed in the next. For amd64 and arm64 alike: what it
# requires has wheels for both, so that nothing is compiled but the solver's kernels.
# A tag moves; pin it with --build-arg PYTHON_IMAGE=python:3.12-slim@sha256:...
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --wheel-dir /wheels './packaging/eplb-core[planner,wire]' '.[kubernetes]' \
    && pip wheel --no-cache-dir --no-deps --wheel-dir /agent ./packaging/eplb-core ./packaging/eplb-agent

FROM ${PYTHON_IMAGE}
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index --find-links /wheels 'eplb-service[kubernetes]'
# For engines' pods, which install it in an init container.
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
# Kernels for this build host's processor; another one compiles its own on first use.
RUN eplb warmup
VOLUME /var/lib/eplb
EXPOSE 50551 9464
STOPSIGNAL SIGTERM
# Elsewhere than on a processor like the build host's, kernels are compiled first; who is healthy sooner is so at once.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "/usr/local/bin/eplb-healthcheck"]
ENTRYPOINT ["eplb"]
CMD ["serve"]
