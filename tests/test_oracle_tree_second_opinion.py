"""A second implementation of `verify_tree`, written from the definitions alone (numpy, probability vectors, recursion),
against the oracle on random small trees full of hostile values.

Where the semantics leave a choice open, the comment "choice:" marks it; there the oracle's behaviour is pinned.
"""

import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from python_ref import Nucleus, SamplingParams, verify_tree
from tests import test_oracle_second_opinion as chain
from tests.test_oracle_second_opinion import BAD_OFFSETS, EMPTY_ROW, INF, NAN, UNDECIDED, Row, numpy, same

MOST_NODES = 128
RULES = [("target_only", None), ("greedy_draft", None)]
RULES += [(rule, replacement) for rule in ("recursive", "traversal") for replacement in (True, False)]
remembered_words = chain.remembered_words  # an autouse fixture

# --- the second implementation -----------------------------------------------------------------------------------------


@dataclass
class TreeCase(chain.Case):
    parents: torch.Tensor | None = None
    replacement: bool | None = None
    max_depth: int | None = None

    def call(self):
        options = ("rule", "replacement", "max_depth", "filter_order", "draft_logits", "draft_rows", "draft_nucleus")
        options += ("draft_probs", "draft_params", "target_to_draft")
        logits, probs = (None, self.target) if self.is_probs else (self.target, None)
        given = {name: getattr(self, name) for name in options} | {"target_probs": probs}
        tree = self.draft_tokens, self.parents, self.cu_num_draft
        return verify_tree(logits, *tree, self.params, self.position, **given)


