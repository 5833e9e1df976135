"""Topologies of draft trees, converted both ways."""

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
    ],
)
def test_errors_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
