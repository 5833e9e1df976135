"""Device functions: one request's tree of drafts, held as vectors over its NODES possible drafts (node - 1), and what rejected
and earlier children leave of p and q."""

import triton
import triton.language as tl

from ._verify import draft_prob_or_one_hot, excess_mass, mass_without

NODES = tl.constexpr(128)
LOG2_NODES = tl.constexpr(7)


@triton.jit
def span_of(cu, b, D, R):
    """(first draft, number of drafts or -1 if there is not even one row, whether that is not what was asked for)."""
    asked = tl.load(cu + b).to(tl.int64)
    past = tl.load(cu + b + 1).to(tl.int64)
    start = tl.minimum(tl.maximum(asked, 0), D)
    end = tl.minimum(tl.maximum(past, start), D)
    count = tl.minimum(tl.minimum(end - start, NODES), R - 1 - start - b)
    count = tl.maximum(count, -1)
    return start, count, (count < 0) | (start != asked) | (start + count != past)


@triton.jit
def tree_of(parents, draft_tokens, start, count, V, K):
    """(parent of each node or -1, its depth or -1, its token or -1, whether some parent makes no sense or a node is deeper than
    K). Depths are found by doubling: seven steps lead from any node to the root."""
    node = tl.arange(0, NODES) + 1
    inside = node <= count
    up = tl.load(parents + start + node - 1, mask=inside, other=-1).to(tl.int64)
    wrong = inside & ((up >= node) | (up < -1))
    up = tl.where(inside & (up >= 0) & (up < node), up, -1).to(tl.int32)
    above = tl.where(up >= 0, up - 1, -2)  # -1 at the root, -2 where nothing leads on
    depth = tl.full([NODES], 1, tl.int32)
    for _ in tl.static_range(LOG2_NODES):
        at = tl.maximum(above, 0)
        next_above, further = tl.gather(above, at, 0), tl.gather(depth, at, 0)
        depth = tl.where(above >= 0, depth + further, depth)
        above = tl.where(above >= 0, next_above, above)
    hangs = above == -1
    here = hangs & (depth <= K)
    bad = tl.max((wrong | (hangs & (depth == K + 1))).to(tl.int32), 0) > 0
    x = tl.load(draft_tokens + start + node - 1, mask=here, other=-1).to(tl.int64)
    token = tl.where((x >= 0) & (x < V), x, -1).to(tl.int32)
    return tl.where(here, up, -1), tl.where(here, depth, -1), token, bad


@triton.jit
def repeated(parent, token, parents, draft_tokens, start, count):
    """Which nodes have an elder sibling with the same token. The elders are loaded again, eight at a time: all pairs at once
    would not fit the registers."""
    node = tl.arange(0, NODES) + 1
    again = tl.zeros([NODES], tl.int32)
    for i in range(0, tl.cdiv(count, 8)):
        elder = i * 8 + tl.arange(0, 8) + 1
        up = tl.load(parents + start + elder - 1, mask=elder <= count, other=-1).to(tl.int64)
        x = tl.load(draft_tokens + start + elder - 1, mask=elder <= count, other=-1).to(tl.int64)
        there = (up >= 0) & (up < elder) & (x >= 0)
        same = (parent[:, None] == up[None, :]) & (token[:, None] == x[None, :]) & (elder[None, :] < node[:, None])
        again = tl.maximum(again, tl.max((same & there[None, :]).to(tl.int32), 1))
    return again > 0


@triton.jit
def first_of(nodes):
    """The lowest node of a set, 0 if it is empty."""
    node = tl.arange(0, NODES) + 1
    least = tl.min(tl.where(nodes, node, NODES + 1), 0)
    return tl.where(least <= NODES, least, 0)


@triton.jit
def entry(vector, n):
    """Entry of node n; 0 for the root."""
    return tl.sum(tl.where(tl.arange(0, NODES) + 1 == n, vector, 0), 0)


@triton.jit
def holds(nodes, token, x):
    """Whether one of a set of nodes has token x."""
    return tl.max((nodes & (token == x)).to(tl.int32), 0) > 0


@triton.jit
def store_tokens(nodes, token, into):
    """The tokens of a set of nodes, packed, to `into`; returns how many."""
    place = tl.cumsum(nodes.to(tl.int32), 0)
    tl.debug_barrier()  # a list that was there before has been read
    tl.store(into + (place - 1), token, mask=nodes)
    tl.debug_barrier()  # other warps read it
    return tl.max(place, 0)


@triton.jit
def left_of_draft(
    before, child, token, V, q_row, q_map, Vd, q_c, q_m, q_mass, q_scale, q_greedy, x, on_ids, list_of_tokens,
    Q_KIND: tl.constexpr,
):  # fmt: skip
    """(what the children `before` leave of q's mass, q of `child`, of each of `before`). By difference the mass is precise
    enough down to 1/16, if all of it is `on_ids` of the target."""
    q_before = draft_prob_or_one_hot(token, before, q_row, q_map, Vd, q_c, q_m, q_mass, q_scale, q_greedy, x, Q_KIND)
    s = 1.0 - tl.sum(q_before, 0)
    if (tl.max(before.to(tl.int32), 0) > 0) & ((s < 0.0625) | (not on_ids)):
        number = store_tokens(before, token, list_of_tokens)
        s = mass_without(
            V, q_row, q_map, Vd, q_c, q_m, q_mass, q_scale, q_greedy, x, list_of_tokens, number, Q_KIND
        )  # fmt: skip
    x_child = entry(token, child)
    there = not holds(before, token, x_child)
    q_x = draft_prob_or_one_hot(x_child, there, q_row, q_map, Vd, q_c, q_m, q_mass, q_scale, q_greedy, x, Q_KIND)
    return s, q_x, q_before


@triton.jit
def reject(
    left_mass, omega, w, s, p_row, V, c, m, mass, scale, q_row, q_map, Vd, q_c, q_m, q_mass, q_scale, q_greedy, x,
    space, active, P_KIND: tl.constexpr, Q_KIND: tl.constexpr, SUB: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """(mass, omega, weight) of a node after a child drawn from q / s was rejected; mass 0: nothing has been taken from p."""
    # s, omega and mass may all be tiny, so that the product of two of them would be 0: quotients first.
    untouched = left_mass == 0.0
    ws = w * s
    stage = tl.where(untouched, 1.0, ws + left_mass)
    new_omega = tl.where(untouched, ws, tl.div_rn(ws, stage) * omega)
    excess = excess_mass(
        p_row, V, c, m, mass, scale, new_omega, q_row, q_map, Vd, q_c, q_m, q_mass, q_scale, q_greedy, x, space, active,
        P_KIND, Q_KIND, SUB, MAXIMA,
    )  # fmt: skip
    some = excess > 0.0
    z = tl.where(untouched, 1.0, tl.div_rn(stage, tl.where(untouched, 1.0, left_mass))) * tl.div_rn(excess, s)
    new_w = tl.where(some, tl.div_rn(z, tl.where(some, z + (1.0 - w), 1.0)), 0.0)
    new_w = tl.where(w < 1.0, new_w, w)
    return tl.where(some, excess, left_mass), tl.where(some, new_omega, omega), new_w
