#!/usr/bin/env bash
# Builds the images of deploy/docker/Dockerfile, brings deploy/docker-compose.yml up with them, and tests the cluster.
#
# Needs an engine with a compose command: docker with `docker compose`, or podman (with podman-compose, or pip to get
# it), and the images docker.io/library/{python:3.11-slim-bookworm, debian:bookworm-slim}, pulled or made by hand.
# Memory: 4 GB. Ports: free ones of 127.0.0.1.
#   IMAGE_BUILD      how to build, called as: $IMAGE_BUILD TAG FOLDER -f FILE --target NAME [ARG…]; default: the engine's
#                    own build. For a machine whose package registries need certificates or settings inside the build.
#   TORCH_CPU_INDEX  where pip finds torch for the CPU; empty or unset: where pip's settings say
#   arguments        go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if docker compose version >/dev/null 2>&1; then
    engine=docker compose="docker compose"
elif command -v podman >/dev/null; then
    engine=podman compose=podman-compose
    if ! command -v podman-compose >/dev/null; then
        python3 -m venv "$work/venv"
        "$work/venv/bin/pip" install --quiet --disable-pip-version-check podman-compose
        compose=$work/venv/bin/podman-compose
    fi
else
    sed -n '2,10p' "$0" >&2
    echo "test-compose: no container engine here: install docker with its compose plugin, or podman" >&2
    exit 2
fi

build() {  # TAG FOLDER ARG…
    echo "== building $1" >&2
    local log=$work/build.log
    if [ -n "${IMAGE_BUILD:-}" ]; then
        $IMAGE_BUILD "$@" >"$log" 2>&1 || { tail -n 40 "$log" >&2; exit 1; }
    else
        "$engine" build -t "$1" "${@:3}" "$2" >"$log" 2>&1 || { tail -n 40 "$log" >&2; exit 1; }
    fi
}

torch_index=()
if [ -n "${TORCH_CPU_INDEX+set}" ]; then torch_index=(--build-arg "TORCH_CPU_INDEX=$TORCH_CPU_INDEX"); fi
build localhost/baton-router:test . -f deploy/docker/Dockerfile --target router
build localhost/baton:test . -f deploy/docker/Dockerfile --target worker --build-arg PROFILE=cpu "${torch_index[@]}"
for name in redis prometheus; do
    build "localhost/baton-test-$name" tests/compose -f tests/compose/Dockerfile.services --target "$name"
done
"$engine" images --filter reference='localhost/baton*' --format '{{.Repository}} {{.Size}}' >&2

COMPOSE_TEST_ENGINE=$engine COMPOSE_TEST_COMMAND=$compose .venv/bin/python -m pytest tests/compose "$@"
