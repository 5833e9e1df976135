"""Speculative sampling over trees of drafts: which path of drafts is accepted, then a token from what is left there.

A request's tree has nodes 0 (the root: the last token of the text) to d (its drafts). Row n of its target rows is the
distribution p_n of the token after node n; a node's children are guesses of that token, tried in the order of their ids.

target_only (SpecInfer's and EAGLE's rule for children that were chosen, not drawn): one coin a node; child c is accepted with
probability p_n(c), the coin's interval of the running sum. None: a token of p_n without the children's.

recursive (SpecInfer 2305.09781; without replacement: Sequoia 2402.12374): child x drawn from q is accepted with probability
min(1, p(x) / q(x)); rejected, p becomes (p - q)_+ / sum, and where the children were drawn without replacement q loses x and is
renormalised. All rejected: a token of what p has become.

traversal (2505.12398): from the leaves to the root. w_0 = 1, a child's weight is min(1, w p(x) / q(x)) with the w, p and q its
parent has at that time. A node without (more) children is accepted, and with it the path to it, with probability w; a child
that is rejected leaves its parent with p = (w p - q)_+ / Z and w = Z / (Z + 1 - w), Z the sum, and q as above. On a chain it is
the block rule. The root is always accepted; the emitted token is one of what p has become at the accepted node.

greedy_draft (Hu et al. 2502.18779): the last child is drawn from q without its siblings, which are q's largest. It is tested
first, against that q; rejected, p becomes (p - q)_+ / sum and target_only decides about its siblings. Where the last child is a
placeholder there is no drawn one, and in a tree that is cut it may be missing: target_only decides alone, which is always right.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import rng
from .nucleus import Nucleus
from .params import (
    STATUS_BAD_OFFSETS,
    STATUS_BAD_Q_ROW,
    STATUS_EMPTY_ROW,
    STATUS_PLACEHOLDER,
    STATUS_ZERO_Q,
    RowParams,
    request_params,
)
from .rows import DraftSource, accepts, finite, race_signed, sampled_probs_status, target_row
from .sample import race

RULES = ("target_only", "recursive", "traversal", "greedy_draft")
MAX_NODES = 128
"""Drafts of a request that are looked at."""


class TreeResult(NamedTuple):
    """tokens int32 [B, K + 1], padded with -1: the drafts of the accepted path, then one more · num_accepted int32 [B], the
    path's length · path int32 [B, K], its nodes (1 .. d, the row offsets within the request), padded with -1 · num_emitted
    int32 [B] · status int32 [B] · logprobs float64 [B, K + 1], log p of each emitted token under its row · nucleus [B, K + 1]
    of the emitted rows · margin float64 [B], as in `verify_chain`."""

    tokens: Tensor
    num_accepted: Tensor
    path: Tensor
    num_emitted: Tensor
    status: Tensor
    logprobs: Tensor
    nucleus: Nucleus
    margin: Tensor


NEAR = 1e-3
"""A token this close (in relative error) to being left over counts towards the error of what is left."""


class Left(NamedTuple):
    """What is left of a row's p, and by how much a relative error of 1 of all probabilities changes it."""

    p: Tensor
    error: Tensor


class Weight(NamedTuple):
    """A node's weight and its error; `ratio`: what it is before the cap at 1."""

    value: float
    error: float
    ratio: float


def without(left: Left, weight: Weight, q: Tensor, q_error: Tensor) -> tuple[Left, Weight]:
    """A node's state after a child drawn from `q` was rejected: p = (w p - q)_+ / Z, w = Z / (Z + 1 - w). With w = 1 that is
    the residual of `recursive`, and w stays 1. Where nothing is left (p = q), p stays, and a weight below 1 ends."""
    signed = weight.value * left.p - q
    error = weight.value * left.error + weight.error * left.p + q_error
    rest = signed.clamp_min(0.0)
    mass = float(rest.sum())
    if not mass > 0:
        stays = 1.0 if weight.value >= 1 else 0.0
        return left, Weight(stays, weight.error, stays)
    mass_error = float(error[(signed > -NEAR * error) & (left.p > 0)].sum())
    total = mass + (1 - weight.value)
    w = mass / total
    w_error = ((1 - w) * mass_error + w * weight.error) / total
    possible = left.p > 0
    return (
        Left(
            rest / mass,
            torch.where(possible, error, torch.zeros_like(error)) / mass + rest / mass * (mass_error / mass),
        ),
        Weight(1.0, 0.0, 1.0) if weight.value >= 1 else Weight(w, w_error, w),
    )