class Tree:
    """One request: which nodes are there, their rows, coins and tests."""

    def __init__(self, c: TreeCase, b: int):
        self.c, self.b, self.request = c, b, chain.request_of(c.params, b)
        self.greedy = not c.is_probs and not self.request["temperature"] >= chain.GREEDY_BELOW
        self.anchor = 0 if c.position is None else int(c.position[b])
        claimed = int(c.cu_num_draft[b]), int(c.cu_num_draft[b + 1])
        # choice: bad offsets are clamped as in verify_chain; the root is none of the 128 nodes
        self.start = sorted((0, claimed[0], len(c.draft_tokens)))[1]
        end = sorted((self.start, claimed[1], len(c.draft_tokens)))[1]
        self.count = min(end - self.start, MOST_NODES, len(c.target) - self.start - b - 1)
        self.whole_status = BAD_OFFSETS if claimed != (self.start, self.start + self.count) else 0
        self.depth, self.kids = {0: 0}, {0: []}
        for n in range(1, self.count + 1):
            parent = int(c.parents[self.start + n - 1])
            valid = -1 <= parent < n
            if valid and parent in self.depth and self.depth[parent] != c.max_depth:
                self.depth[n], self.kids[n] = self.depth[parent] + 1, []
                self.kids[parent].append(n)
            elif not valid or parent in self.depth:  # choice: what hangs from an absent node has no status of its own
                self.whole_status |= BAD_OFFSETS

    def token(self, n: int) -> int:
        return int(self.c.draft_tokens[self.start + n - 1])

    def coin(self, id_: int) -> float:
        return chain.uniforms(chain.philox(self.request["seed"], self.anchor, 1, id_, 1)[:1])[0]

    def row(self, n: int) -> Row:
        logits = numpy(self.c.target)[self.start + self.b + n]
        if self.c.is_probs:
            return Row(np.where(logits > 0, logits, 0.0))
        return chain.filter_row(logits, self.request, self.c.filter_order)

    def status_when_drawn(self, n: int, row: Row) -> int:
        """choice: a row of probabilities reports a NaN, or that it is empty, only where the last token is drawn from it"""
        if not self.c.is_probs:
            return row.status
        nan = np.isnan(numpy(self.c.target)[self.start + self.b + n]).any()
        return row.status | chain.NAN_SEEN * bool(nan) | EMPTY_ROW * (not row.p.any())

    def children(self, n: int, row: Row) -> list[int]:
        """The children to look at; the row's status learns of placeholders, wherever they stand among the children."""
        if row.status & EMPTY_ROW:
            return []  # choice: they are not looked at, not even for status (under a row of zero probabilities they are)
        valid = [k for k in self.kids[n] if 0 <= self.token(k) < self.c.vocab]
        row.status |= chain.PLACEHOLDER if len(valid) < len(self.kids[n]) else 0
        return valid

    def draft(self, kids: list[int], row: Row) -> np.ndarray | None:
        # choice: a saved nucleus is the first sibling's, like the row; of probabilities the first sibling's alone is
        # looked at for NaN, elsewhere a NaN counts as 0; a row with no mass on the target's ids is q(x) = 0, not unusable
        q = chain.draft_row(self.c, self.start + kids[0] - 1, self.b, self.token(kids[0]))
        row.status |= chain.BAD_Q_ROW if q is None else 0
        return None if q is None else np.where(q > 0, q, 0.0)  # taken as it is, normalised where it loses tokens

    def descend(self, n: int) -> tuple[int | None, Row, np.ndarray]:
        """The accepted child of node n if any, its row, and what is left of p."""
        row = self.row(n)
        kids, p = self.children(n, row), row.p
        if not kids:
            return None, row, p
        if self.greedy:
            return next((k for k in kids if p[self.token(k)] > 0), None), row, p
        if self.c.rule == "target_only":
            k, p = self.one_coin(kids, p, self.coin(n))
            return k, row, p
        if self.c.rule == "greedy_draft" and self.whole_status:  # choice: by target_only, drawn children may be missing
            k, p = self.one_coin(kids, p, self.coin(n))
            return k, row, p
        if self.c.rule == "greedy_draft" and self.kids[n][-1] not in kids:  # choice: nobody was drawn
            k, p = self.one_coin(kids, p, self.coin(kids[0] - 1))
            return k, row, p
        q = self.draft(kids, row)
        if q is None:
            return None, row, p
        drawn, chosen = kids, []
        if self.c.rule == "greedy_draft":
            *chosen, last = kids
            q, drawn = without(q, [self.token(k) for k in chosen]), [last]
        for k in drawn:
            x = self.token(k)
            if not q[x] > 0:
                row.status |= chain.ZERO_Q
                return None, row, p
            if self.coin(k - 1) * q[x] < p[x]:
                return k, row, p
            left = np.maximum(p - q, 0.0)
            p = left / left.sum() if left.any() else p
            q = q if self.c.replacement else without(q, [x])
        k, p = self.one_coin(chosen, p, self.coin(chosen[0] - 1)) if chosen else (None, p)
        return k, row, p

    def one_coin(self, kids: list[int], p: np.ndarray, u: float) -> tuple[int | None, np.ndarray]:
        running, left = 0.0, p.copy()
        for k in kids:
            running += left[self.token(k)]  # 0 for a duplicate
            left[self.token(k)] = 0.0
            if u < running:
                return k, p
        return None, left if left.any() else p

    def climb(self, n: int, w: float) -> tuple[list[tuple[int, Row]], np.ndarray] | None:
        """Traversal: the nodes from n down to the accepted one with their rows, and what is left of p there; or None."""
        row = self.row(n)
        kids, p = self.children(n, row), row.p
        q = self.draft(kids, row) if kids else None
        for k in kids if q is not None else []:
            x = self.token(k)
            if not q[x] > 0:
                row.status |= chain.ZERO_Q
                break
            below = self.climb(k, min(1.0, w * p[x] / q[x]))
            if below is not None:
                return [(n, row), *below[0]], below[1]
            left = np.maximum(w * p - q, 0.0)
            z = left.sum()
            if z > 0:
                p, w = left / z, z / (z + 1 - w)
            elif w < 1:
                return None
            q = q if self.c.replacement else without(q, [x])
        return ([(n, row)], p) if n == 0 or self.coin(n - 1) < w else None

    def verify(self) -> dict:
        if self.count < 0:  # choice: no row at all emits id 0
            return {"tokens": [0], "logprobs": [-INF], "path": [], "status": BAD_OFFSETS}
        if self.c.rule == "traversal" and not self.greedy:
            steps, left = self.climb(0, 1.0)
        else:
            steps, n = [], 0
            while n is not None:
                child, row, left = self.descend(n)
                steps.append((n, row))
                n = child
        path, rows = [n for n, _ in steps[1:]], [row for _, row in steps]
        e = chain.exponentials(self.request["seed"], self.anchor + len(path), 2, 0, self.c.vocab)
        tokens = [self.token(n) for n in path] + [chain.winner(left, e)]
        logs = [math.log(r.p[t]) if r.p[t] > 0 else -INF for r, t in zip(rows, tokens, strict=True)]
        status = self.whole_status | self.status_when_drawn(steps[-1][0], rows[-1])
        for row in rows[:-1]:
            status |= row.status
        return {"tokens": tokens, "logprobs": logs, "path": path, "status": status}


