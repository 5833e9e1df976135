"""The Triton kernels, compiled for GPUs that are not there: what each asks of a multiprocessor."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton")
from tests import aot  # noqa: E402

ROOT = pathlib.Path(__file__).parents[1]
TABLE = json.loads((ROOT / "tests" / "triton_usage.json").read_text())
RECENT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)


@pytest.fixture(scope="module", params=[f"sm_{arch}" for arch in aot.ARCHITECTURES])
def usage(request):
    """(architecture, kernel -> usage), from a process in which Triton compiles."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.aot", request.param.removeprefix("sm_")],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return request.param, json.loads(done.stdout)[request.param]


def test_kernels_fit_their_multiprocessor(usage):
    """No register is spilled (Triton 3.6: a dozen at most), blocks of 256 threads fit twice, shared memory is a fraction of
    what any GPU has. A tree's walk and a sort, of which there are few programs, may fill a multiprocessor."""
    architecture, kernels = usage
    assert len(kernels) >= 6
    for name, used in kernels.items():
        # A walk over rows that need an address for each token holds more than there is room for.
        allowed = 256 if name.startswith("walk_kernel") and name.endswith("unaligned") else 0 if RECENT else 64
        assert used["spills"] <= allowed, f"{architecture} {name}"
        alone = name.startswith(("walk_kernel", "lossy_walk_kernel", "schedule_lengths_kernel"))
        assert used["registers"] * 256 * (1 if alone else 2) <= 65536, f"{architecture} {name}"
        assert used["shared"] <= (49152 if alone else 16384), f"{architecture} {name}"


def test_scans_load_sixteen_bytes(usage):
    """Rows that are aligned are read 16 bytes at a time. (What is not: rows of odd length, of one token, and no scan at all.)
    So are the rows of a Markov head."""
    _, kernels = usage
    for name, used in kernels.items():
        scans = name.startswith(("nucleus", "decide", "walk", "lossy_walk", "markov_kernel")) and not name.endswith(
            ("unaligned", "V=1", "verify_chain probs", "odd rank")
        )
        if scans:
            assert used["wide_loads"] >= 2, name


def test_warps_agree_on_words_that_change(usage):
    """A word that other blocks change meanwhile is read once for a block, not by each of its warps, which could then part
    ways and miss each other at a barrier."""
    _, kernels = usage
    assert all(used["volatile_loads"] == 0 for used in kernels.values())


def test_registers_as_recorded(usage):
    """A change of what a kernel needs is seen: `python -m tests.aot --write` records it."""
    architecture, kernels = usage
    if TABLE["triton"] != triton.__version__:
        pytest.skip(f"recorded with triton {TABLE['triton']}, this is {triton.__version__}")
    assert kernels == TABLE[architecture]
