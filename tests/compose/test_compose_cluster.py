"""The compose file gives a cluster that answers, is watched, and is shut in; see scripts/test_compose.sh."""

from __future__ import annotations

import json

import pytest

from deploy.healthcheck import WELL, check_grpc
from tests.compose.cluster import DECODE, MODEL, PARTS, PREFILL, ROUTERS, ComposeCluster, poll_until

QUESTION = [{"role": "user", "content": "Explain in three sentences what a relay race is, and who runs in one."}]
SHUT_IN = (*PARTS, "redis", "prometheus")


@pytest.mark.parametrize("router", ROUTERS)
def test_a_router_answers_at_once_and_as_a_stream(cluster: ComposeCluster, router: str) -> None:
    with cluster.client(router) as client:
        whole = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0)
        chunks = list(
            client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0, stream=True)
        )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole.usage.completion_tokens == 24
    assert text == whole.choices[0].message.content
    assert len([chunk for chunk in chunks if chunk.choices[0].delta.content]) > 1
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


@pytest.mark.parametrize("router", ROUTERS)
def test_a_routers_grpc_port_is_open_and_serving(cluster: ComposeCluster, router: str) -> None:
    assert check_grpc(f"grpc://127.0.0.1:{cluster.grpc_ports[router]}") == ""


def test_kv_crosses_the_border_of_containers_by_tcp(cluster: ComposeCluster) -> None:
    """A prompt of its own, which no worker has in its cache, and too long for a decode worker to compute it itself."""
    messages = [{"role": "user", "content": " ".join(f"Word number {i}." for i in range(300))}]
    with cluster.client("router-1") as client:
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4, temperature=0)
    lanes = [line["lanes"] for name in PREFILL for line in cluster.events(name, "transfer channel opened")]
    assert lanes
    assert set(lanes) == {"tcp/eth0"}


def test_prometheus_sees_every_part(cluster: ComposeCluster) -> None:
    def health() -> dict[str, str]:
        page = json.loads(cluster.fetch("router-1", "http://prometheus:9090/api/v1/targets"))
        return {target["labels"]["instance"]: target["health"] for target in page["data"]["activeTargets"]}

    ports = {name: 8000 if name in ROUTERS else 9000 for name in PARTS}
    expected = {**{f"{name}:{port}": "up" for name, port in ports.items()}, "localhost:9090": "up"}
    poll_until(lambda: health() == expected, f"all of Prometheus' targets to be up: {health()}")


@pytest.mark.parametrize("service", [*PARTS, "redis"])
def test_the_health_check_says_well(cluster: ComposeCluster, service: str) -> None:
    """Runs the check that the compose file names, whether or not this engine runs it by itself."""
    form = "{{json .Config.Healthcheck.Test}}"
    test = json.loads(cluster.run_engine("inspect", "--format", form, cluster.container(service)).stdout)
    assert test[0] == "CMD"
    assert cluster.exec(service, *test[1:], check=False).returncode == WELL


@pytest.mark.parametrize("service", SHUT_IN)
def test_a_container_has_no_rights(cluster: ComposeCluster, service: str) -> None:
    status = dict(line.split(":", 1) for line in cluster.exec(service, "cat", "/proc/1/status").stdout.splitlines())
    assert {int(uid) for uid in status["Uid"].split()}.isdisjoint({0})
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"].strip() == "1"
    for folder in ("/", "/usr", "/etc"):
        assert cluster.exec(service, "touch", f"{folder}/x", check=False).returncode != 0


def test_only_routers_are_reachable_from_outside(cluster: ComposeCluster) -> None:
    form = "{{json .NetworkSettings.Ports}}"
    for service in SHUT_IN:
        ports = json.loads(cluster.run_engine("inspect", "--format", form, cluster.container(service)).stdout)
        bindings = [binding for port in ports.values() for binding in port or ()]
        assert len(bindings) == (2 if service in ROUTERS else 0), service
        assert {binding["HostIp"] for binding in bindings} <= {"127.0.0.1"}


@pytest.mark.parametrize("service", [*PREFILL, *DECODE])
def test_a_worker_has_the_native_kernels_and_no_compiler(cluster: ComposeCluster, service: str) -> None:
    assert cluster.exec(service, "which", "g++", check=False).returncode != 0
    code = "from common.kernels.cpu.library import load_library; load_library()"
    assert cluster.exec(service, "python", "-c", code).returncode == 0
    assert not [line for line in cluster.logs(service) if line["level"] in ("warning", "error")]
