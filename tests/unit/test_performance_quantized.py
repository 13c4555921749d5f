"""The page of quantised figures sets each mode beside the peer of as many bits."""

from __future__ import annotations

from pathlib import Path

from loadtest.performance_cases import MEMORY, READY
from loadtest.performance_quantized import COMPARED, render, servers


def test_each_mode_stands_beside_its_peer_and_who_is_ahead_is_bold() -> None:
    found = servers(Path("/m"), Path("/llama-server"), Path("/q8.gguf"), Path("/q4.gguf"))
    figures = [READY, MEMORY, *(f"{case.title}: {figure.name}" for case in COMPARED for figure in case.figures)]
    results = {server.name: dict.fromkeys(figures, float(i + 1)) for i, server in enumerate(found)}
    page = render(results, "make it")
    assert len(COMPARED) == 3
    rate = next(line for line in page.splitlines() if "output (tokens/s)" in line)
    assert rate.endswith("| 1 | 2 | 3 | 0.67 | 4 | 5 | 0.80 |")
    memory = next(line for line in page.splitlines() if line.startswith(f"| {MEMORY}"))
    assert memory.endswith("| 1 | 2 | 3 | **0.67** | 4 | 5 | **0.80** |")
    commands = {server.name: server.processes(9)[0].command for server in found}
    assert "int4" in commands["Baton int4"]
    assert "/q8.gguf" in commands["llama.cpp Q8_0"]
