"""Checks and times the GPU path: `python -m loadtest.gpu_check`; under 8 minutes, the table last, exit status 1 if
anything failed. `--dry-run` runs the script itself on a CPU, small, in Triton's interpreter: no time means anything.

Limits are measured in the same run: bandwidth by a copy on the device, FLOP/s by a bfloat16 matrix product of torch's.
A case's limit is the larger of the times that its bytes and its FLOPs take at those.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

DEADLINE_S: Final = 420.0  # for what is to begin: the rest of the 8 minutes is the cluster's
_ROUNDS: Final = 20


def main(
    dry_run: Annotated[bool, typer.Option(help="on a CPU, small, in Triton's interpreter")] = False,
    cluster: Annotated[bool, typer.Option(help="the end-to-end check too")] = True,
    model: Annotated[Path | None, typer.Option(help="Hugging Face folder; default: the default model's")] = None,
) -> None:
    if dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported
    import torch

    from common.device import resolve_device
    from common.errors import StartupError

    try:
        device = resolve_device("cpu" if dry_run else "cuda")
    except StartupError as error:
        typer.echo(f"{error} (or --dry-run)", err=True)
        raise typer.Exit(1) from None
    began = time.monotonic()
    with torch.inference_mode():
        lines, failed = _kernels(device, began, dry_run=dry_run)
    if cluster:
        verdict, passed = _end_to_end(device, model)
        lines.append(f"| cluster, end to end | {verdict} | | | | |")
        failed += not passed
    typer.echo("\n| kernel | largest error | µs | reference, × ours | SDPA, × ours | of the limit |")
    typer.echo("|---|---|---|---|---|---|")
    typer.echo("\n".join(lines))
    typer.echo(f"\n{failed} failed; {time.monotonic() - began:.0f} s")
    raise typer.Exit(1 if failed else 0)


def _kernels(device: object, began: float, *, dry_run: bool) -> tuple[list[str], int]:
    """A line of the table a case, and how many failed."""
    import torch

    from loadtest.gpu.cases import cases

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    timed = _seconds_on_host if dry_run else _seconds_on_gpu
    bytes_s, flops_s = _limits(torch.device(str(device)), timed, 1 << (10 if dry_run else 30))
    typer.echo(f"torch {torch.__version__}: copies {bytes_s / 1e9:.0f} GB/s, bfloat16 {flops_s / 1e12:.1f} TFLOP/s")
    lines, failed = [], 0
    for case in cases(torch.device(str(device)), small=dry_run):
        if time.monotonic() - began > DEADLINE_S:
            lines.append(f"| {case.name} | FAILED: no time left | | | | |")
            failed += 1
            continue
        try:
            found, wanted = case.ours().double(), case.reference().double()
            error = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
            good = error <= case.tolerance
        except Exception as fault:  # a kernel that doesn't compile must not hide the others
            lines.append(f"| {case.name} | FAILED: {type(fault).__name__}: {str(fault).splitlines()[0][:90]} | | | | |")
            failed += 1
            continue
        failed += not good
        ours, reference = timed(case.ours), timed(case.reference)
        peer = "" if case.peer is None else f"{timed(case.peer) / ours:.2f}"
        limit = max(case.moved_bytes / bytes_s, case.flops / flops_s)
        verdict = f"{error:.1e}" if good else f"FAILED: {error:.1e} > {case.tolerance:.0e}"
        lines.append(
            f"| {case.name} | {verdict} | {ours * 1e6:.0f} | {reference / ours:.2f} | {peer} | {limit / ours:.0%} |"
        )
        typer.echo(lines[-1])
    return lines, failed


def _end_to_end(device: object, model: Path | None) -> tuple[str, bool]:
    import torch

    from deploy.model_fetch import fetch_default_model
    from loadtest.gpu.cluster import check_cluster

    try:
        folder = model or fetch_default_model(Path.home() / ".cache" / "baton", typer.echo)
        return check_cluster(folder, torch.device(str(device))), True
    except Exception as error:
        typer.echo(str(error))
        return f"FAILED: {str(error).splitlines()[0]}", False


def _limits(device: object, timed: Callable[[Callable[[], object]], float], size: int) -> tuple[float, float]:
    """Bytes a second of a copy (read and write both counted), FLOP/s of a product."""
    import torch

    where = torch.device(str(device))
    source = torch.zeros(size, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    edge = 64 if size < 1 << 20 else 8192
    matrix = torch.randn(edge, edge, device=where).bfloat16()
    return 2 * size / timed(lambda: target.copy_(source)), 2 * edge**3 / timed(lambda: matrix @ matrix)


def _seconds_on_gpu(run: Callable[[], object]) -> float:
    """Median of some rounds, after a first one that compiles."""
    import torch

    run()
    times = []
    for _ in range(_ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return float(sorted(times)[_ROUNDS // 2])


def _seconds_on_host(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return max(time.perf_counter() - began, 1e-9)


if __name__ == "__main__":
    typer.run(main)
