"""`build_tree`: parity, its definition by brute force, and that what it builds is verified exactly."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch._dynamo.testing

import python_ref
import specdec_kernels as sk
from tests.cases import assert_same_bits, generator
from tests.conftest import poison
from tests.enumeration import TOLERANCE, completed, text_law, total_variation
from tests.tree_worlds import TreeWorld, choose_top, tree_step

KINDS = ("plain", "tied", "close", "hostile", "deep", "sparse")


def candidates(kind: str, B: int, C: int, seed: int = 0, dtype=torch.int64):
    """(log_probs, tokens, parents) of trees drawn at random: "deep" ones are longer than any that is kept, of "sparse" ones
    little is there."""
    g = generator("build_tree", kind, B, C, seed)
    rand = lambda: torch.rand(B, C, generator=g)  # noqa: E731
    log_probs = -3 * rand()
    tokens = torch.randint(50_000, (B, C), generator=g)
    before = torch.arange(C)
    parents = (rand() ** 2 * (before + 1)).long()
    if kind == "tied":  # saturated, and multiples of 1/2
        log_probs = -(rand() * 2).round() / 2
    elif kind == "deep":
        log_probs = log_probs / 100
        parents = torch.where(rand() < 0.95, before, parents)
    elif kind == "close":  # nearly all on the root, the later half better by one last bit
        log_probs = torch.where(before < C // 2, -1 - 2**-23, -1.0).expand(B, C).clone()
        parents = torch.where(rand() < 0.95, 0, parents)
    elif kind == "sparse":
        parents[rand() < 0.7] = -1
    elif kind == "hostile":
        parents = torch.where(rand() < 0.1, torch.randint(-3, 2 * C + 3, (B, C), generator=g), parents)
        tokens = torch.where(rand() < 0.1, torch.randint(-3, 2, (B, C), generator=g), tokens)
        for value in (torch.nan, torch.inf, -torch.inf, 0.5, -0.0, 1e-40, -1e-40, -3e38):
            log_probs[rand() < 0.06] = value
        if dtype == torch.int64:
            tokens[rand() < 0.05] = 2**32 + 7
            parents[rand() < 0.05] = 2**32
    return log_probs, tokens.to(dtype), parents.to(dtype)


def eagle_candidates(B: int, k: int, layers: int, seed: int = 0):
    """What an EAGLE-2 drafter makes: the k likeliest tokens of the root, then k of each of the k best of the last layer."""
    g = generator("eagle", B, k, layers, seed)
    requests = []
    for _ in range(B):
        log_probs, parents, score, frontier = [], [], [], [(0, 0.0)]
        for _ in range(layers):
            first = len(score)
            for above, reached in frontier:
                step = torch.randn(50, generator=g).mul(4).log_softmax(0).topk(k).values.tolist()
                log_probs += step
                parents += [above] * k
                score += [reached + x for x in step]
            frontier = sorted(((c + 1, score[c]) for c in range(first, len(score))), key=lambda it: -it[1])[:k]
        requests.append((log_probs, parents))
    log_probs, parents = (torch.tensor(t) for t in zip(*requests, strict=True))
    return log_probs, torch.randint(50_000, parents.shape, generator=g), parents


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("C", "n"), [(1, 1), (1, 5), (9, 4), (40, 30), (40, 31), (40, 32), (64, 100), (300, 128)], ids=str
)
def test_parity(C, n, kind, backend):
    for seed in range(4):
        given = candidates(kind, 1 + seed, C, seed, (torch.int64, torch.int32)[seed % 2])
        before = [t.clone() for t in given]
        want = python_ref.build_tree(*given, n)
        assert_same_bits(sk.build_tree(*given, n, backend=backend), want, f"{kind} {seed}")
        assert_same_bits(given, before)


@pytest.mark.parametrize("n", [10, 60, 128])
def test_parity_on_eagle_trees(n, backend):
    given = eagle_candidates(2, 10, 9)
    assert given[0].shape == (2, 810)
    got = sk.build_tree(*given, n, backend=backend)
    assert_same_bits(got, python_ref.build_tree(*given, n))
    assert (got.index >= 0).all() and got.depth.max() > 2


@pytest.mark.parametrize("C", [2049, 4096])
def test_parity_of_many_candidates(C, backend):
    for kind in ("deep", "close", "hostile"):
        given = candidates(kind, 1, C)
        assert_same_bits(sk.build_tree(*given, 128, backend=backend), python_ref.build_tree(*given, 128), kind)


# --- by definition ------------------------------------------------------------------------------------------------------


def path_of(c, log_probs, tokens, parents):
    """The candidates from the root to c, or None if one of them is not there."""
    path = [c]
    while True:
        c = path[0]
        parent = parents[c]
        if not 0 <= parent <= c or not 0 <= tokens[c] < 2**31 or np.isnan(log_probs[c]):
            return None
        if parent == 0:
            return path
        path.insert(0, parent - 1)


def score_of(path, log_probs):
    score = np.float32(0)
    for c in path:
        score = np.float32(score + min(log_probs[c], np.float32(0)))
    return score


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("C", "n"), [(12, 5), (60, 31), (60, 40)])
def test_the_best_of_all_are_kept_as_a_tree(C, n, kind, backend):
    given = candidates(kind, 5, C, 7)
    tree = sk.build_tree(*given, n, backend=backend)
    for b in range(5):
        log_probs, tokens, parents = (t[b].numpy() for t in given)
        paths = [path_of(c, log_probs, tokens, parents) for c in range(C)]
        scores = {c: score_of(path, log_probs) for c, path in enumerate(paths) if path is not None}
        there = [c for c in scores if scores[c] > -np.inf]
        kept = sorted(sorted(there, key=lambda c: (-scores[c], c))[:n])
        padding = [-1] * (n - len(kept))
        assert tree.index[b].tolist() == kept + padding
        assert tree.tokens[b].tolist() == [int(tokens[c]) for c in kept] + padding
        assert all(set(paths[c]) <= set(kept) for c in kept), "closed under parents"
        node = {c: i for i, c in enumerate(kept, 1)}
        assert tree.parents[b].tolist() == [node[parents[c] - 1] if parents[c] else 0 for c in kept] + padding
        assert tree.depth[b].tolist() == [0, *(len(paths[c]) for c in kept), *padding]


@pytest.mark.parametrize("n", [1, 30, 31, 32, 63, 64, 128])
def test_masks(n, backend):
    """A node attends itself and its ancestors: the closure of the parents, by repeated matrix products."""
    tree = sk.build_tree(*candidates("deep" if n == 64 else "plain", 3, 120, n), n, backend=backend)
    for parents, mask, words in zip(tree.parents.tolist(), tree.mask.numpy(), tree.packed_mask.numpy(), strict=True):
        above = np.eye(n + 1, dtype=np.int64)
        for node, parent in enumerate(parents, 1):
            if parent >= 0:
                above[node, parent] = 1
        for _ in range(8):
            above = np.minimum(above @ above, 1)
        assert (mask == (above > 0)).all()
        bits = np.packbits(mask, axis=1, bitorder="little")
        whole = np.zeros((n + 1, 4 * words.shape[1]), dtype=np.uint8)
        whole[:, : bits.shape[1]] = bits
        assert words.shape[1] == -(-(n + 1) // 32) and (words.view(np.uint8) == whole).all()
    # Who is not there attends itself, so that no row is empty.
    assert (tree.mask.sum(2) == tree.depth.clamp_min(0) + 1).all()


def test_sums_keep_their_order(backend):
    """-1, then twice a half of its last bit: in float32, one after another, that stays -1 and beats the candidate that was
    drafted first. Summed from the other end, or in float64, the two would be equal."""
    log_probs = torch.tensor([[-1 - 2**-23, -1.0, -(2**-24), -(2**-24)]])
    tree = sk.build_tree(log_probs, torch.arange(4)[None], torch.tensor([[0, 0, 2, 3]]), 3, backend=backend)
    assert tree.index.tolist() == [[1, 2, 3]]


def test_equal_scores_come_in_the_order_of_drafting(backend):
    parents = torch.tensor([[0, 0, 1, 1, 3]])
    for n in range(1, 6):
        tree = sk.build_tree(torch.zeros(1, 5), torch.arange(5)[None], parents, n, backend=backend)
        assert tree.index.tolist() == [list(range(n))]


def test_what_is_not_there(backend):
    """Each bad value takes its candidate away and what hangs from it, and nothing else."""
    good = -torch.ones(5), torch.arange(5), torch.tensor([0, 1, 2, 0, 4])
    cases = [(0, x) for x in (torch.nan, -torch.inf)] + [(1, -1), (1, 2**31), (2, -1), (2, -7), (2, 2), (2, 2**33)]
    for column, value in cases:
        given = [t.clone() for t in good]
        given[column][1] = value
        tree = sk.build_tree(*(t[None] for t in given), 6, backend=backend)
        assert tree.index.tolist() == [[0, 3, 4, -1, -1, -1]], (column, value)
        assert tree.parents.tolist() == [[0, 0, 2, -1, -1, -1]]
        assert tree.depth.tolist() == [[0, 1, 1, 2, -1, -1, -1]]
    given = [t.clone() for t in good]
    given[0][:3] = torch.tensor([torch.inf, -3e38, -3e38])  # counts as 0; a sum that leaves the floats is not there
    assert sk.build_tree(*(t[None] for t in given), 6, backend=backend).index.tolist() == [[0, 1, 3, 4, -1, -1]]
    nothing = sk.build_tree(torch.zeros(1, 2), torch.zeros(1, 2).long(), torch.full((1, 2), -1), 3, backend=backend)
    assert nothing.tokens.tolist() == nothing.parents.tolist() == nothing.index.tolist() == [[-1] * 3]
    assert nothing.depth.tolist() == [[0, -1, -1, -1]] and torch.equal(nothing.mask[0], torch.eye(4).bool())


# --- contract -----------------------------------------------------------------------------------------------------------


def test_slot_dependent(backend):
    """A request's tree does not depend on its slot, its neighbours or the batch size."""
    given = candidates("hostile", 6, 70, 2)
    want = sk.build_tree(*given, 20, backend=backend)
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    assert_same_bits(sk.build_tree(*(t[order] for t in given), 20, backend=backend), [t[order] for t in want])
    for b in range(6):
        alone = sk.build_tree(*(t[b : b + 1] for t in given), 20, backend=backend)
        assert_same_bits(alone, [t[b : b + 1] for t in want])


