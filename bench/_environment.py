"""What a result depends on besides the code: machine, versions, commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path

import torch

import specdec_kernels

from ._timing import Settings, last_level_cache_bytes

SCHEMA = 1
_ROOT = Path(__file__).resolve().parent.parent


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> dict:
    """JSON-ready description; fields that cannot be found out are None."""
    native = specdec_kernels.info()["backends"]["native (CPU)"]
    status = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    return {
        "cpu": _cpu_model(),
        "isa": native.get("isa"),
        "native": native["available"],
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "last_level_cache_bytes": last_level_cache_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "specdec_kernels": specdec_kernels.__version__,
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def document(bench: str, settings: Settings, machine: dict, cases: list[dict]) -> dict:
    return {
        "schema": SCHEMA,
        "bench": bench,
        "environment": machine,
        "settings": {
            "rounds": settings.rounds,
            "peer_rounds": settings.peer_rounds,
            "quick": settings.quick,
            "clock": "process CPU time" if settings.cpu_time else "wall",
            "cache": "cold: flushed before each sample" if settings.cold else "warm: same buffers every round",
        },
        "cases": cases,
    }


def write(directory: Path, result: dict) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{result['bench']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
