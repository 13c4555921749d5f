"""Check `baton bench` against another load generator on the same server: medians must agree within 3 %.

    python scripts/crosscheck_bench.py --tokenizer DIR                          against a mock server of known timings
    python scripts/crosscheck_bench.py --tokenizer DIR --url http://127.0.0.1:8000 --peer aiperf

Each peer (guidellm, aiperf) is installed once, from the package index, into a venv of its own. Ours runs before and
after the peer, so that a drift of the machine falls on both. Nothing is fetched from a model hub: DIR is a local folder
with a tokenizer. Prints one line a figure; exits with 1 where one is out of bounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = {"guidellm": "guidellm==0.8.1", "aiperf": "aiperf==0.13.0"}
# Medians in ms. The peers' clocks start when a request leaves, so our TTFT from the actual send is its equal. Both call
# a request's mean gap "inter token latency", which is our TPOT; aiperf also measures the gaps one by one.
FIGURES = {
    "guidellm": {
        "ttft_from_send": "time_to_first_token_ms",
        "tpot": "inter_token_latency_ms",
        "e2e": "request_latency",
    },
    "aiperf": {
        "ttft_from_send": "time_to_first_token",
        "itl": "inter_chunk_latency",
        "tpot": "inter_token_latency",
        "e2e": "request_latency",
    },
}


@dataclass(frozen=True)
class Load:
    """A constant rate of equal requests: both generators then offer exactly the same load."""

    url: str
    model: str
    tokenizer: Path
    rate: float
    requests: int
    input: int
    output: int


def ensure_peer(name: str, folder: Path) -> Path:
    """The peer's venv, made on first use."""
    place = folder / name
    if not (place / "bin" / name).exists():
        print(f"installing {VERSIONS[name]} into its own venv …", flush=True)
        venv.create(place, with_pip=True)
        subprocess.run([place / "bin" / "pip", "install", "--quiet", VERSIONS[name]], check=True)
    return place / "bin" / name


def run_ours(load: Load, folder: Path) -> dict[str, float]:
    report = folder / "ours.json"
    command = [
        sys.executable,
        "-m",
        "loadtest.cli",
        "run",
        "--url",
        load.url,
        "--model",
        load.model,
        "--prompt",
        "text",
    ]
    command += ["--prompt", "text", "--tokenizer", str(load.tokenizer)]
    command += ["--arrival", "constant", "--rate", str(load.rate)]
    command += ["--requests", str(load.requests), "--workload", f"fixed:input={load.input},output={load.output}"]
    done = run([*command, "--no-progress", "--output", str(report)], folder, "ours", may_fail=True)
    if done not in (0, 3):
        raise SystemExit(f"baton bench failed with code {done}")
    data = json.loads(report.read_text())
    for reason in data["validity"]["reasons"]:
        print(f"  baton bench warns: {reason}")
    return {name: summary["p50"] for name, summary in data["overall"]["latency_ms"].items()}


def run_guidellm(program: Path, load: Load, folder: Path) -> dict[str, float]:
    report = folder / "guidellm.json"
    backend = f"kind=openai_http,target={load.url},model={load.model},request_format=/v1/completions"
    command = [str(program), "run", "--backend", backend, "--profile", f"kind=constant,rate={load.rate}"]
    command += ["--constraint", f"kind=max_requests,count={load.requests}"]
    command += ["--tokenizer", f"kind=hf_auto,model={load.tokenizer}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens={load.input},output_tokens={load.output}"]
    command += ["--output", f"kind=json,path={report}", "--disable-console-interactive"]
    run(command, folder, "guidellm", {"HF_HUB_OFFLINE": "1"})
    metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    medians = {ours: metrics[theirs]["successful"]["median"] for ours, theirs in FIGURES["guidellm"].items()}
    return medians | {"e2e": medians["e2e"] * 1e3}


def run_aiperf(program: Path, load: Load, folder: Path) -> dict[str, float]:
    command = [str(program), "profile", "-m", load.model, "--url", load.url, "--endpoint-type", "completions"]
    command += ["--streaming", "--tokenizer", str(load.tokenizer), "--use-legacy-max-tokens"]
    command += ["--request-rate", str(load.rate), "--arrival-pattern", "constant"]
    command += ["--request-count", str(load.requests), "--extra-inputs", "ignore_eos:true"]
    command += ["--synthetic-input-tokens-mean", str(load.input), "--synthetic-input-tokens-stddev", "0"]
    command += ["--output-tokens-mean", str(load.output), "--output-tokens-stddev", "0"]
    # No HF_HUB_OFFLINE here: with it aiperf looks for the folder in the hub's cache and finds nothing.
    run([*command, "--artifact-dir", str(folder / "aiperf"), "--ui", "none"], folder, "aiperf")
    metrics = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text())
    return {ours: metrics[theirs]["p50"] for ours, theirs in FIGURES["aiperf"].items()}


def run(command: list[str], folder: Path, name: str, env: dict[str, str] | None = None, may_fail: bool = False) -> int:
    """Runs to the end; what it prints is shown only where it fails."""
    log = folder / f"{name}.log"
    with log.open("w") as out:
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **(env or {})}, stdout=out, stderr=out, timeout=900)
    if done.returncode and not may_fail:
        raise SystemExit(f"{name} failed with code {done.returncode}:\n{log.read_text()[-3000:]}")
    return done.returncode


@contextlib.contextmanager
def mock_server(ttft_ms: float, itl_ms: float) -> Iterator[str]:
    command = [sys.executable, "-m", "tests.fakes.mock_openai_server"]
    command += ["--ttft-ms", str(ttft_ms), "--itl-ms", str(itl_ms)]
    server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.stdin.close()
        server.wait(10)


def check(name: str, program: Path, load: Load, tolerance: float) -> bool:
    runner = {"guidellm": run_guidellm, "aiperf": run_aiperf}[name]
    with tempfile.TemporaryDirectory() as folder:
        before = run_ours(load, Path(folder))
        theirs = runner(program, load, Path(folder))
        after = run_ours(load, Path(folder))
    agreed = True
    for figure, their in theirs.items():
        our = (before[figure] + after[figure]) / 2
        off = our / their - 1
        agreed &= abs(off) <= tolerance
        verdict = "" if abs(off) <= tolerance else "  OUT OF BOUNDS"
        print(f"{figure.upper():14s} p50  baton bench {our:9.3f} ms  {name} {their:9.3f} ms  {off:+6.2%}{verdict}")
    return agreed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--url", default="", help="server to measure; default: a mock of known timings")
    parser.add_argument("--model", default="mock")
    parser.add_argument("--peer", choices=["guidellm", "aiperf", "both"], default="both")
    parser.add_argument("--venvs", type=Path, default=Path.home() / ".cache" / "baton" / "crosscheck")
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--input", type=int, default=128, help="prompt tokens")
    parser.add_argument("--output", type=int, default=64, help="answer tokens")
    parser.add_argument("--tolerance", type=float, default=0.03)
    args = parser.parse_args()
    peers = ["guidellm", "aiperf"] if args.peer == "both" else [args.peer]
    programs = {name: ensure_peer(name, args.venvs) for name in peers}
    with mock_server(80.0, 10.0) if not args.url else contextlib.nullcontext(args.url) as url:
        tokenizer = args.tokenizer.resolve()
        load = Load(url, args.model, tokenizer, args.rate, args.requests, args.input, args.output)
        results = [check(name, program, load, args.tolerance) for name, program in programs.items()]
    print("agreed" if all(results) else f"a median differs by more than {args.tolerance:.0%}")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