def test_strided_candidates(backend):
    """Columns of a wider buffer, transposed ones: taken as they are."""
    given = candidates("plain", 3, 30, 4)
    want = sk.build_tree(*given, 9, backend=backend)
    wider = [torch.nn.functional.pad(t, (2, 5))[:, 2:-5] for t in given]
    assert_same_bits(sk.build_tree(*wider, 9, backend=backend), want)
    assert_same_bits(sk.build_tree(*(t.t().contiguous().t() for t in given), 9, backend=backend), want)


@pytest.mark.parametrize("kind", ["sparse", "plain"])
def test_out_is_used_and_written_whole(kind, backend, poisoned_memory):
    given = candidates(kind, 4, 20, 5)
    want = python_ref.build_tree(*given, 12)
    out = sk.build_tree(*given, 12, backend=backend)
    assert_same_bits(out, want)
    for t in out:
        poison(t)
    assert sk.build_tree(*given, 12, out=out, backend=backend) is out
    assert_same_bits(out, want)
    smaller = sk.build_tree(*candidates("sparse", 4, 20, 6), 12, out=out, backend=backend)
    assert_same_bits(smaller, python_ref.build_tree(*candidates("sparse", 4, 20, 6), 12))


def test_empty_batch(backend):
    none = torch.zeros(0, 7, dtype=torch.int32)
    tree = sk.build_tree(torch.zeros(0, 7), none, none, 32, backend=backend)
    assert [tuple(t.shape) for t in tree] == [(0, 32), (0, 32), (0, 33), (0, 32), (0, 33, 33), (0, 33, 2)]


