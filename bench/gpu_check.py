"""`python -m bench.gpu_check`: everything a GPU is needed for, in one go.

Checks (parity with the oracle, splits, CUDA graphs, compilation, NaN and ties, sizes past 2^31), then times of
`verify_chain` beside peers. What cannot run is skipped with its reason. Without a GPU all of it is, and the exit status is
0; `--rehearse` then runs what the interpreter can, on tiny shapes (its times mean nothing and nothing is written).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
SECONDS = 8 * 60
"""The checks and the default cells are to end within it, builds of kernels included; cells that do not fit are left out."""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__)
    parser.add_argument("--full", action="store_true", help="the whole grid of cells, without a limit of time")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: tiny shapes in Triton's interpreter")
    parser.add_argument("--checks-only", action="store_true", help="no timing")
    parser.add_argument(
        "--backend",
        default="triton",
        choices=("native", "triton", "eager"),
        help="the backend to check (default triton)",
    )
    parser.add_argument("--output", type=Path, help="folder for the JSON (default bench/results)")
    return parser.parse_args(argv)


def run_checks(device: torch.device, backend: str, quick: bool) -> list[dict]:
    from ._gpu_checks import CHECKS
    from ._gpu_skipped import Skipped

    results = []
    for check in CHECKS:
        start = time.perf_counter()
        result = {"check": check.__name__}
        try:
            result |= {"result": "passed", "compared": check(device, backend, quick)}
        except Skipped as reason:
            result |= {"result": "skipped", "reason": str(reason)}
        except Exception as error:
            traceback.print_exc()
            result |= {"result": "failed", "reason": f"{type(error).__name__}: {error}"[:500]}
        result["seconds"] = round(time.perf_counter() - start, 1)
        detail = result.get("reason") or json.dumps(result["compared"])
        print(f"{result['check']:22} {result['result']:8} {result['seconds']:7.1f} s  {detail}", flush=True)
        results.append(result)
    return results


def run_cells(device: torch.device, backend: str, given: argparse.Namespace, started: float) -> dict:
    from ._gpu_caches import cache_times
    from ._gpu_timing import Case, Clock, cells, kernels_of, measure, tiny_cells

    clock = Clock(device)
    bandwidth = clock.read_bytes_per_us()
    chosen = tiny_cells() if given.rehearse else cells(given.full)
    launches = kernels_of(Case(chosen[0], device, backend), device)
    print(f"\nread bandwidth {bandwidth / 1e3:.0f} GB/s (2 x copy); launches of a call: {launches or 'not profiled'}")
    print(f"{'':58} {'warm us':>9} {'cold us':>9} {'host us':>9} {'floor us':>9} {'/ floor':>9}  fastest peer")
    results, missing, left_out = [], {}, []
    for cell in chosen:
        if not given.full and time.perf_counter() - started > SECONDS:
            left_out.append(cell.name)
            continue
        r = measure(cell, device, backend, clock, bandwidth, missing)
        timed = {name: p for name, p in r["peers"].items() if "cold_us" in p}
        best = min(timed, key=lambda name: timed[name]["cold_us"], default=None)
        peer = "" if best is None else f"{best} {timed[best]['slower']:.1f}x"
        print(
            f"{r['cell']:58} {r['warm_us']:9.1f} {r['cold_us']:9.1f} {r['host_us']:9.1f} {r['floor_us']:9.1f} "
            f"{r['cold_of_floor']:9.2f}  {peer}",
            flush=True,
        )
        results.append(r)
    caches = cache_times(device, clock, bandwidth, backend, given.rehearse)
    for name, figures in caches.items():
        print(f"{name:70} " + "  ".join(f"{key} {value:.3g}" for key, value in figures.items()))
    for name, reason in missing.items():
        print(f"peer {name} skipped: {reason}")
    if left_out:
        print(f"{len(left_out)} cells left out after {SECONDS} s")
    return {
        "read_gb_per_s": bandwidth / 1e3, "launches": launches, "cells": results, "caches": caches,
        "missing": missing, "left_out": left_out,
    }  # fmt: skip


def main(argv: list[str]) -> int:
    given = parse(argv)
    started = time.perf_counter()
    if not torch.cuda.is_available() and not given.rehearse:
        print("no CUDA device: checks and times skipped (--rehearse runs what Triton's interpreter can)")
        return 0
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    given.rehearse = given.rehearse and not torch.cuda.is_available()
    from specdec_kernels import _backends

    from ._environment import environment, write

    if given.rehearse:
        from tests.interpreter import prepare

        prepare()
    device = torch.device("cpu" if given.rehearse else "cuda")
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    if reason := _backends.unavailable_reason(given.backend, device.type):
        print(f"backend {given.backend} skipped: {reason}")
        return 0
    document = {"schema": 1, "bench": "gpu_check", "backend": given.backend, "environment": environment()}
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        document["environment"] |= {
            "gpu": found.name, "capability": f"{found.major}.{found.minor}", "cuda": torch.version.cuda,
            "multiprocessors": found.multi_processor_count, "l2_bytes": found.L2_cache_size,
        }  # fmt: skip
    document["checks"] = run_checks(device, given.backend, given.rehearse)
    if not given.checks_only:
        document["times"] = run_cells(device, given.backend, given, started)
    document["seconds"] = round(time.perf_counter() - started, 1)
    if not given.rehearse:
        print(f"written: {write(given.output or RESULTS, document)}")
    return int(any(check["result"] == "failed" for check in document["checks"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
