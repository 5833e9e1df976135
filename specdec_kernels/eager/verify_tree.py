"""`verify_tree` in plain torch: the walks of all requests side by side, a step at a time."""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _backends
from . import _lossy, _rows
from ._trees import Trees
from ._verify import Draft, Target, excess
from .sample import gather_seed

TARGET_ONLY, RECURSIVE, TRAVERSAL, GREEDY_DRAFT = range(4)
LEAST = 1e-300  # divides where the quotient is not used


class _Left(NamedTuple):
    """What rejections left of a node's p: (omega p - q)+ / mass where something was taken, else p. float64, bool [B]."""

    taken: Tensor
    omega: Tensor
    mass: Tensor

    def of(self, p, q) -> Tensor:
        return torch.where(self.taken[:, None], excess(p, q, self.omega) / self.mass[:, None], p)

    def where(self, condition, other: "_Left") -> "_Left":
        return _Left(*(torch.where(condition, a, b) for a, b in zip(self, other, strict=True)))

    def after(self, p, q, s, w) -> tuple["_Left", Tensor]:
        """(what is left, the node's weight) after a child drawn from q / s was rejected (csrc/cpu/verify_tree_kernel.h)."""
        ws = w * s
        stage = torch.where(self.taken, ws + self.mass, 1.0)
        omega = torch.where(self.taken, ws * self.omega / stage, ws)
        total = excess(p, q, omega).sum(1)
        z = torch.where(self.taken, stage / (self.mass * s.clamp_min(LEAST)), 1 / s.clamp_min(LEAST)) * total
        some = total > 0
        w = torch.where(w >= 1, w, torch.where(some, z / (z + 1 - w), 0.0))
        return _Left(self.taken | some, omega, total).where(some, self), w


class _Node(NamedTuple):
    """A node of each request: its rows p and q [B, V] (q = 0 where negative), its children, the first of them, and the
    status of its row."""

    p: Tensor
    q: Tensor
    children: Tensor
    first: Tensor
    status: Tensor
    empty: Tensor


