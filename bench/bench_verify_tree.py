"""`verify_tree`: trees of 32 drafts, against softmax and amax of all rows, where a verifier on probabilities begins."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import python_ref
import specdec_kernels
from specdec_kernels import SamplingTensors

from ._gate import MARGIN, GateError
from ._inputs import TEMPERATURE, TOP_P, Rows, main_rows
from ._timing import Settings, bandwidth, ms, paired, summary, table, times

NAME = "verify_tree"
DTYPES = (torch.float32, torch.bfloat16)
#: Nodes 1 to 32: four children of the root, three of each of those, two of eight of theirs.
PARENTS = [0] * 4 + [1 + n // 3 for n in range(12)] + [5 + n // 2 for n in range(16)]
RULES = (("target_only", None), ("recursive", False), ("traversal", False), ("greedy_draft", None))


@dataclass(frozen=True)
class TreeCase:
    rule: str
    replacement: bool | None
    target: Tensor
    tokens: Tensor
    parents: Tensor
    cu: Tensor
    params: SamplingTensors
    position: Tensor
    draft: Tensor | None
    rows: Tensor | None

    def __call__(self) -> specdec_kernels.TreeOutput:
        return specdec_kernels.verify_tree(
            self.target, self.tokens, self.parents, self.cu, self.params, self.position, **self.options()
        )

    def options(self) -> dict:
        given = {"rule": self.rule, "replacement": self.replacement, "max_depth": 3}
        if self.draft is not None:
            given |= {"draft_logits": self.draft, "draft_rows": self.rows, "draft_params": self.params}
        return given


def tree_case(rows: Rows, dtype: torch.dtype, rule: str, replacement: bool | None) -> TreeCase:
    """`rows.batch` requests. A node's children are the likeliest of its draft row, or drawn from it; rows repeat as needed."""
    n, B = len(PARENTS), rows.batch
    index = torch.arange(B * (n + 1)) % rows.target.shape[0]
    target = rows.target[index].to(dtype)
    generator = torch.Generator().manual_seed(3)
    draft = target.float().add_(0.5 * torch.randn(target.shape, generator=generator)).to(dtype)
    params = SamplingTensors.create(TEMPERATURE, TOP_P, seed=1, batch_size=B)
    position = 100 + torch.arange(B)
    tokens, draft_rows = torch.zeros(B, n, dtype=torch.int64), torch.zeros(B, n, dtype=torch.int64)
    for node in sorted(set(PARENTS)):
        children = [c for c, parent in enumerate(PARENTS, 1) if parent == node]
        at = torch.arange(B) * (n + 1) + node
        top = draft[at].float().topk(len(children)).indices
        drawn = specdec_kernels.sample(
            draft[at], params, position, stream=0, ids=torch.full((B,), children[0] - 1), num_samples=len(children) + 4
        ).tokens.long()
        if rule == "greedy_draft":
            fixed = top[:, : len(children) - 1]
            others = (drawn[:, :, None] != fixed[:, None]).all(2)
            drawn = torch.cat([fixed, drawn.gather(1, others.int().argmax(1, keepdim=True))], 1)
        tokens[:, [c - 1 for c in children]] = (top if rule == "target_only" else drawn)[:, : len(children)]
        draft_rows[:, [c - 1 for c in children]] = at[:, None]
    reads_q = rule != "target_only"
    return TreeCase(
        rule, replacement, target, tokens.flatten(), torch.tensor(PARENTS * B), torch.arange(B + 1, dtype=torch.int32) * n,
        params, position, draft if reads_q else None, draft_rows.flatten() if reads_q else None,
    )  # fmt: skip


def check(case: TreeCase, output: specdec_kernels.TreeOutput) -> dict:
    """Paths and tokens of the oracle, but for what float32 cannot decide."""
    expected = python_ref.verify_tree(
        case.target, case.tokens, case.parents, case.cu, case.params, case.position, **case.options()
    )
    undecided = 0
    for b in range(case.cu.shape[0] - 1):
        same = torch.equal(output.tokens[b], expected.tokens[b]) and torch.equal(output.path[b], expected.path[b])
        if not same and float(expected.margin[b]) >= MARGIN:
            raise GateError(f"verify_tree {case.rule}: request {b} emits {output.tokens[b].tolist()}, the oracle "
                            f"{expected.tokens[b].tolist()} with margin {float(expected.margin[b]):.1e}")  # fmt: skip
        undecided += not same
    return {"checked": case.cu.shape[0] - 1, "undecided": undecided}


def run(settings: Settings) -> list[dict]:
    results = []
    for make in main_rows(settings.quick):
        rows = make()
        for dtype in DTYPES:
            for rule, replacement in RULES:
                case = tree_case(rows, dtype, rule, replacement)
                gate = check(case, case())
                read = (case.target,) if case.draft is None else (case.target, case.draft)
                copies = [torch.empty_like(r) for r in read]
                calls = {
                    NAME: case,
                    "amax": lambda read=read: [r.amax(-1) for r in read],
                    "softmax": lambda read=read: [r.softmax(-1) for r in read],
                    "copy": lambda read=read, copies=copies: [c.copy_(r) for c, r in zip(copies, read, strict=True)],
                }
                out = case()
                measured = summary(paired(calls, settings.rounds, settings), NAME)
                row = case.target[0].numel() * case.target.element_size()
                path_rows = int(out.num_emitted.sum()) * (1 if case.draft is None else 2)
                results.append({
                    "kind": "reading", "rows": rows.label, "rule": rule, "dtype": str(dtype).removeprefix("torch."),
                    "batch": rows.batch, "nodes": len(PARENTS), "vocab": case.target.shape[1],
                    "mean_accepted": float(out.num_accepted.double().mean()), "gate": gate, **measured,
                    **bandwidth(measured, NAME, path_rows * row, sum(r.shape[0] for r in read) * row),
                })  # fmt: skip
    return results


def report(results: list[dict]) -> str:
    parts = []
    for label in dict.fromkeys(r["rows"] for r in results):
        chosen = [r for r in results if r["rows"] == label]
        head = chosen[0]
        parts.append(f"\n{NAME} · {label} · B={head['batch']}, trees of {head['nodes']} drafts, V={head['vocab']}")
        lines = [
            [r["rule"], r["dtype"], f"{r['mean_accepted']:.1f}", ms(r["ms"][NAME]), times(r["ratio"]["amax"]),
             times(r["ratio"]["softmax"])]
            for r in chosen
        ]  # fmt: skip
        parts.append(
            table(["rule", "dtype", "accepted", "median (p25-p75)", "/ amax of all", "/ softmax of all"], lines)
        )
    return "\n".join(parts)
