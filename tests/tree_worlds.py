"""Trees of drafts for exact enumeration: how each kind of drafter draws children, and one real step of `verify_tree`."""

from dataclasses import dataclass

import torch

from python_ref import verify_tree
from tests.enumeration import Table, explore, filtered_probs, make_params, scripted

SHAPES = {
    "one_node": [0],
    "chain": [0, 1],
    "star": [0, 0, 0],
    "pairs": [0, 0, 1, 1],
    "unbalanced": [0, 0, 2, 3],
    "later_siblings": [0, 1, 0, 1],
    "root_alone": [],
}


def children_of(parents: list[int], node: int) -> list[int]:
    return [n for n, parent in enumerate(parents, 1) if parent == node]


def draw_iid(q, count, choose) -> list[int]:
    return [choose(q) for _ in range(count)]


def draw_without_replacement(q, count, choose) -> list[int]:
    left, out = list(q), []
    for _ in range(count):
        out.append(choose(left) if sum(left) > 0 else -1)  # -1: there is no such child
        left[out[-1]] = 0.0
    return out


def choose_top(q, count, choose) -> list[int]:
    return sorted(range(len(q)), key=lambda v: (-q[v], v))[:count]


def draw_greedy_draft(q, count, choose) -> list[int]:
    """The largest of q, and one drawn from the others."""
    fixed = choose_top(q, count - 1, choose)
    rest = [0.0 if v in fixed else w for v, w in enumerate(q)]
    return [*fixed, choose(rest) if sum(rest) > 0 else -1]


def draw_once_for_all(q, count, choose) -> list[int]:
    """What iid children are if they share a random key."""
    return [choose(q)] * count


@dataclass
class TreeWorld:
    parents: list[int]
    draw: object = draw_iid
    vocab: int = 3
    seed: int = 0
    filters: dict | None = None
    rule: str = "target_only"
    replacement: bool | None = None

    def __post_init__(self):
        self.target, self.draft = Table(self.vocab, 2 * self.seed, 1.2), Table(self.vocab, 2 * self.seed + 1, 1.2)

    @property
    def depth(self) -> int:
        depth = [0]
        for parent in self.parents:
            depth.append(depth[parent] + 1)
        return max(depth)

    def p(self, context) -> list[float]:
        return filtered_probs(self.target(context).tolist(), **(self.filters or {}))

    def q(self, context) -> list[float]:
        return filtered_probs(self.draft(context).tolist(), **(self.filters or {}))

    def drafts(self, prefix, choose) -> tuple[list[int], list[tuple], list[tuple]]:
        """(tokens, context of each node's row, context that each draft was drawn in)."""
        tokens, contexts = {}, {0: prefix}
        for node in range(len(self.parents) + 1):
            children = children_of(self.parents, node)
            if children:
                drawn = self.draw(self.q(contexts[node]), len(children), choose)
                for child, token in zip(children, drawn, strict=True):
                    tokens[child], contexts[child] = token, (*contexts[node], token)
        nodes = range(1, len(self.parents) + 1)
        return (
            [tokens[n] for n in nodes],
            [contexts[n] for n in (0, *nodes)],
            [contexts[self.parents[n - 1]] for n in nodes],
        )


def tree_step(w: TreeWorld, prefix=()) -> dict:
    """Law of (emitted tokens, accepted count) of one real step."""

    def run(choose):
        with scripted(choose):
            tokens, rows, drawn_in = w.drafts(prefix, choose)
            f64 = torch.float64
            q = [w.q(c) for c in drawn_in]
            out = verify_tree(
                None,
                torch.tensor(tokens, dtype=torch.int64),
                torch.tensor(w.parents, dtype=torch.int64),
                torch.tensor([0, len(tokens)]),
                make_params([{}]),
                target_probs=torch.tensor([w.p(c) for c in rows], dtype=f64),
                draft_probs=torch.tensor(q, dtype=f64).reshape(-1, w.vocab) if w.rule != "target_only" else None,
                rule=w.rule,
                replacement=w.replacement,
            )
        return tuple(out.tokens[0, : int(out.num_emitted)].tolist()), int(out.num_accepted)

    return explore(run)