def child_weight(weight: Weight, p_x: float, p_error: float, q_x: float, q_error: float) -> Weight:
    """min(1, w p(x) / q(x))."""
    ratio = weight.value * p_x / q_x
    error = (weight.value * p_error + weight.error * p_x) / q_x + ratio * q_error / q_x
    return Weight(min(1.0, ratio), error, ratio)


def picks(coin: float, masses: list[float]) -> int:
    """Index of the first running sum of `masses` above the coin; their number where there is none."""
    total = 0.0
    for i, mass in enumerate(masses):
        total += mass
        if coin < total:
            return i
    return len(masses)


class Request:
    """One request's tree, rows and random numbers; `margin` and the rows' states are gathered as they are read."""

    def __init__(
        self, index, start, parents, tokens, params, anchor, target, is_probs, source, replacement, order, whole
    ):
        self.index, self.start, self.tokens, self.whole = index, start, tokens, whole
        self.params, self.anchor, self.target, self.is_probs = params, anchor, target, is_probs
        self.source, self.replacement, self.order = source, replacement, order
        self.children = {n: [] for n in range(len(parents) + 1)}
        self.parent = {0: -1}
        for node, parent in enumerate(parents, 1):
            if parent in self.parent:  # else it, or what it hangs from, is not there
                self.children[parent].append(node)
                self.parent[node] = parent
        self.margin, self.states, self.nuclei, self.drawn = math.inf, {}, {}, {}

    @property
    def vocab(self) -> int:
        return self.target.shape[1]

    @property
    def greedy(self) -> bool:
        return self.params.greedy and not self.is_probs

    def raw_row(self, node: int) -> Tensor:
        return self.target[self.start + self.index + node]

    def row(self, node: int) -> Tensor:
        """p of a node's row; an empty row has no children."""
        row = target_row(self.raw_row(node), self.params, self.order, self.is_probs)
        if node not in self.states:
            self.states[node] = row.nucleus.status
            self.nuclei[node] = (row.p, row.nucleus)
            self.margin = min(self.margin, row.nucleus.margin)
            if row.nucleus.status & STATUS_EMPTY_ROW:
                self.children[node] = []
            known, last = [], (self.children[node] or [None])[-1]
            for child in self.children[node]:
                if 0 <= self.token(child) < self.vocab:
                    known.append(child)
                else:
                    self.states[node] |= STATUS_PLACEHOLDER
            self.children[node] = known
            self.drawn[node] = last if last in known else None
        return row.p

    def token(self, node: int) -> int:
        return int(self.tokens[self.start + node - 1])

    def draft_row(self, node: int) -> Tensor | None:
        """q that the children of a node were drawn from, that of the first of them; None if it cannot be used."""
        first = self.children[node][0]
        q, margin = self.source.row(self.start + first - 1, self.index, self.token(first))
        self.margin = min(self.margin, margin)
        if q is None:
            self.states[node] |= STATUS_BAD_Q_ROW
            return None
        return finite(q)

    def coin(self, node: int) -> float:
        """The coin of a node, keyed by its draft offset. (`target_only` keys a parent's coin by the parent's number n, which is
        the offset of node n + 1.)"""
        return rng.coin(self.params.seed, self.anchor, node - 1)

    def depth(self, node: int) -> int:
        return 0 if node == 0 else 1 + self.depth(self.parent[node])

    def path(self, node: int) -> list[int]:
        return [] if node == 0 else [*self.path(self.parent[node]), node]

    def noise(self, node: int) -> Tensor:
        position = self.anchor + self.depth(node)
        return rng.race_noise(self.params.seed, position, rng.STREAM_SAMPLE, 0, self.vocab)

    def decide(self, margin: float) -> None:
        self.margin = min(self.margin, margin)

    def test(self, coin: float, a: float, a_error: float, b: float, b_error: float) -> bool:
        """Whether coin * b < a, and how sure that is."""
        if a_error + b_error > 0:
            self.decide(abs(a - coin * b) / (a_error + coin * b_error))
        return accepts(coin, a, b)

    def emit(self, node: int, left: Left | None) -> int:
        """Token of the accepted node's row, of what is left of it if anything was taken."""
        if self.states[node] & STATUS_EMPTY_ROW:
            return 0
        p = self.nuclei[node][0]
        if self.is_probs:
            self.states[node] |= sampled_probs_status(self.raw_row(node))
        token, gap = race(p, self.noise(node)) if left is None else race_signed(left.p, left.error, self.noise(node))
        self.decide(math.inf if self.greedy else gap)
        return token


