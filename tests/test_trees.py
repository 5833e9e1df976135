"""Topologies of draft trees: converted both ways, and fixed ones."""

import pytest
import torch

import specdec_kernels as sk


def random_tree(n, seed, absent=0.0):
    g = torch.Generator().manual_seed(seed)
    parents = [int(torch.randint(k, (1,), generator=g)) for k in range(1, n + 1)]
    return [-1 if float(torch.rand(1, generator=g)) < absent else p for p in parents]


def links(parents):
    """First children and next siblings by definition."""
    N = len(parents) + 1
    children = {n: [c for c, p in enumerate(parents, 1) if p == n] for n in range(N)}
    first = [children[n][0] if children[n] else -1 for n in range(N)]
    following = [-1] * N
    for siblings in children.values():
        for a, b in zip(siblings, siblings[1:], strict=False):  # noqa: RUF007
            following[a] = b
    return first, following


def test_both_ways():
    parents = torch.tensor([random_tree(20, seed) for seed in range(30)])
    triple = sk.retrieve_from_parents(parents)
    for row, first, following in zip(
        parents.tolist(), triple.next_token.tolist(), triple.next_sibling.tolist(), strict=True
    ):
        assert (first, following) == links(row)
    assert triple.index.tolist() == [[b * 21 + n for n in range(21)] for b in range(30)]
    assert torch.equal(sk.parents_from_retrieve(triple.next_token, triple.next_sibling), parents)


def test_nodes_that_are_not_there():
    """What hangs from an absent node is absent: -1 both ways."""
    parents = torch.tensor([[0, -1, 2, 1, 3], [-1, 1, 1, 0, 4]])
    triple = sk.retrieve_from_parents(parents)
    back = sk.parents_from_retrieve(triple.next_token, triple.next_sibling)
    assert back.tolist() == [[0, -1, -1, 1, -1], [-1, -1, -1, 0, 4]]
    assert triple.next_token.tolist()[0] == [1, 4, -1, -1, -1, -1]


@pytest.mark.parametrize("n", [0, 1, 127])
def test_sizes(n):
    parents = torch.tensor([random_tree(n, 1)], dtype=torch.int32).view(1, n)
    triple = sk.retrieve_from_parents(parents)
    assert torch.equal(sk.parents_from_retrieve(triple.next_token.int(), triple.next_sibling.int()), parents.long())


def test_verify_tree_takes_what_comes_back():
    """A triple as SGLang builds it, verified on the rows its index names."""
    parents = torch.tensor([[0, 0, 1, 1, 2]])
    target = torch.full((6, 9), 0.0)
    for row, best in enumerate((3, 1, 5, 7, 8, 2)):
        target[row, best] = 9.0
    triple = sk.retrieve_from_parents(parents)
    out = sk.verify_tree(
        target[triple.index[0]], torch.tensor([4, 3, 6, 6, 5]), sk.parents_from_retrieve(*triple[1:])[0],
        torch.tensor([0, 5], dtype=torch.int32), sk.SamplingTensors.create(0.0, batch_size=1),
    )  # fmt: skip
    assert out.path.tolist() == [[2, 5]] and out.tokens.tolist() == [[3, 5, 2]]


# --- trees whose shape is fixed -----------------------------------------------------------------------------------------

CHOICES = [(1,), (0, 0), (0,), (0, 2), (0, 0, 1), (2,), (1, 0), (0, 0, 0), (1, 0, 0, 3)]


def test_static_tree_by_definition():
    """Nodes by depth, then by rank; who attends whom by prefixes."""
    choices = [*CHOICES, (1, 0, 0)]
    nodes = [(), *sorted(choices, key=lambda c: (len(c), c))]
    tree = sk.static_tree(choices)
    assert tree.parents.tolist() == [nodes.index(c[:-1]) for c in nodes[1:]]
    assert tree.depth.tolist() == [len(c) for c in nodes]
    assert tree.rank.tolist() == [c[-1] for c in nodes[1:]]
    assert tree.mask.tolist() == [[c[: len(d)] == d for d in nodes] for c in nodes]
    assert [[int(x) for x in f"{w:011b}"[::-1]] for (w,) in tree.packed_mask.tolist()] == tree.mask.int().tolist()


@pytest.mark.parametrize("n", [1, 31, 32, 128])
def test_static_and_built_trees_agree(n):
    """The same parents as candidates that are all as likely: the same depths and masks."""
    choices, count = [()], {}
    for parent in random_tree(n, n):
        choices.append((*choices[parent], count.get(parent, 0)))
        count[parent] = count.get(parent, 0) + 1
    tree = sk.static_tree(choices[1:])
    none = torch.zeros(1, n, dtype=torch.int64)
    built = sk.build_tree(none.float(), none, tree.parents[None], n, backend="eager")
    assert built.parents[0].tolist() == tree.parents.tolist()
    for name in ("depth", "mask", "packed_mask"):
        assert torch.equal(getattr(built, name)[0], getattr(tree, name)), name
    triple = sk.retrieve_from_parents(tree.parents[None])
    assert torch.equal(sk.parents_from_retrieve(*triple[1:])[0], tree.parents)


