"""What the benches of the one-row ops share: `nucleus`, `sample`, `filter_probs`."""

from __future__ import annotations

from collections.abc import Callable

import torch

import specdec_kernels

from ._inputs import RowCase, main_rows, row_case
from ._timing import Settings, bandwidth, ms, paired, summary, table, times

DTYPES = (torch.float32, torch.bfloat16)

#: variant -> (top_p, top_k)
FILTERS = {"top-p 0.9": (0.9, 0), "top-k 50": (1.0, 50), "top-k 50, top-p 0.9": (0.9, 50), "no filter": (1.0, 0)}


def run(
    name: str,
    settings: Settings,
    subject: Callable[[RowCase], Callable],
    check: Callable[[RowCase, object, list[int]], dict],
    peers: Callable[[RowCase], dict[str, Callable]],
) -> list[dict]:
    """`subject(case)` is the timed call and `check` its gate; `peers(case)` do the same work another way, on top-p alone."""
    results = []
    for make in main_rows(settings.quick):
        rows = make()
        for dtype in DTYPES:
            for variant, (top_p, top_k) in FILTERS.items():
                case = row_case(rows, dtype, top_p, top_k)
                call = subject(case)
                gate = check(case, call(), [0, case.logits.shape[0] - 1])
                copy = torch.empty_like(case.logits)
                calls = {
                    name: call,
                    "amax": lambda case=case: case.logits.amax(-1),
                    "softmax": lambda case=case: case.logits.softmax(-1),
                    "copy": lambda case=case, copy=copy: copy.copy_(case.logits),
                }
                measured = summary(paired(calls, settings.rounds, settings), name)
                measured |= bandwidth(measured, name, case.num_bytes, case.num_bytes)
                results.append({**_describe("reading", case, variant, gate), **measured})
        if settings.peers:
            case = row_case(rows, torch.float32)
            call = subject(case)
            gate = check(case, call(), [0])
            measured = summary(paired({name: call, **peers(case)}, settings.peer_rounds, settings), name)
            results.append({**_describe("peers", case, "top-p 0.9", gate), **measured, "missing": {}})
    return results


def _describe(kind: str, case: RowCase, variant: str, gate: dict) -> dict:
    kept = specdec_kernels.filter_probs(case.logits, case.params) > 0
    return {
        "kind": kind,
        "rows": case.label,
        "variant": variant,
        "dtype": str(case.logits.dtype).removeprefix("torch."),
        "batch": case.logits.shape[0],
        "vocab": case.logits.shape[1],
        "temperature": round(float(case.params.temperature[0]), 6),
        "top_p": round(float(case.params.top_p[0]), 6),
        "top_k": int(case.params.top_k[0]),
        "kept_tokens_median": int(kept.sum(1).median()),
        "gate": gate,
    }


def report(name: str, results: list[dict]) -> str:
    parts = []
    reading = [r for r in results if r["kind"] == "reading"]
    for label in dict.fromkeys(r["rows"] for r in reading):
        chosen = [r for r in reading if r["rows"] == label]
        parts.append(
            f"\n{name} · {label} · {chosen[0]['batch']} rows, V={chosen[0]['vocab']}, T={chosen[0]['temperature']:g}"
        )
        lines = [
            [
                r["variant"],
                r["dtype"],
                str(r["kept_tokens_median"]),
                ms(r["ms"][name]),
                times(r["ratio"]["amax"]),
                times(r["ratio"]["softmax"]),
                f"{r['gb_per_s']:.1f}",
                f"{100 * r['of_copy_bandwidth']:.0f}%",
            ]
            for r in chosen
        ]
        parts.append(
            table(["variant", "dtype", "kept", "median (p25-p75)", "/ amax", "/ softmax", "GB/s", "of copy"], lines)
        )
    for r in results:
        if r["kind"] == "peers":
            parts.append(f"\npeers · {r['rows']} · {r['dtype']}, {r['variant']}")
            lines = [
                [peer, ms(spread), "" if peer == name else f"{1 / r['ratio'][peer]['median']:.1f}x"]
                for peer, spread in r["ms"].items()
            ]
            parts.append(table(["", "median (p25-p75)", f"{name} is faster by"], lines))
    return "\n".join(parts)