def _draft_left(q: Tensor, taken: list[int]) -> tuple[Tensor, Tensor]:
    """q without the tokens in `taken`, renormalised if there are any, and its error."""
    if not taken:
        return q, q
    q = q.clone()
    q[taken] = 0.0
    mass = float(q.sum())
    return (q / mass, 2 * q / mass) if mass > 0 else (q, q)


def greedy_walk(r: Request) -> tuple[int, int]:
    node = 0
    while True:
        token = int(r.row(node).argmax())
        chosen = [c for c in r.children[node] if r.token(c) == token and not r.states[node] & STATUS_EMPTY_ROW]
        if not chosen:
            return node, 0 if r.states[node] & STATUS_EMPTY_ROW else token
        node = chosen[0]


def distinct(r: Request, children: list[int]) -> list[int]:
    seen, out = set(), []
    for child in children:
        if r.token(child) not in seen:
            seen.add(r.token(child))
            out.append(child)
    return out


def _target_only_at(r: Request, left: Left, children: list[int], coin_of: int) -> tuple[int | None, Left | None]:
    """(the accepted child or None, what is left of p without the children; None if that is nothing)."""
    masses = [float(left.p[r.token(c)]) for c in children]
    coin = r.coin(coin_of)
    total = error = 0.0
    for c, mass in zip(children, masses, strict=True):
        total, error = total + mass, error + float(left.error[r.token(c)])
        if error > 0:
            r.decide(abs(coin - total) / error)
    chosen = picks(coin, masses)
    if chosen < len(children):
        return children[chosen], left
    return None, without_tokens(left, [r.token(c) for c in children])


def without_tokens(left: Left, taken: list[int]) -> Left | None:
    """What is left when tokens are taken out; None if that is nothing."""
    p, p_error = left.p.clone(), left.error.clone()
    p[taken] = 0.0
    p_error[taken] = 0.0
    return Left(p, p_error) if p.any() else None


def _target_only(r: Request) -> tuple[int, int]:
    node = 0
    while True:
        p = r.row(node)
        if not r.children[node]:
            return node, r.emit(node, None)
        child, left = _target_only_at(r, Left(p, p), distinct(r, r.children[node]), node + 1)
        if child is None:
            return node, r.emit(node, left)
        node = child


def _recursive(r: Request) -> tuple[int, int]:
    node = 0
    while True:
        p = r.row(node)
        left, one, taken, chosen = Left(p, p), Weight(1.0, 0.0, 1.0), [], None
        q = r.draft_row(node) if r.children[node] else None
        for child in r.children[node] if q is not None else []:
            q_now, q_error = _draft_left(q, taken)
            x = r.token(child)
            if not q_now[x] > 0:  # it was not drawn from q, and what is left of p is right whatever it was
                r.states[node] |= STATUS_ZERO_Q
                break
            if r.test(r.coin(child), float(left.p[x]), float(left.error[x]), float(q_now[x]), float(q_error[x])):
                chosen = child
                break
            left, _ = without(left, one, q_now, q_error)
            if not r.replacement:
                taken.append(x)
        if chosen is None:
            return node, r.emit(node, None if left.p is p else left)
        node = chosen