class _Walk:
    def __init__(
        self, trees: Trees, p: Target, q: Draft, seeds, anchor, greedy, rule, replacement, bound, factor, rates
    ):
        self.trees, self.p_source, self.q_source = trees, p, q
        self.seeds, self.anchor, self.greedy = seeds, anchor, greedy
        self.rule, self.replacement = rule, replacement
        self.bound, self.factor = torch.tensor([bound, factor], dtype=torch.float32, device="cpu").tolist()
        self.rates, self.draws_q = rates, rule in (RECURSIVE, TRAVERSAL, GREEDY_DRAFT)
        B, n = trees.token.shape
        zeros = torch.zeros(B, dtype=torch.int64, device=trees.token.device)
        self.states = torch.zeros(B, n, dtype=torch.int32, device=zeros.device)  # status bits of each node's row
        self.at, self.token, self.found = zeros, zeros, zeros.bool()  # where walks ended, and what they emit
        self.running = ~trees.rowless
        self.node, self.last = zeros, zeros  # where the walk is, and the child it looked at last
        self.ones = torch.ones(B, dtype=torch.float64, device=zeros.device)
        self.w, self.fresh = self.ones, _Left(zeros.bool(), self.ones, self.ones)
        self.left, self.ended = self.fresh, zeros.bool()
        depth = n + 1  # the waiting nodes above, by depth; the last slot is never read
        self.waiting = torch.zeros(6, B, depth, dtype=torch.float64, device=zeros.device)

    def run(self) -> None:
        n = self.trees.token.shape[1] - 1
        if self.p_source.target.shape[0] == 0:
            return
        if self.rule == _lossy.TYPICAL:
            self.node = _lossy.typical_end(self)
        # A step tests a child or goes to another node: down to each at most once, and up.
        for _ in range(2 * n + 2):
            if self.running.device.type == "cpu" and not bool(self.running.any()):
                break
            node = self.look(self.node)
            self.note(self.running, node.status)
            if self.rule == TARGET_ONLY:
                go, left = self.target_only(node)
            elif self.rule == GREEDY_DRAFT:
                go, left = self.greedy_draft(node)
            elif self.rule == _lossy.THRESHOLD:
                go, left = _lossy.threshold(self, node)
            elif self.rule == _lossy.SYNTHETIC:
                go, left = _lossy.synthetic(self, node)
            elif self.rule == _lossy.TYPICAL:
                go, left = torch.zeros_like(self.node), node.p
            else:
                self.one_child(node)
                continue
            if self.rule != _lossy.SYNTHETIC:
                plain = self.race(node.p)
                match = self.trees.first(node.children & (self.trees.token == plain[:, None]))
                go = torch.where(self.greedy, match, go)
            self.finish(node, self.running & (go == 0), left)
            self.go_down(self.running & (go > 0), go, self.ones)

    def look(self, at: Tensor) -> _Node:
        p, status, empty, _ = self.p_source.rows(self.trees.first_row + at)
        children = self.trees.children(at) & ~empty[:, None]
        status = status | torch.where(self.trees.has_placeholder(at) & ~empty, _rows.PLACEHOLDER, 0)
        first, q = self.trees.first(children), torch.zeros_like(p)
        if self.draws_q:
            flat = (self.trees.start + first - 1).clamp_min(0)
            q, usable = self.q_source.rows(flat, self.trees.token_of(first))
            q = torch.where(q > 0, q, 0.0)
            asks = (first > 0) & (self.drawn(at) > 0 if self.rule == GREEDY_DRAFT else True)
            unusable = asks & ~self.greedy & ~usable
            status = status | torch.where(unusable, _rows.BAD_Q_ROW, 0)
            children = children & ~unusable[:, None]
        return _Node(p, q, children, first, status.to(torch.int32), empty)

    def drawn(self, at: Tensor) -> Tensor:
        """The last child, 0 where it is a placeholder, or might be missing from a tree that is cut."""
        trees = self.trees
        last = ((trees.depth > 0) & (trees.parent == at[:, None])) * trees.id
        last = last.amax(1)
        return torch.where(trees.real[trees.each, last] & ~trees.bad, last, 0)

    def note(self, where: Tensor, status) -> None:
        self.states[self.trees.each, self.node] |= torch.where(where, status, 0).to(torch.int32)

    def coin(self, id: Tensor) -> Tensor:
        return _rows.uniforms(self.seeds, self.anchor, 1, id, 1)[:, 0]

    def race(self, weights: Tensor) -> Tensor:
        position = self.anchor + self.trees.depth[self.trees.each, self.node].clamp_min(0)
        return _rows.race(weights, self.seeds, position, 2, torch.zeros_like(position))

    def pick(self, children, p, coin, enough: float = torch.inf) -> tuple[Tensor, Tensor]:
        """(the first of the children whose running sum of p passes the coin, or which has `enough` of p alone, or 0, the
        distinct children)."""
        distinct = self.trees.distinct(children)
        p = torch.where(distinct, self.trees.at_tokens(p), 0.0)
        return self.trees.first(distinct & ((coin[:, None] < p.cumsum(1)) | (p >= enough))), distinct

    def unless_nothing(self, row, otherwise) -> Tensor:
        return torch.where((row > 0).any(1, keepdim=True), row, otherwise)

    def rest_of_q(self, q, tried) -> tuple[Tensor, Tensor]:
        """(q without the tokens of `tried`, its mass; 1 where none were)."""
        rest = self.trees.without(q, tried)
        return rest, torch.where(tried.any(1), rest.sum(1), 1.0)

    def target_only(self, node: _Node) -> tuple[Tensor, Tensor]:
        child, children = self.pick(node.children, node.p, self.coin(self.node))
        return child, self.unless_nothing(self.trees.without(node.p, children), node.p)

    def greedy_draft(self, node: _Node) -> tuple[Tensor, Tensor]:
        trees = self.trees
        drawn = torch.where(node.children.any(1), self.drawn(self.node), 0)
        fixed = node.children & (trees.id != drawn[:, None])
        q, s = self.rest_of_q(node.q, fixed)
        x = trees.token_of(drawn)
        q_x = q[trees.each, x] / s.clamp_min(LEAST)
        asks = (drawn > 0) & ~self.greedy
        self.note(self.running & asks & ~(q_x > 0), _rows.ZERO_Q)
        asks = asks & (q_x > 0)
        take = asks & _accepts(self.coin(drawn - 1), node.p[trees.each, x], q_x)
        left = self.unless_nothing(excess(node.p, q / s.clamp_min(LEAST)[:, None], self.ones), node.p)
        left = torch.where(asks[:, None], left, node.p)
        share = torch.where(asks[:, None], left / left.sum(1, keepdim=True).clamp_min(LEAST), node.p)
        # Without a drawn child the others decide alone; in a tree that is cut by the coin of target_only.
        coin = torch.where(trees.bad, self.coin(self.node), self.coin(trees.first(fixed) - 1))
        other, fixed = self.pick(fixed, share, coin)
        decides = asks | (drawn == 0)
        child = torch.where(take, drawn, torch.where(decides, other, 0))
        left = self.unless_nothing(trees.without(left, fixed), node.p)
        return child, torch.where(decides[:, None], left, node.p)

    def one_child(self, node: _Node) -> None:
        """`recursive` and `traversal`: the next child is accepted, gone to, or rejected; without one the node decides."""
        trees, walks = self.trees, self.running & ~self.greedy
        plain = self.race(node.p)
        match = torch.where(self.greedy, trees.first(node.children & (trees.token == plain[:, None])), 0)
        later = trees.id > torch.maximum(self.last, self.node)[:, None]
        child = trees.first(node.children & later & ~self.ended[:, None])
        tried = node.children & (trees.id < child[:, None]) & (not self.replacement)
        q, s = self.rest_of_q(node.q, tried)
        x = trees.token_of(child)
        q_x, left = q[trees.each, x] / s.clamp_min(LEAST), self.left.of(node.p, node.q)
        p_x = left[trees.each, x]
        asks = walks & (child > 0)
        zero_q = asks & ~(q_x > 0)
        self.note(zero_q, _rows.ZERO_Q)
        tests = asks & ~zero_q
        if self.rule == RECURSIVE:
            w, take = self.ones, tests & _accepts(self.coin(child - 1), p_x, q_x)
            fails = torch.zeros_like(take)
        else:
            w = torch.where(q_x > 0, self.w * p_x / q_x.clamp_min(LEAST), 0.0).clamp_max(1.0)
            take = tests & (w > 0)
            stands = (self.node == 0) | (self.w >= 1) | (self.coin(self.node - 1) < self.w)
            fails = walks & ~tests & ~stands
        self.finish(node, self.running & (match == 0) & ~tests & ~fails, left)
        self.ended = self.ended | zero_q
        rejects = tests & ~take
        self.last = torch.where(rejects, child, self.last)
        if self.rule == TRAVERSAL:
            self.wait(take, child)
            node, s = self.go_up(s, fails)
            rejects = rejects | fails
        left, weight = self.left.after(node.p, node.q, s, self.w)
        self.left, self.w = left.where(rejects, self.left), torch.where(rejects, weight, self.w)
        down = take | (self.running & (match > 0))
        self.go_down(down, torch.where(self.greedy, match, child), w)

    def wait(self, where, child) -> None:
        state = (self.node, child, self.w, *self.left)
        slot = torch.where(where, self.trees.depth[self.trees.each, self.node].clamp_min(0), self.waiting.shape[2] - 1)
        self.waiting[:, self.trees.each, slot] = torch.stack([t.double() for t in state])

    def go_up(self, s, where) -> tuple[_Node, Tensor]:
        """Back to the waiting parents: everyone's node then, and what is left of q's mass for the child that failed."""
        depth = (self.trees.depth[self.trees.each, self.node] - 1).clamp_min(0)
        above, last, w, taken, omega, mass = self.waiting[:, self.trees.each, depth]
        self.node = torch.where(where, above.long(), self.node)
        self.last, self.w = torch.where(where, last.long(), self.last), torch.where(where, w, self.w)
        self.left = _Left(taken > 0, omega, mass).where(where, self.left)
        self.ended = self.ended & ~where
        parent = self.look(self.node)
        tried = parent.children & (self.trees.id < self.last[:, None]) & (not self.replacement)
        rest = self.rest_of_q(parent.q, tried)[1]
        return parent, torch.where(where, rest, s)

    def go_down(self, where, child, w) -> None:
        self.node, self.last = torch.where(where, child, self.node), torch.where(where, child, self.last)
        self.w, self.left = torch.where(where, w, self.w), self.fresh.where(where, self.left)
        self.ended = self.ended & ~where

    def finish(self, node: _Node, where, left) -> None:
        """Walks that end at their node emit a token of what is left there; greedy ones the argmax."""
        weights = torch.where(self.greedy[:, None], node.p, left)
        token = self.race(weights)
        drawn = self.p_source.sampled_status(self.trees.first_row + self.node)
        self.note(where, drawn)
        found = (weights.gather(1, token[:, None])[:, 0] > 0) & ~node.empty & ((drawn & _rows.EMPTY_ROW) == 0)
        self.at, self.token = torch.where(where, self.node, self.at), torch.where(where, token, self.token)
        self.found = torch.where(where, found, self.found)
        self.running = self.running & ~where