def test_compiles_whole_with_dynamic_shapes(backend):
    def step(log_probs, tokens, parents, backend):
        tree = sk.build_tree(log_probs, tokens, parents, 9, backend=backend)
        return tree, sk.retrieve_from_parents(tree.parents), tree.depth + 1

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fn = torch.compile(step, fullgraph=True, backend=counter)
    for B, C in ((4, 12), (7, 30), (5, 21)):
        given = candidates("plain", B, C)
        assert_same_bits(fn(*given, backend), step(*given, backend))
    assert counter.frame_count <= 2


def test_feeds_the_retrieve_triple(backend):
    tree = sk.build_tree(*candidates("sparse", 6, 40, 3), 25, backend=backend)
    triple = sk.retrieve_from_parents(tree.parents)
    assert torch.equal(sk.parents_from_retrieve(triple.next_token, triple.next_sibling), tree.parents.long())


GOOD = dict(zip(("log_probs", "tokens", "parents"), candidates("plain", 2, 5), strict=True), num_nodes=3)
OUT = sk.build_tree(**GOOD, backend="eager")
WRONG = {
    "log_probs_rank": ({"log_probs": torch.zeros(5)}, r"log_probs must be float32 \[B, C\], got float32 \[5\]"),
    "log_probs_dtype": ({"log_probs": torch.zeros(2, 5).half()}, r"log_probs must be float32 .*got float16 \[2, 5\]"),
    "log_probs_type": ({"log_probs": [[0.0]]}, "log_probs must be .*got list"),
    "no_candidates": ({"log_probs": torch.zeros(2, 0)}, r"log_probs must be of 1 to 4096 candidates, got .*\[2, 0\]"),
    "many_candidates": ({"log_probs": torch.zeros(2, 4097)}, r"log_probs must be of 1 to 4096 .*got .*\[2, 4097\]"),
    "tokens_dtype": ({"tokens": torch.zeros(2, 5)}, r"tokens must be int32 or int64 \[B=2, C=5\] on cpu, got float32"),
    "tokens_shape": ({"tokens": torch.zeros(2, 4).int()}, r"tokens must be .*\[B=2, C=5\].*got int32 \[2, 4\]"),
    "parents_shape": ({"parents": torch.zeros(10).int()}, r"parents must be .*\[B=2, C=5\].*got int32 \[10\]"),
    "parents_device": ({"parents": torch.zeros(2, 5, device="meta").int()}, "parents must be .*on cpu, got .*on meta"),
    "no_nodes": ({"num_nodes": 0}, r"num_nodes must be an int in 1..128, got int 0"),
    "many_nodes": ({"num_nodes": 129}, r"num_nodes must be an int in 1..128, got int 129"),
    "nodes_bool": ({"num_nodes": True}, "num_nodes must be an int in 1..128, got bool True"),
    "nodes_float": ({"num_nodes": 3.0}, "num_nodes must be an int .*got float 3.0"),
    "out_type": ({"out": tuple(OUT)}, "out must be a DraftTree, got tuple"),
    "out_shape": ({"num_nodes": 4}, r"out.tokens must be int32 \[2, 4\] on cpu, got int32 \[2, 3\]"),
    "out_dtype": ({"out": OUT._replace(mask=OUT.mask.int())}, r"out.mask must be bool \[2, 4, 4\].*got int32"),
    "out_words": ({"out": OUT._replace(packed_mask=OUT.depth)}, r"out.packed_mask must be int32 \[2, 4, 1\]"),
    "out_strided": ({"out": OUT._replace(mask=OUT.mask.mT)}, "out.mask must be contiguous"),
    "backend": ({"backend": "tpu"}, "backend must be one of .*got 'tpu'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name, backend):
    changes, message = WRONG[name]
    sk.build_tree(**GOOD, backend=backend)
    call = {**GOOD, "out": OUT, "backend": backend, **changes}
    for t in OUT:
        poison(t)
    before = [t.clone() for t in OUT]
    with pytest.raises(ValueError, match="^build_tree: " + message):
        sk.build_tree(**call)
    assert_same_bits(OUT, before)


# --- exactness ----------------------------------------------------------------------------------------------------------


def expand(q, prefix, k, layers):
    """EAGLE-2's candidates by a fixed q: (log q, token, parent) of each and the context behind it."""
    rows, contexts, scores, frontier = [], [], [], [(0, 0.0, prefix)]
    for _ in range(layers):
        first = len(rows)
        for above, score, context in frontier:
            weights = q(context)
            for token in choose_top(weights, k, None):
                step = float(np.log(weights[token]))
                rows.append((step, token, above))
                scores.append(score + step)
                contexts.append((*context, token))
        best = sorted(range(first, len(rows)), key=lambda c: -scores[c])[:k]
        frontier = [(c + 1, scores[c], contexts[c]) for c in best]
    return rows, contexts


@dataclass
class DynamicTreeWorld(TreeWorld):
    """A tree whose shape `build_tree` decides, in each context anew."""

    nodes: int = 3

    def drafts(self, prefix, choose):
        rows, contexts = expand(self.q, prefix, 2, 2)
        given = (torch.tensor([column]) for column in zip(*rows, strict=True))
        tree = sk.build_tree(*given, self.nodes, backend="eager")
        self.parents = tree.parents[0].tolist()
        context_of = [prefix, *(contexts[c] if c >= 0 else prefix for c in tree.index[0].tolist())]
        return tree.tokens[0].tolist(), context_of, [context_of[max(parent, 0)] for parent in self.parents]


def bias(w, prefix=()):
    law = tree_step(w, prefix)
    assert sum(law.values()) == pytest.approx(1, abs=TOLERANCE)
    return total_variation(completed(law, w.p, 3, prefix), text_law(w.p, 3, prefix))


def test_trees_are_verified_exactly():
    """Emitted texts have the target's law, whatever shape the tree takes, padded ones (8 nodes of 6 candidates) included."""
    shapes = set()
    for seed in range(4):
        for nodes in (2, 3, 4, 8):
            for prefix in ((), (2,), (0, 1)):
                w = DynamicTreeWorld([], seed=seed, nodes=nodes)
                assert bias(w, prefix) < TOLERANCE
                shapes.add(tuple(w.parents))
    assert len(shapes) >= 6


def test_top_k_trees_are_no_draws_from_q():
    """Control: verified by a rule that divides by q, the same trees are biased, and the enumeration sees it."""
    worlds = (
        DynamicTreeWorld([], seed=seed, nodes=4, rule="recursive", replacement=replacement)
        for seed in range(3)
        for replacement in (True, False)
    )
    assert min(map(bias, worlds)) > 1e-2
