"""`verify_chain`: against reading the rows once (amax), softmax of the rows, and other implementations of the step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch

import specdec_kernels

from . import _peers
from ._gate import GateError, check_chain, check_support
from ._inputs import VARIANTS, ChainCase, Rows, chain_case, language_model_rows, main_rows, normal_rows
from ._timing import Settings, bandwidth, ms, paired, summary, table, times

NAME = "verify_chain"
DTYPES = (torch.float32, torch.bfloat16)


def run(settings: Settings) -> list[dict]:
    results = []
    for make in main_rows(settings.quick):
        rows = make()
        for dtype in DTYPES:
            for variant in VARIANTS:
                results.append(_against_reading(chain_case(rows, dtype, variant), rows, settings))
        if settings.peers:
            results.append(_against_peers(chain_case(rows, torch.float32, "natural acceptance"), rows, settings))
    results += _latency(settings)
    return results


def _describe(kind: str, case: ChainCase, rows: Rows, gate: dict) -> dict:
    output = case()
    params = case.params
    kept = specdec_kernels.filter_probs(case.target[: rows.num_draft + 1], _first_request(params, rows.num_draft + 1))
    return {
        "kind": kind,
        "rows": rows.label,
        "variant": case.variant,
        "dtype": str(case.target.dtype).removeprefix("torch."),
        "batch": case.batch,
        "num_draft": case.num_draft,
        "vocab": case.target.shape[1],
        "temperature": round(float(params.temperature[0]), 6),
        "top_p": round(float(params.top_p[0]), 6),
        "kept_tokens_median": int((kept > 0).sum(1).median()),
        "mean_accepted": float(output.num_accepted.double().mean()),
        "gate": gate,
    }


def _first_request(params: specdec_kernels.SamplingTensors, n: int) -> specdec_kernels.SamplingTensors:
    fields = (
        getattr(params, name)[:1].expand(n).contiguous() for name in ("temperature", "top_p", "top_k", "min_p", "seed")
    )
    return specdec_kernels.SamplingTensors(*fields)


def _baselines(case: ChainCase) -> dict[str, Callable]:
    rows = case.rows_read
    copies = [torch.empty_like(r) for r in rows]
    return {
        "amax": lambda: [r.amax(-1) for r in rows],
        "softmax": lambda: [r.softmax(-1) for r in rows],
        "copy": lambda: [c.copy_(r) for c, r in zip(copies, rows, strict=True)],
    }


def _against_reading(case: ChainCase, rows: Rows, settings: Settings) -> dict:
    output = case()
    gate = check_chain(case, output, sorted({0, case.batch - 1}))
    measured = summary(paired({NAME: case, **_baselines(case)}, settings.rounds, settings), NAME)
    return {
        **_describe("reading", case, rows, gate),
        **measured,
        **bandwidth(measured, NAME, case.needed_bytes(output.num_accepted), case.num_bytes),
    }


def _against_peers(case: ChainCase, rows: Rows, settings: Settings) -> dict:
    """Peers from raw logits of both models, and peers that are handed q ready made: their drafting has computed it."""
    draft_params = _peers.row_params(case, case.num_draft)
    q = _peers.sort_filtered(case.draft, *draft_params)
    calls = {NAME: case, "PyTorch, sort": _peers.sorted_torch(case)}
    calls["PyTorch, sort, q ready made"] = _peers.sorted_torch(case, q)
    missing = {}
    if (reason := _peers.transformers_missing()) is None:
        calls["transformers, per request"] = _peers.transformers_loop(case, warped_draft=False)
        calls["transformers, per request, q ready made"] = _peers.transformers_loop(case, warped_draft=True)
    else:
        missing["transformers"] = reason
    requests = [0] if settings.quick else [0, case.batch - 1]
    gate = check_chain(case, case(), requests)
    for name, call in calls.items():
        if name != NAME:
            check_support(case, call(), requests, name)
    with ExitStack() as stack:
        if (reason := _peers.vllm_missing()) is None:
            vllm = stack.enter_context(_peers.VllmStep(case, q))
            check_support(case, vllm.tokens(), requests, "vllm")
            calls[f"vLLM CPU {vllm.version}, q ready made, #55005 repaired"] = vllm
        else:
            missing["vllm"] = reason
        measured = summary(paired(calls, settings.peer_rounds, settings), NAME)
    return {**_describe("peers", case, rows, gate), **measured, "missing": missing}


def _latency(settings: Settings) -> list[dict]:
    """One request. A tiny vocabulary shows what dispatch costs; reused outputs, what allocation does."""
    vocab = 2048 if settings.quick else 32_000
    makers = [partial(normal_rows, 3.0, vocab=16), partial(normal_rows, 3.0, vocab=vocab)]
    if not settings.quick:
        makers.append(partial(language_model_rows, vocab=vocab))
    results = []
    for make in makers:
        rows = make(batch=1, num_draft=4)
        for variant in ("natural acceptance", "all accepted (q = p)"):
            case = chain_case(rows, torch.float32, variant)
            gate = check_chain(case, case(), [0])
            calls = {NAME: case, "with out=": _with_out(case), **_baselines(case)}
            # Short calls: more rounds cost nothing.
            measured = summary(paired(calls, 4 * settings.rounds, settings), NAME)
            results.append({**_describe("latency", case, rows, gate), **measured})
    return results


def _with_out(case: ChainCase) -> Callable:
    out, options = case(), case.options()
    first = [t.clone() for t in out[:4]]
    call = lambda: specdec_kernels.verify_chain(  # noqa: E731
        case.target, case.tokens, case.cu, case.params, case.position, out=out, **options
    )
    if not all(torch.equal(a, b) for a, b in zip(first, call()[:4], strict=True)):
        raise GateError("verify_chain: out= gives other values")
    return call


def report(results: list[dict]) -> str:
    """What the run showed, as text."""
    parts = []
    reading = [r for r in results if r["kind"] == "reading"]
    for label in dict.fromkeys(r["rows"] for r in reading):
        chosen = [r for r in reading if r["rows"] == label]
        head = chosen[0]
        parts.append(
            f"\n{NAME} · {label} · B={head['batch']}, {head['num_draft']} drafts, V={head['vocab']}, T={head['temperature']:g}"
        )
        lines = [
            [
                r["variant"],
                r["dtype"],
                str(r["kept_tokens_median"]),
                f"{r['mean_accepted']:.1f}",
                ms(r["ms"][NAME]),
                times(r["ratio"]["amax"]),
                times(r["ratio"]["softmax"]),
                f"{r['gb_per_s']:.1f}",
                f"{100 * r['of_copy_bandwidth']:.0f}%",
            ]
            for r in chosen
        ]
        headers = ["variant", "dtype", "kept", "accepted", "median (p25-p75)", "/ amax", "/ softmax", "GB/s", "of copy"]
        parts.append(table(headers, lines))
    for r in results:
        if r["kind"] != "peers":
            continue
        parts.append(f"\npeers · {r['rows']} · {r['dtype']}, {r['variant']}, {r['mean_accepted']:.1f} accepted")
        lines = [[name, ms(spread), _slower(r, name)] for name, spread in r["ms"].items()]
        parts.append(table(["", "median (p25-p75)", "verify_chain is faster by"], lines))
        parts += [f"{name}: {reason}" for name, reason in r["missing"].items()]
    latency = [r for r in results if r["kind"] == "latency"]
    if latency:
        parts.append(f"\none request · {latency[0]['num_draft']} drafts, float32, q given")
        lines = [
            [
                f"V={r['vocab']}, {r['rows']}, {r['variant']}",
                ms(r["ms"][NAME]),
                ms(r["ms"]["with out="]),
                ms(r["ms"]["amax"]),
            ]
            for r in latency
        ]
        parts.append(table(["", "whole call", "with out=", "amax of the rows"], lines))
    return "\n".join(parts)


def _slower(result: dict, name: str) -> str:
    return "" if name == NAME else f"{1 / result['ratio'][name]['median']:.1f}x"