def _traversal(r: Request) -> tuple[int, int]:
    def visit(node: int, weight: Weight) -> tuple[int, int] | None:
        p = r.row(node)
        left, taken = Left(p, p), []
        q = r.draft_row(node) if r.children[node] else None
        for child in r.children[node] if q is not None else []:
            q_now, q_error = _draft_left(q, taken)
            x = r.token(child)
            if not q_now[x] > 0:
                r.states[node] |= STATUS_ZERO_Q
                break
            below = child_weight(weight, float(left.p[x]), float(left.error[x]), float(q_now[x]), float(q_error[x]))
            if below.value > 0 and (found := visit(child, below)) is not None:
                return found
            before = weight
            left, weight = without(left, weight, q_now, q_error)
            if not weight.value > 0:  # unless some of p is left after all
                edge = q_now - before.value * left.p
                slack = before.value * left.error + before.error * left.p + q_error
                r.decide(min((edge / slack)[left.p > 0].tolist(), default=math.inf))
                return None
            if not r.replacement:
                taken.append(x)
        if node and not r.test(r.coin(node), weight.ratio, weight.error, 1.0, 0.0):
            return None
        return node, r.emit(node, None if left.p is p else left)

    return visit(0, Weight(1.0, 0.0, 1.0))


def _greedy_draft(r: Request) -> tuple[int, int]:
    if not r.whole:
        return _target_only(r)
    node = 0
    while True:
        p = r.row(node)
        left, chosen, drawn = Left(p, p), None, r.drawn[node]
        q = r.draft_row(node) if drawn is not None else None
        fixed = distinct(r, [c for c in r.children[node] if c != drawn])
        if drawn is None and fixed:
            chosen, left = _target_only_at(r, left, fixed, fixed[0])
        elif q is not None:
            x, taken = r.token(drawn), [r.token(c) for c in fixed]
            q_now, q_error = _draft_left(q, taken)
            if not q_now[x] > 0:
                r.states[node] |= STATUS_ZERO_Q
            elif r.test(r.coin(drawn), float(left.p[x]), float(left.error[x]), float(q_now[x]), float(q_error[x])):
                chosen = drawn
            else:
                left, _ = without(left, Weight(1.0, 0.0, 1.0), q_now, q_error)
            if chosen is None and fixed and not r.states[node] & STATUS_ZERO_Q:
                chosen, left = _target_only_at(r, left, fixed, fixed[0])
        if chosen is None:
            return node, r.emit(node, None if left is None or left.p is p else left)
        node = chosen


def tree_depth(parents: list[int]) -> int:
    """Length of the longest path of a tree given as parents of its nodes 1, 2, ..."""
    depth = {0: 0}
    for node, parent in enumerate(parents, 1):
        if parent in depth:
            depth[node] = depth[parent] + 1
    return max(depth.values())


def verify_tree(
    target_logits: Tensor | None,
    draft_tokens: Tensor,
    parents: Tensor,
    cu_num_draft: Tensor,
    params,
    position: Tensor | None = None,
    *,
    rule: str = "target_only",
    replacement: bool | None = None,
    draft_logits: Tensor | None = None,
    draft_rows: Tensor | None = None,
    draft_nucleus: Nucleus | None = None,
    draft_probs: Tensor | None = None,
    draft_params=None,
    target_to_draft: Tensor | None = None,
    target_probs: Tensor | None = None,
    max_depth: int | None = None,
    filter_order: str = "hf",
) -> TreeResult:
    """One speculative step of B requests; arguments as `specdec_kernels.verify_tree`."""
    if rule not in RULES:
        raise ValueError(f"rule must be one of {RULES}, got {rule!r}")
    if (replacement is None) != (rule in ("target_only", "greedy_draft")):
        raise ValueError(
            f"replacement must be given for 'recursive' and 'traversal' only, got {replacement!r} for {rule!r}"
        )
    needs_q = rule != "target_only"
    if needs_q and (draft_logits is None) == (draft_probs is None):
        raise ValueError(f"rule {rule!r} needs draft_logits or draft_probs")
    if draft_logits is not None and draft_params is None:
        raise ValueError("draft_logits needs draft_params")
    target, is_probs = target_of(target_logits, target_probs)
    source = DraftSource(
        target.shape[1],
        draft_logits,
        draft_rows,
        draft_nucleus,
        draft_probs,
        draft_params,
        target_to_draft,
        filter_order,
    )
    walk = {
        "target_only": _target_only,
        "recursive": _recursive,
        "traversal": _traversal,
        "greedy_draft": _greedy_draft,
    }[rule]
    return run_walks(
        lambda r: greedy_walk(r) if r.greedy else walk(r),
        target, is_probs, draft_tokens, parents, cu_num_draft, params, position, max_depth, filter_order, source, replacement,
    )  # fmt: skip


