"""One cluster of containers for all tests here; only where scripts/test_compose.sh has prepared engine and images."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.cluster import ComposeCluster, poll_until

READY_DEADLINE_S = 180.0
_ENGINE = os.environ.get("COMPOSE_TEST_ENGINE", "")
_COMPOSE = os.environ.get("COMPOSE_TEST_COMMAND", "")


@pytest.fixture(scope="session")
def running_cluster(model_folder: Path) -> Iterator[ComposeCluster]:
    if not (_ENGINE and _COMPOSE):
        pytest.skip("needs containers: run `make test-compose`")
    cluster = ComposeCluster(tuple(_COMPOSE.split()), _ENGINE, model_folder.parent)
    cluster.run_compose("down", "-v", check=False)
    try:
        cluster.run_compose("up", "-d", "--no-build")
        poll_until(cluster.all_connected, "both routers to be connected to all workers", READY_DEADLINE_S)
        yield cluster
    finally:
        cluster.run_compose("down", "-v")


@pytest.fixture
def cluster(running_cluster: ComposeCluster) -> ComposeCluster:
    """Whole again before each test, whatever the one before did."""
    poll_until(running_cluster.all_connected, "both routers to be connected to all workers", READY_DEADLINE_S)
    return running_cluster
