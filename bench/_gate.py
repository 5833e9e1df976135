"""Correctness first: what is timed must agree with the oracle, or there is no timing."""

from __future__ import annotations

import torch
from torch import Tensor

import python_ref
from specdec_kernels import Nucleus, SampleOutput, VerifyOutput

from ._inputs import ChainCase, RowCase

#: A decision whose oracle margin is below this may go either way in float32. Masses are sums of up to V float32 terms.
MARGIN = 1e-4


class GateError(AssertionError):
    """The timed call's answer is wrong."""


def _request(params, b: int) -> python_ref.SamplingParams:
    return python_ref.SamplingParams(
        *(getattr(params, name)[b : b + 1] for name in ("temperature", "top_p", "top_k", "min_p", "seed"))
    )


def _verdict(op: str, checked: list[int], undecided: list[int], wrong: list[str]) -> dict:
    if wrong:
        raise GateError(f"{op}: " + "; ".join(wrong))
    if not set(checked) - set(undecided):
        raise GateError(
            f"{op}: nothing was decided in {checked}: every margin is below {MARGIN} and the answers differ"
        )
    return {"checked": len(checked), "undecided": len(undecided)}


def check_chain(case: ChainCase, output: VerifyOutput, requests: list[int]) -> dict[str, int]:
    """Compares tokens and counts of these requests; one that differs with a margin below `MARGIN` is undecided."""
    undecided, wrong = [], []
    for b in requests:
        start, end = int(case.cu[b]), int(case.cu[b + 1])
        params = _request(case.params, b)
        options = {"rule": case.rule, "max_draft": case.num_draft}
        if case.draft is not None:
            saved = None if case.nucleus is None else Nucleus(*(f[start:end] for f in case.nucleus))
            options |= {"draft_logits": case.draft[start:end], "draft_params": params, "draft_nucleus": saved}
        expected = python_ref.verify_chain(
            case.target[start + b : end + b + 1],
            case.tokens[start:end],
            torch.tensor([0, end - start], dtype=torch.int32),
            params,
            case.position[b : b + 1],
            **options,
        )
        same = (
            torch.equal(output.tokens[b], expected.tokens[0])
            and int(output.num_accepted[b]) == int(expected.num_accepted[0])
            and int(output.num_emitted[b]) == int(expected.num_emitted[0])
            and int(output.status[b]) == int(expected.status[0])
        )
        if not same and float(expected.margin[0]) < MARGIN:
            undecided.append(b)
        elif not same:
            got, want = output.tokens[b].tolist(), expected.tokens[0].tolist()
            wrong.append(f"request {b} emits {got}, the oracle {want} with margin {float(expected.margin[0]):.1e}")
    return _verdict("verify_chain", requests, undecided, wrong)


def check_sample(case: RowCase, output: SampleOutput, rows: list[int]) -> dict[str, int]:
    undecided, wrong = [], []
    for n in rows:
        expected = python_ref.sample(case.logits[n : n + 1], _request(case.params, n), case.position[n : n + 1])
        got, want = int(output.tokens[n]), int(expected.tokens[0])
        if got != want and float(expected.margin[0]) < MARGIN:
            undecided.append(n)
        elif got != want:
            wrong.append(f"row {n} gives {got}, the oracle {want} with margin {float(expected.margin[0]):.1e}")
    return _verdict("sample", rows, undecided, wrong)


def check_nucleus(case: RowCase, output: Nucleus, rows: list[int]) -> dict[str, int]:
    undecided, wrong = [], []
    for n in rows:
        expected = python_ref.nucleus(case.logits[n : n + 1], _request(case.params, n))
        want, margin = [float(f[0]) for f in expected.nucleus], float(expected.margin[0])
        got = [float(f[n]) for f in output]
        # The cutoff is one of the row's values, so it is the same or another value; the mass is rounded.
        if got[1] == want[1] and abs(got[2] - want[2]) < MARGIN and (got[0] == want[0] or margin < MARGIN):
            continue
        wrong.append(f"row {n} gives {got}, the oracle {want} with margin {margin:.1e}")
    return _verdict("nucleus", rows, undecided, wrong)


def check_probs(case: RowCase, probs: Tensor, rows: list[int], op: str = "filter_probs") -> dict[str, int]:
    """Total variation to the oracle's row; a cutoff on the edge moves less than `MARGIN` of mass."""
    wrong = []
    for n in rows:
        expected = python_ref.filter_probs(case.logits[n : n + 1], _request(case.params, n))[0]
        distance = float((probs[n].double() - expected).abs().sum()) / 2
        if not distance < MARGIN:
            wrong.append(f"row {n} is {distance:.1e} from the oracle in total variation")
    return _verdict(op, rows, [], wrong)


def check_support(case: ChainCase, tokens: Tensor, requests: list[int], peer: str) -> None:
    """A peer draws with its own generator, so only its form can be checked: accepted drafts, then a token that the target
    can emit, then padding."""
    for b in requests:
        start, d = int(case.cu[b]), case.num_draft
        emitted = [t for t in tokens[b].tolist() if t >= 0]
        drafts = case.tokens[start : start + d].tolist()
        accepted = len(emitted) - 1
        if not 0 <= accepted <= d or emitted[:accepted] != drafts[:accepted]:
            raise GateError(f"{peer}: request {b} emits {emitted} for drafts {drafts}")
        row = case.target[start + b + accepted][None]
        if not python_ref.filter_probs(row, _request(case.params, b))[0, emitted[-1]] > 0:
            raise GateError(f"{peer}: request {b} emits {emitted[-1]}, which the filtered target cannot")