def _accepts(coin, p_x, q_x):
    return (p_x > 0) & ((p_x >= q_x) | (coin * q_x < p_x))


def verify_tree(
    target, target_is_probs, draft_tokens, parents, cu_num_draft, temperature, top_p, top_k, min_p, seed, slots, position,
    draft, draft_is_probs, draft_rows, draft_cutoff, draft_row_max, draft_log_mass,
    draft_temperature, draft_top_p, draft_top_k, draft_min_p, draft_slots,
    target_to_draft, rule, replacement, bound, factor, rates, filter_order,
    tokens, num_accepted, path, num_emitted, status, logprobs, cutoff, row_max, log_mass,
) -> None:  # fmt: skip
    B, K = path.shape
    (R, V), device = target.shape, target.device
    params = _rows.gather_params(temperature, top_p, top_k, min_p, slots, None)
    q_params = None
    if draft_temperature is not None:
        q_params = _rows.gather_params(draft_temperature, draft_top_p, draft_top_k, draft_min_p, draft_slots, None)
    trees = Trees(draft_tokens, parents, cu_num_draft.long(), R, V, K)
    p = Target(target, target_is_probs, params, filter_order)
    saved = None if draft_cutoff is None else (draft_cutoff, draft_row_max, draft_log_mass)
    q = Draft(draft, draft_is_probs, draft_rows, saved, q_params, target_to_draft, filter_order, V)
    none = torch.zeros(B, dtype=torch.int64, device=device)
    greedy = none.bool() if target_is_probs else params.greedy
    anchor = none if position is None else position
    seeds = gather_seed(seed, slots, None)
    walk = _Walk(trees, p, q, seeds, anchor, greedy, rule, replacement, bound, factor, rates)
    walk.run()

    accepted = trees.depth[trees.each, walk.at].clamp_min(0)
    nodes, k = trees.path(walk.at, K), torch.arange(K + 1, device=device)
    on_path, last = k <= accepted[:, None], k == accepted[:, None]
    drafted = trees.token.gather(1, torch.nn.functional.pad(nodes[:, 1:], (0, 1)))
    emitted = torch.where(last, (walk.token * walk.found)[:, None], drafted)
    known = on_path & ~trees.rowless[:, None] & (~last | walk.found[:, None])
    tokens.copy_(torch.where(on_path, emitted * ~trees.rowless[:, None], -1))
    path.copy_(torch.where(on_path[:, 1:], nodes[:, 1:], -1))
    num_accepted.copy_(accepted)
    num_emitted.copy_(accepted + 1)
    seen = torch.where(trees.bad, _rows.BAD_OFFSETS, 0).to(torch.int32)
    for i in range(K + 1):
        seen = seen | torch.where(on_path[:, i] & ~trees.rowless, walk.states[trees.each, nodes[:, i]], 0)
    status.copy_(seen)
    if logprobs is None and cutoff is None:
        return
    for i in range(K + 1):
        if R == 0:
            row, fields = torch.zeros(B, V, dtype=torch.float64, device=device), (none,) * 3
        else:
            row, _, _, fields = p.rows(trees.first_row + nodes[:, i])
        if logprobs is not None:
            log_p = row.gather(1, emitted[:, i].clamp(0, V - 1)[:, None])[:, 0].log()
            logprobs[:, i] = torch.where(on_path[:, i], torch.where(known[:, i], log_p, -torch.inf), 0.0).float()
        if cutoff is not None:
            lost = (torch.inf, -torch.inf, -torch.inf)
            for into, field, nothing in zip((cutoff, row_max, log_mass), fields, lost, strict=True):
                field = torch.where(trees.rowless, nothing, field.double())
                into[:, i] = torch.where(on_path[:, i], field, 0.0).float()


_backends.register_eager("verify_tree", verify_tree)