def without(q: np.ndarray, tokens: list[int]) -> np.ndarray:
    q = q.copy()
    q[tokens] = 0.0
    return q / q.sum() if tokens and q.any() else q


# --- random calls ------------------------------------------------------------------------------------------------------


def random_parents(r: random.Random, d: int, kind: str) -> list[int]:
    if kind in ("chain", "star", "binary"):
        return {"chain": list(range(d)), "star": [0] * d, "binary": [n // 2 for n in range(d)]}[kind]
    parents = [r.randrange(n + 1) if r.random() < 0.5 else r.randrange(max(0, n - 2), n + 1) for n in range(d)]
    for n in range(d):
        if kind == "hostile" and r.random() < 0.3:
            parents[n] = r.choice([-1, -1, -2, n + 1, n + 2, 2**31 - 1, -(2**31)])
    return parents


def tree_params(r: random.Random, n: int, slots: bool) -> SamplingParams:
    params = chain.random_params(r, n, slots)
    if r.random() < 0.6:  # a temperature alone
        t, top_p, top_k, min_p = params[:4]
        warm = torch.full_like(t, r.choice([0.7, 1.0, 1.0, 1.3]))
        params = params._replace(temperature=warm, top_p=top_p * 0 + 1, top_k=top_k * 0, min_p=min_p * 0)
    return params


def random_case(seed: int, rule: str, replacement: bool | None) -> TreeCase:
    r, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, vocab, hostile = r.randrange(1, 5), r.randrange(2, 13), r.choice([0.0, 0.0, 0.1, 0.3])
    lengths = [r.choice([0, 1, 3, 5, 7, 9]) for _ in range(batch)]
    if seed % 40 == 0:
        lengths[-1] = MOST_NODES - 1 + seed // 40 % 3
    cu = [sum(lengths[:b]) for b in range(batch + 1)]
    total, owner = cu[-1], [b for b in range(batch) for _ in range(lengths[b])]
    target = chain.random_rows(r, total + batch + r.randrange(3), vocab, hostile).mul_(r.choice([0.3, 1]))
    if is_probs := r.random() < 0.15:
        target = target.double().softmax(-1).float() if r.random() < 0.8 else target.nan_to_num(NAN, 1, 0)
    kinds = ["any", "any", "chain", "star", "star", "binary", "hostile"]
    parents = [p for d in lengths for p in random_parents(r, d, r.choice(kinds))]
    parent_row = [cu[b] + b + min(max(p, 0), lengths[b]) for b, p in zip(owner, parents, strict=True)]
    bad, distinct, drafts = r.choice([0.0, 0.0, 0.1]), r.random() < 0.6, []
    for at in parent_row:
        likely = (target[at].double().softmax(-1).nan_to_num(0) ** r.choice([0, 0.5, 1]) + 1e-3).tolist()
        taken = {token for token, row in zip(drafts, parent_row, strict=False) if row == at and distinct}
        likely = [0 if v in taken and len(taken) < vocab else w for v, w in enumerate(likely)]
        token = r.choices(range(vocab), likely)[0] if any(likely) else 0
        drafts.append(r.choice([-1, vocab, 2**31 - 1, -(2**31)]) if r.random() < bad else token)
    integer, order = r.choice([torch.int32, torch.int64]), r.choice(["hf", "vllm", "joint"])
    ids, offsets = torch.tensor(drafts, dtype=integer), torch.tensor(cu, dtype=torch.int32)
    position = torch.tensor([r.choice([*range(20), 2**32 - 2, 2**40, -3]) for _ in range(batch)])
    position = position if r.random() < 0.8 else None
    params = tree_params(r, batch, r.random() < 0.3)
    c = TreeCase(vocab, target, is_probs, ids, offsets, params, position, rule, None, True, order)
    c.parents = torch.tensor(parents, dtype=integer)
    c.replacement, c.max_depth = replacement, r.choice([None] * 8 + [0, 1, 2, 3, 9])
    if r.random() < 0.05:  # bad offsets, or rows missing
        c.cu_num_draft[r.randrange(batch + 1)] = r.choice([-2, 0, total + 3, 1])
        c.target = target[: r.randrange(1, len(target) + 1)]
    if rule == "target_only" and r.random() < 0.5:
        return c
    form, draft_vocab, q_rows = r.choice(["logits", "logits", "nucleus", "probs", "probs"]), vocab, total
    if r.random() < 0.15:
        draft_vocab = r.randrange(1, vocab + 2)
        c.target_to_draft = torch.tensor([r.randrange(-1, draft_vocab + 1) for _ in range(vocab)])
    if r.random() < 0.2:
        q_rows = total + 3
        hit = [r.randrange(-1, q_rows + 1) if r.random() < 0.1 else r.randrange(q_rows) for _ in range(total)]
        c.draft_rows = torch.tensor(hit, dtype=integer)
    q = chain.random_rows(r, q_rows, draft_vocab, hostile).mul_(r.choice([0.3, 1]))
    if draft_vocab == vocab and not is_probs:
        for j in (j for j in range(total) if r.random() < 0.8):  # q = p, or close to it
            near = torch.randn(vocab, generator=noise) * r.choice([0, 1, 2])
            q[j] = target[parent_row[j]] + near.to(target.dtype)
    if form == "probs":
        c.draft_probs = q.double().softmax(-1).float() * r.choice([0.0, 0.5, 2.0] if r.random() < 0.2 else [1.0])
    else:
        c.draft_logits = q
        c.draft_params = c.params if r.random() < 0.7 else tree_params(r, batch, False)
    if form == "nucleus":
        fields = torch.zeros(3, total, dtype=torch.float64)
        for j in range(total):
            at = j if c.draft_rows is None else min(max(int(c.draft_rows[j]), 0), q_rows - 1)
            row = chain.filter_row(numpy(q)[at], chain.request_of(c.draft_params, owner[j]), order)
            values = [r.choice([NAN, INF, -INF]) if r.random() < 0.03 else f for f in row.nucleus]
            fields[:, j] = torch.tensor(values, dtype=torch.float64)
        c.draft_nucleus = Nucleus(*fields)
    return c


@pytest.mark.parametrize("rule, replacement", RULES)
def test_verify_tree_second_opinion(rule, replacement):
    requests, undecided, statuses, accepted, crowded = 0, 0, 0, set(), False
    for seed in range(120):
        c = random_case(seed + 1000 * RULES.index((rule, replacement)), rule, replacement)
        out, trees = c.call(), [Tree(c, b) for b in range(len(c.cu_num_draft) - 1)]
        # choice: K is the depth of the deepest tree where max_depth is not given
        width = c.max_depth if c.max_depth is not None else max(d for tree in trees for d in tree.depth.values())
        assert (out.tokens.shape, out.path.shape) == ((len(trees), width + 1), (len(trees), width)), seed
        for b, tree in enumerate(trees):
            requests += 1
            if not float(out.margin[b]) > UNDECIDED:
                undecided += 1
                continue
            mine, depth = tree.verify(), int(out.num_accepted[b])
            pad = [-1] * (width - len(mine["path"]))
            assert out.path[b].tolist() == mine["path"] + pad, (seed, b)
            assert out.tokens[b].tolist() == mine["tokens"] + pad, (seed, b)
            assert (depth, int(out.num_emitted[b])) == (len(mine["path"]), len(mine["tokens"])), (seed, b)
            assert int(out.status[b]) == mine["status"], (seed, b)
            assert same(out.logprobs[b], mine["logprobs"] + [0.0] * len(pad)), (seed, b)
            statuses |= mine["status"]
            accepted.add(depth)
            crowded |= tree.count == MOST_NODES
    assert statuses == (51 if rule == "target_only" else 63)  # every status bit came up
    assert accepted >= {0, 1, 2, 3} and crowded
    assert undecided < 0.02 * requests
