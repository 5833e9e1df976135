"""Lossy acceptance over trees of drafts: rules whose text does not have the target's law, apart from those that are exact.

threshold (SGLang's target-only rule with its two thresholds): `target_only`, where child c is accepted at its turn if
u * threshold_acc is below the running sum of p, or if p(c) >= threshold_single. At 1 and 1 it is `target_only`.

typical (Medusa, 2401.10774): a node is accepted iff its parent is and p(x) > min(epsilon, delta * exp(-H(p))), p the
distribution of the parent's row and H its entropy in nats. The deepest accepted node wins, among equals that of the likeliest
path, then that of the lowest id; the emitted token is a token of p there.

synthetic (for load tests): the first child of a node of depth i is accepted with probability rates[i], whatever p says.
"""

import math

import torch
from torch import Tensor

from .rows import accepts
from .verify_tree import Left, Request, TreeResult, distinct, greedy_walk, picks, run_walks, target_of, without_tokens

LEAST = 2.0**-126
"""A probability up to float32's least normal number is none."""


def shares(masses: list[float], threshold_single: float, threshold_acc: float) -> list[float]:
    """Probabilities with which children that have `masses` are accepted under `threshold`."""
    out, left = [], 1.0
    for mass in masses:
        out.append(left if mass >= threshold_single else min(left, mass / threshold_acc))
        left -= out[-1]
    return out


def typical_bound(p: Tensor, epsilon: float, delta: float) -> tuple[float, float]:
    """(min(epsilon, delta * exp(-H(p))) without the epsilon, by how much a relative error of 1 of all of p changes it)."""
    entropy = float(torch.special.entr(p).sum().clamp_min(0.0))
    bound = delta * math.exp(-entropy)
    change = torch.where(p > 0, p * (1 + p.log()), torch.zeros_like(p)).abs().sum()
    return bound, bound * float(change)


def f32(value: float) -> float:
    """Thresholds are float32, as rates are."""
    return float(torch.tensor(value, dtype=torch.float32))


def _threshold(r: Request, single: float, acc: float) -> tuple[int, int]:
    node = 0
    while True:
        p, children = r.row(node), distinct(r, r.children[node])
        if not children:
            return node, r.emit(node, None)
        masses = [float(p[r.token(c)]) for c in children]
        coin, total = r.coin(node + 1), 0.0
        for mass in masses:
            total += mass
            # Accepted by either test, so it takes an error in both to reject, and one in either to accept.
            sure = [(a - b) / a for a, b in ((total, coin * acc), (mass, single)) if a > 0]
            r.decide(abs(max(sure, default=math.inf)))
            if max(sure, default=-1.0) >= 0:
                break
        chosen = picks(coin, shares(masses, single, acc))
        if chosen == len(children):
            return node, r.emit(node, without_tokens(Left(p, p), [r.token(c) for c in children]))
        node = children[chosen]


def _typical(r: Request, epsilon: float, delta: float) -> tuple[int, int]:
    log_p = {0: 0.0}
    for node in sorted(r.parent):
        if node not in log_p or not r.children[node]:
            continue
        p, children = r.row(node), r.children[node]
        by_entropy, error = typical_bound(p, epsilon, delta)
        for child in children:
            p_x = float(p[r.token(child)])
            if p_x == 0:
                continue
            sure = max((p_x - max(b, LEAST)) / (p_x + e) for b, e in ((epsilon, 0.0), (by_entropy, error)))
            r.decide(abs(sure))
            if sure > 0:
                log_p[child] = log_p[node] + math.log(p_x)
    depth = max(r.depth(node) for node in log_p)
    deepest = sorted(node for node in log_p if r.depth(node) == depth)
    best = max(deepest, key=lambda node: log_p[node])  # the first of equals
    for node in deepest:
        apart = len(set(r.path(node)) ^ set(r.path(best)))
        # Equal to the last bit, they are equal in any arithmetic: the same token twice, or rows that are alike.
        if log_p[node] < log_p[best]:
            r.decide((log_p[best] - log_p[node]) / apart)
    r.row(best)
    return best, r.emit(best, None)


def _synthetic(r: Request, rates: list[float]) -> tuple[int, int]:
    node = 0
    while True:
        r.row(node)
        depth = r.depth(node)
        rate = rates[depth] if depth < len(rates) else 0.0
        if not r.children[node] or not accepts(r.coin(node + 1), min(max(rate, 0.0), 1.0), 1.0):
            return node, r.emit(node, None)
        node = r.children[node][0]


def chain_parents(draft_tokens: Tensor, cu_num_draft: Tensor) -> Tensor:
    """Every draft behind the one before it."""
    parents = torch.zeros(draft_tokens.numel(), dtype=torch.int64)
    offsets = [min(max(int(v), 0), parents.numel()) for v in cu_num_draft]
    for b in range(len(offsets) - 1):
        start, end = offsets[b], max(offsets[b + 1], offsets[b])
        parents[start:end] = torch.arange(end - start)
    return parents


def _run(
    walk, target_logits, draft_tokens, cu_num_draft, params, position, parents, target_probs, max_depth, filter_order
):
    if parents is None:
        parents = chain_parents(draft_tokens, cu_num_draft)
    target, is_probs = target_of(target_logits, target_probs)
    return run_walks(
        walk, target, is_probs, draft_tokens, parents, cu_num_draft, params, position, max_depth, filter_order
    )


def typical(
    target_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_num_draft: Tensor,
    params,
    position: Tensor | None = None,
    *,
    parents: Tensor | None = None,
    epsilon: float = 0.09,
    delta: float = 0.3,
    target_probs: Tensor | None = None,
    max_depth: int | None = None,
    filter_order: str = "hf",
) -> TreeResult:
    """Arguments as `specdec_kernels.lossy.typical`."""
    bounds = f32(epsilon), f32(delta)
    return _run(
        lambda r: greedy_walk(r) if r.greedy else _typical(r, *bounds),
        target_logits, draft_tokens, cu_num_draft, params, position, parents, target_probs, max_depth, filter_order,
    )  # fmt: skip


def threshold(
    target_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_num_draft: Tensor,
    params,
    position: Tensor | None = None,
    *,
    parents: Tensor | None = None,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    target_probs: Tensor | None = None,
    max_depth: int | None = None,
    filter_order: str = "hf",
) -> TreeResult:
    """Arguments as `specdec_kernels.lossy.threshold`."""
    bounds = f32(threshold_single), f32(threshold_acc)
    return _run(
        lambda r: greedy_walk(r) if r.greedy else _threshold(r, *bounds),
        target_logits, draft_tokens, cu_num_draft, params, position, parents, target_probs, max_depth, filter_order,
    )  # fmt: skip


def synthetic(
    target_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_num_draft: Tensor,
    params,
    position: Tensor | None = None,
    *,
    rates: Tensor,
    parents: Tensor | None = None,
    target_probs: Tensor | None = None,
    max_depth: int | None = None,
    filter_order: str = "hf",
) -> TreeResult:
    """Arguments as `specdec_kernels.lossy.synthetic`."""
    return _run(
        lambda r: _synthetic(r, rates.nan_to_num(0.0).tolist()),
        target_logits, draft_tokens, cu_num_draft, params, position, parents, target_probs, max_depth, filter_order,
    )  # fmt: skip