def target_of(logits: Tensor | None, probs: Tensor | None) -> tuple[Tensor, bool]:
    """(the target's rows, whether they are probabilities)."""
    if (logits is None) == (probs is None):
        raise ValueError("exactly one of target_logits and target_probs must be given")
    return (logits, False) if logits is not None else (probs, True)


def run_walks(
    walk, target, is_probs, draft_tokens, parents, cu_num_draft, params, position, max_depth, filter_order,
    source=None, replacement=None,
) -> TreeResult:  # fmt: skip
    """One step of B requests, where `walk` takes a `Request` to (accepted node, token emitted there)."""
    num_rows = target.shape[0]
    offsets = [int(v) for v in cu_num_draft]
    B, D = len(offsets) - 1, min(draft_tokens.numel(), parents.numel())
    spans, trees = [], []
    for b in range(B):
        start = min(max(offsets[b], 0), D)
        end = min(max(offsets[b + 1], start), D)
        d = min(end - start, MAX_NODES, num_rows - 1 - start - b)
        tree, depth, bad = [], {0: 0}, d < 0 or (start, start + d) != (offsets[b], offsets[b + 1])
        for node, parent in enumerate((int(v) for v in parents[start : start + max(d, 0)]), 1):
            known = parent in depth and (max_depth is None or depth[parent] < max_depth)
            if known:
                depth[node] = depth[parent] + 1
            # -1: a node that is not there; one that hangs from it is not either.
            bad |= parent >= node or parent < -1 or (parent in depth and not known)
            tree.append(parent if known else -1)
        spans.append((start, d, bad))
        trees.append(tree)
    K = max([0, *(tree_depth(tree) for tree in trees)]) if max_depth is None else max_depth
    tokens = torch.full((B, K + 1), -1, dtype=torch.int32)
    paths = torch.full((B, K), -1, dtype=torch.int32)
    logprobs = torch.zeros(B, K + 1, dtype=torch.float64)
    fields = torch.zeros(3, B, K + 1, dtype=torch.float64)
    num_accepted, num_emitted, status = (torch.zeros(B, dtype=torch.int32) for _ in range(3))
    margins = torch.full((B,), math.inf, dtype=torch.float64)
    for b, ((start, d, bad), tree) in enumerate(zip(spans, trees, strict=True)):
        if d < 0:  # not even one row is there
            tokens[b, 0], num_emitted[b], status[b], logprobs[b, 0] = 0, 1, STATUS_BAD_OFFSETS, -math.inf
            fields[:, b, 0] = torch.tensor([math.inf, -math.inf, -math.inf], dtype=torch.float64)
            continue
        pb: RowParams = request_params(params, b)
        anchor = int(position[b]) if position is not None else 0
        r = Request(
            b, start, tree, draft_tokens, pb, anchor, target, is_probs, source, replacement, filter_order, not bad
        )  # fmt: skip
        node, token = walk(r)
        path = r.path(node)
        for i, (at, emitted) in enumerate(zip([0, *path], [*(r.token(n) for n in path), token], strict=True)):
            p, nucleus = r.nuclei[at]
            tokens[b, i] = emitted
            p_x = float(p[emitted])
            logprobs[b, i] = math.log(p_x) if p_x > 0 else -math.inf
            fields[:, b, i] = torch.tensor(nucleus[:3], dtype=torch.float64)
            status[b] |= r.states[at]
        paths[b, : len(path)] = torch.tensor(path, dtype=torch.int32)
        num_accepted[b], num_emitted[b], margins[b] = len(path), len(path) + 1, r.margin
        if bad:
            status[b] |= STATUS_BAD_OFFSETS
    return TreeResult(tokens, num_accepted, paths, num_emitted, status, logprobs, Nucleus(*fields), margins)