def test_static_tree_tokens():
    choices = [*CHOICES, (1, 0, 0)]
    tree = sk.static_tree(choices)
    candidates = torch.arange(2 * 4 * 4).view(2, 4, 4)
    nodes = sorted(choices, key=lambda c: (len(c), c))
    want = [[int(candidates[b, len(c) - 1, c[-1]]) for c in nodes] for b in range(2)]
    assert sk.static_tree_tokens(tree, candidates).tolist() == want
    assert sk.static_tree_tokens(tree, candidates.int()).dtype == torch.int32
    compiled = torch.compile(sk.static_tree_tokens, fullgraph=True, backend="aot_eager")
    assert compiled(tree, candidates).tolist() == want
    # Fewer depths or ranks than the tree has: the others are no children.
    some = sk.static_tree_tokens(tree, candidates[:, :3, :2]).tolist()
    assert some == [[t if len(c) <= 3 and c[-1] < 2 else -1 for c, t in zip(nodes, row, strict=True)] for row in want]


def test_a_static_tree_is_verified():
    """Two requests of one shape: the greedy path through the candidates, as deep as it goes."""
    tree = sk.static_tree([(0,), (1,), (1, 0), (0, 0), (0, 1), (0, 1, 0)])
    candidates = torch.tensor([[[3, 5], [4, 6], [2, 0]], [[7, 1], [4, 8], [0, 0]]])
    tokens = sk.static_tree_tokens(tree, candidates)
    target = torch.zeros(2, 7, 9)
    for b, path in enumerate(((3, 6, 2, 8), (1, 4, 5))):
        node = 0
        for token in path:
            target[b, node, token] = 9.0
            children = [n for n, p in enumerate(tree.parents.tolist(), 1) if p == node and tokens[b, n - 1] == token]
            node = children[0] if children else node
    out = sk.verify_tree(
        target.view(-1, 9), tokens.flatten(), tree.parents.repeat(2), torch.tensor([0, 6, 12], dtype=torch.int32),
        sk.SamplingTensors.create(0.0, batch_size=2),
    )  # fmt: skip
    assert out.tokens.tolist() == [[3, 6, 2, 8], [1, 4, 5, -1]]
    assert [[n for n in path if n > 0] for path in out.path.tolist()] == [[1, 4, 6], [2, 5]]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "choices must be a list of 1 to 128 tuples of ranks, got list"),
        ([(i,) for i in range(129)], "choices must be a list of 1 to 128"),
        (torch.zeros(2, 1), "choices must be a list .*got float32"),
        ([(0,), ()], r"choices\[1\] must be a tuple of ranks, ints in \[0, 2\^31\), one or more, got tuple \(\)"),
        ([(2**63,)], r"choices\[0\] must be a tuple of ranks"),
        ([(0,), 3], r"choices\[1\] must be a tuple of ranks.*got int 3"),
        ([(0,), (0, -1)], r"choices\[1\] must be a tuple of ranks.*got tuple \(0, -1\)"),
        ([(0,), (0, True)], r"choices\[1\] must be a tuple of ranks"),
        ([(0,), (1,), (0,)], r"choices\[2\] must be there once, got tuple \(0,\)"),
        ([(0,), (1, 2, 0)], r"choices\[1\] must be given with the node above it, \(1, 2\), got tuple \(1, 2, 0\)"),
    ],
)
def test_static_tree_errors_name_the_entry(choices, message):
    with pytest.raises(ValueError, match="^static_tree: " + message):
        sk.static_tree(choices)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: sk.parents_from_retrieve(torch.tensor([[1, -1]]), torch.tensor([[0, -1]])),
            r"next_sibling must be -1 or a later",
        ),
        (
            lambda: sk.parents_from_retrieve(torch.tensor([[2, -1]]), torch.tensor([[-1, -1]])),
            r"next_token must be .*got 2 at",
        ),
        (
            lambda: sk.parents_from_retrieve(torch.zeros(2), torch.zeros(2)),
            r"next_token must be int32 or int64 \[B, N\]",
        ),
        (
            lambda: sk.parents_from_retrieve(torch.zeros(1, 2).int(), torch.zeros(1, 3).int()),
            r"next_sibling must be \[B, N\]",
        ),
        (
            lambda: sk.retrieve_from_parents(torch.zeros(3, dtype=torch.int64)),
            r"parents must be int32 or int64 \[B, N - 1\]",
        ),
        (
            lambda: sk.static_tree_tokens([(0,)], torch.zeros(1, 1, 1).int()),
            "tree must be a StaticTree, got list",
        ),
        (
            lambda: sk.static_tree_tokens(sk.static_tree([(0,)]), torch.zeros(1, 1).int()),
            r"candidates must be int32 or int64 \[B, D >= 1, k >= 1\] on cpu, got int32 \[1, 1\]",
        ),
        (
            lambda: sk.static_tree_tokens(sk.static_tree([(0,)]), torch.zeros(1, 0, 1).int()),
            "candidates must be",
        ),
    ],
)
def test_errors_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
