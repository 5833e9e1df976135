"""`build_tree` in Triton: one launch, a program per request."""

import triton
import triton.language as tl

from ._launch import OPTIONS, WARPS, power_of_2
from ._numerics import INF

ROW = tl.constexpr(32)
CHUNK = tl.constexpr(1024)  # elements of a mask written at once


@triton.jit
def _scores(step, up, n):
    """Cumulative log q from the root, one level after another: after k rounds those of depth k have theirs, deeper ones -inf.
    n rounds are enough: whatever lies deeper than n has n better ones above it."""
    above = tl.maximum(up - 1, 0)
    score = tl.where(up == 0, step, -INF)
    level = tl.zeros([], tl.int32) + 1
    moving = tl.zeros([], tl.int32) + 1
    while (moving > 0) & (level < n):
        next_score = tl.where(up == 0, step, tl.gather(score, above, 0) + step)
        moving = tl.max((next_score != score).to(tl.int32), 0)
        score = next_score
        level += 1
    return score


@triton.jit
def _kept(score, candidate, n, BLOCK: tl.constexpr):
    """(the best n of the scores that are there, equal ones in their order; how many that is). Scores are not above 0, so their
    bits without the sign order them, and the place those that are equal. The n-th key is found from its highest bit down, by
    counting."""
    there = score > -INF
    count = tl.minimum(tl.sum(there.to(tl.int32), 0), n)
    key = (score.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.int64) * BLOCK + candidate
    last = tl.zeros([], tl.int64)
    bit = (tl.zeros([], tl.int64) + BLOCK) << 30
    while bit > 0:
        smaller = tl.sum((key < last + bit).to(tl.int32), 0)
        last += tl.where(smaller < count, bit, 0)
        bit = bit >> 1
    return there & (key <= last), count


@triton.jit
def _numbered(kept, BLOCK: tl.constexpr):
    """How many of `kept` there are up to each, itself included. In rows and then over them: a scan of a whole block at once
    takes more registers than there are."""
    rows = tl.reshape(kept.to(tl.int32), [BLOCK // ROW, ROW])
    total = tl.sum(rows, 1)
    before = tl.cumsum(total, 0) - total
    return tl.reshape(tl.cumsum(rows, 1) + before[:, None], [BLOCK])


@triton.jit(do_not_specialize=["C", "n"])
def build_tree_kernel(
    log_probs, tokens, parents, C, n, node_tokens, node_parents, depth, index, mask, packed_mask,
    BLOCK: tl.constexpr, NODES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Program b builds the tree of request b: BLOCK holds its C candidates, NODES its n + 1 nodes, WORDS a row of its mask."""
    b = tl.program_id(0).to(tl.int64)
    log_probs, tokens, parents = log_probs + b * C, tokens + b * C, parents + b * C
    # Entry 0 of what is stored per node is the root's, which has none.
    node_tokens, node_parents, index = node_tokens + b * n - 1, node_parents + b * n - 1, index + b * n - 1
    side, width = n + 1, (n + 32) // 32
    depth, mask, packed_mask = depth + b * side, mask + b * side * side, packed_mask + b * side * width

    candidate = tl.arange(0, BLOCK)
    inside = candidate < C
    up = tl.load(parents + candidate, mask=inside, other=-1)
    token = tl.load(tokens + candidate, mask=inside, other=-1)
    log_prob = tl.load(log_probs + candidate, mask=inside, other=-INF)
    sound = (up >= 0) & (up <= candidate) & (token >= 0) & (token <= 0x7FFFFFFF) & (log_prob == log_prob)
    step = tl.where(sound, tl.where(log_prob < 0.0, log_prob, 0.0), -INF)
    up = tl.where(sound, up, 0).to(tl.int32)
    kept, count = _kept(_scores(step, up, n), candidate, n, BLOCK)

    number = _numbered(kept, BLOCK)
    parent = tl.where(up == 0, 0, tl.gather(number, tl.maximum(up - 1, 0), 0))
    tl.store(node_tokens + number, tl.load(tokens + candidate, mask=kept, other=0).to(tl.int32), mask=kept)
    tl.store(node_parents + number, parent, mask=kept)
    tl.store(index + number, candidate, mask=kept)
    node = tl.arange(0, NODES)
    absent = (node > count) & (node <= n)
    none = tl.full([NODES], -1, tl.int32)
    tl.store(node_tokens + node, none, mask=absent)
    tl.store(node_parents + node, none, mask=absent)
    tl.store(index + node, none, mask=absent)
    tl.debug_barrier()  # other warps read the parents

    # Every node goes up to the root at once and notes whom it passes, itself first. A parent of -1 ends the way.
    word = tl.arange(0, WORDS)[None, :]
    words = tl.zeros([NODES, WORDS], tl.int32)
    steps = tl.zeros([NODES], tl.int32) - 1
    at = tl.where(node <= n, node, -1)
    while tl.max(at, 0) >= 0:
        passed = at[:, None]
        words = words | tl.where((passed >= 0) & ((passed >> 5) == word), (words * 0 + 1) << (passed & 31), 0)
        steps += (at >= 0).to(tl.int32)
        at = tl.load(node_parents + at, mask=at > 0, other=-1)
    tl.store(depth + node, tl.where(node > count, -1, steps), mask=node <= n)
    tl.store(packed_mask + node[:, None] * width + word, words, mask=(node[:, None] <= n) & (word < width))
    tl.debug_barrier()  # other warps read the words

    for chunk in range(0, tl.cdiv(side * side, CHUNK)):
        cell = chunk * CHUNK + tl.arange(0, CHUNK)
        real = cell < side * side
        column = cell % side
        bits = tl.load(packed_mask + (cell // side) * width + (column >> 5), mask=real, other=0)
        tl.store(mask + cell, ((bits >> (column & 31)) & 1) != 0, mask=real)


def build_tree(log_probs, tokens, parents, node_tokens, node_parents, depth, index, mask, packed_mask) -> None:
    (B, C), n = log_probs.shape, node_tokens.shape[1]
    nodes = power_of_2(n + 1)
    # Sixteen candidates a thread do not fit its registers.
    wide = {"num_warps": 2 * WARPS} if C > 8 * 32 * WARPS else {}
    build_tree_kernel[(B,)](
        log_probs, tokens, parents, C, n, node_tokens, node_parents, depth, index, mask, packed_mask,
        BLOCK=max(power_of_2(C), ROW.value), NODES=nodes, WORDS=max(nodes // 32, 1), **OPTIONS | wide,
    )  # fmt: skip
