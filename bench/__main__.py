"""`python -m bench [op ...]`: runs the benches, prints tables, writes JSON to bench/results/."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import torch

import specdec_kernels

from ._environment import document, environment, write
from ._timing import Settings

BENCHES = (
    "verify_chain",
    "verify_tree",
    "nucleus",
    "sample",
    "filter_probs",
    "markov_step",
    "kv_compact",
    "kv_rollback",
)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("op", nargs="*", help=f"of {', '.join(BENCHES)}; default: all")
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes, few rounds: tests the harness, writes nothing"
    )
    parser.add_argument("--rounds", type=int, help="paired rounds (default 25; 3 when quick)")
    parser.add_argument("--peer-rounds", type=int, help="paired rounds with the slow peers (default 5; 2 when quick)")
    parser.add_argument("--no-peers", action="store_true", help="leave other implementations out")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of one thread, for noisy machines")
    parser.add_argument("--cold", action="store_true", help="flush the last-level cache before each sample")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's)")
    parser.add_argument("--output", type=Path, help="folder for the JSON (default bench/results, none when quick)")
    given = parser.parse_args(argv)
    if unknown := set(given.op) - set(BENCHES):
        parser.error(f"no bench of {', '.join(sorted(unknown))}; there are {', '.join(BENCHES)}")
    if given.cpu_time and given.threads not in (None, 1):
        parser.error("--cpu-time adds up the time of all threads: it needs --threads 1")
    return given


def main(argv: list[str]) -> int:
    given = parse(argv)
    if given.cpu_time or given.threads:
        torch.set_num_threads(given.threads or 1)
    settings = Settings(
        rounds=given.rounds or (3 if given.quick else 25),
        peer_rounds=given.peer_rounds or (2 if given.quick else 5),
        quick=given.quick,
        cpu_time=given.cpu_time,
        cold=given.cold,
        peers=not given.no_peers,
    )
    native = specdec_kernels.info()["backends"]["native (CPU)"]
    if not native["available"]:
        print(f"no native kernels ({native['reason']}): the plain-torch backend is timed", file=sys.stderr)
    output = given.output or (None if given.quick else Path(__file__).parent / "results")
    torch.manual_seed(0)
    with torch.inference_mode():
        for name in given.op or BENCHES:
            bench = importlib.import_module(f".bench_{name}", __package__)
            machine = environment()  # before the run, whose own load is none of the machine's
            result = document(name, settings, machine, bench.run(settings))
            print(bench.report(result["cases"]), flush=True)
            if output is not None:
                print(f"\nwritten: {write(output, result)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
