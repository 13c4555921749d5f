"""docs/METRICS.md holds what the services export, and nothing else; names follow Prometheus' conventions."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from common.config import Settings
from common.embedded_redis import EmbeddedRedis
from common.worker.loading import load
from router.app import serve
from tests.worker_harness import BOUND_S, worker

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "METRICS.md"
SECTIONS = {"router": "Router", "prefill": "Prefill worker", "decode": "Decode worker"}
PROCESS_SECTION = "Every process"
ROW = re.compile(
    r"^\| `(?P<name>\w+)` \| (?P<type>\w+) \| (?P<labels>[^|]*) \| (?P<unit>[^|]+) \| (?P<meaning>[^|]+) \|$"
)
SUFFIXES = {"seconds": "_seconds", "bytes": "_bytes", "ratio": "_ratio", "info": "_info"}

Pages = dict[str, dict[str, Metric]]


@dataclass(frozen=True)
class Row:
    """As a document's row says it, or a page's family shows it."""

    type: str
    labels: frozenset[str]


@pytest.fixture(scope="module")
def pages(tiny_model_folder: Path) -> Pages:
    """role → name as in queries → family, of a cluster that has served one request."""
    return asyncio.run(scrape_all(tiny_model_folder))


async def scrape_all(folder: Path) -> Pages:
    async with AsyncExitStack() as stack:
        settings = Settings(
            model=str(folder),
            redis_url=stack.enter_context(EmbeddedRedis()).url,
            kv_cache_bytes=1 << 20,
            num_threads=1,
            landing_slots=2,
            landing_slot_bytes=64 << 10,
            shutdown_grace_s=0.1,
            local_prefill_max_tokens=0,
            port=0,
            auth="anonymous",
        )
        urls = {}
        for role in ("prefill", "decode"):
            running = await stack.enter_async_context(worker(role, settings, load(settings)))
            urls[role] = running.info.metrics_url
        router = await stack.enter_async_context(serve(settings))
        urls["router"] = f"{router.http_url}/metrics"
        async with asyncio.timeout(BOUND_S):
            while not router.fleet.ready:
                await router.fleet.wait_changed(BOUND_S)
        async with httpx.AsyncClient(timeout=BOUND_S) as http:
            body = {"prompt": list(range(40)), "max_tokens": 4, "ignore_eos": True}
            (await http.post(f"{router.http_url}/v1/completions", json=body)).raise_for_status()
            return {role: families_of((await http.get(url)).text) for role, url in urls.items()}


def families_of(page: str) -> dict[str, Metric]:
    """The parser takes a counter's suffix off."""
    return {f.name + ("_total" if f.type == "counter" else ""): f for f in text_string_to_metric_families(page)}


def shown(family: Metric) -> Row:
    """Labels must be the same on all samples; a family without samples would show none of its own."""
    labels = {frozenset(sample.labels) - {"le"} for sample in family.samples}
    assert len(labels) == 1, f"{family.name}: {labels}"
    return Row(family.type, *labels)


def sections() -> dict[str, dict[str, re.Match[str]]]:
    """Heading → name → row of the table under it."""
    found: dict[str, dict[str, re.Match[str]]] = {}
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("## "):
            rows = found[line.removeprefix("## ")] = {}
        elif line.startswith("| `baton"):
            row = ROW.match(line)
            assert row is not None, f"not a row of five columns: {line}"
            assert row["name"] not in rows, f"twice: {line}"
            rows[row["name"]] = row
    return found


def documented(role: str) -> dict[str, re.Match[str]]:
    found = sections()
    return {**found[SECTIONS[role]], **found[PROCESS_SECTION]}


@pytest.mark.parametrize("role", SECTIONS)
def test_the_tables_hold_exactly_what_the_service_exports(pages, role):
    rows = {
        name: Row(row["type"], frozenset(re.findall(r"`(\w+)`", row["labels"])))
        for name, row in documented(role).items()
    }
    assert rows == {name: shown(family) for name, family in pages[role].items()}


@pytest.mark.parametrize("role", SECTIONS)
def test_names_units_and_help_follow_prometheus_conventions(pages, role):
    for name, family in pages[role].items():
        assert re.fullmatch(r"baton_[a-z][a-z0-9_]*", name), name
        assert family.documentation.strip(), f"{name} has no help"
        assert family.type in ("counter", "gauge", "histogram"), name
        assert not re.search(r"_(total|count|sum|bucket|created)$", family.name), name
        assert not re.search(r"_(milliseconds|ms|kilobytes|percent|gauge|counter|histogram)(_|$)", name), name
        unit = documented(role)[name]["unit"]
        suffix = SUFFIXES.get(unit, "")
        assert family.name.endswith(suffix), f"{name}: {unit}"
        for other in set(SUFFIXES.values()) - {suffix}:
            assert not family.name.endswith(other), f"{name}: {unit}"


def test_seconds_are_told_apart_from_a_gpus_step_to_a_cpus_long_prompt(pages):
    for families in pages.values():
        for name, family in families.items():
            if family.type == "histogram" and name.endswith("_seconds"):
                bounds = {float(s.labels["le"]) for s in family.samples if "le" in s.labels} - {float("inf")}
                assert min(bounds) <= 0.01, name
                assert max(bounds) >= 100, name
                assert 16 <= len(bounds) <= 24, name


def test_no_label_tells_of_a_request(pages):
    for families in pages.values():
        values = {v for f in families.values() for s in f.samples for v in s.labels.values()}
        assert not [v for v in values if v.startswith(("cmpl", "chatcmpl"))]
        labels = {k for f in families.values() for s in f.samples for k in s.labels}
        assert not labels & {"request_id", "transfer_id", "router_id", "epoch", "user", "tenant"}


def test_steps_are_counted_by_phase(pages):
    def value(role: str, name: str, **labels: str) -> float:
        samples = [s for f in pages[role].values() for s in f.samples if s.name == name and s.labels == labels]
        assert len(samples) == 1, (role, name, samples)
        return samples[0].value

    assert value("prefill", "baton_step_tokens_sum", phase="prefill") == 40
    assert value("prefill", "baton_step_seconds_count", phase="prefill") == 1
    # The first of the four tokens is the prefill worker's.
    assert value("decode", "baton_step_tokens_sum", phase="decode") == 3
    assert value("decode", "baton_step_seconds_count", phase="decode") == 3
    assert value("decode", "baton_step_tokens_count", phase="prefill") == 0
    assert value("decode", "baton_step_batch_size_sum") == 3
