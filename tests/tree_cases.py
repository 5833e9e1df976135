"""Random `verify_tree` calls, whose children were really drawn the way the rule expects, for backends and oracle."""

from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

import python_ref
import specdec_kernels as sk
from specdec_kernels._schemas import LOSSY_RULES
from tests.cases import FILTERS, generator, make_params, make_rows, offsets

RULES = (
    ("target_only", None),
    ("recursive", True),
    ("recursive", False),
    ("traversal", True),
    ("traversal", False),
    ("greedy_draft", None),
)

TREES = {
    "none": [],
    "one": [0],
    "chain": [0, 1, 2, 3],
    "star": [0, 0, 0, 0],
    "pairs": [0, 0, 1, 1, 2, 2],
    "unbalanced": [0, 0, 2, 2, 4, 5, 0],
    "later_siblings": [0, 1, 0, 1, 2, 3],
    "absent": [0, -1, 1, 2, 0, 1],
}


@dataclass(frozen=True, eq=False)
class TreeCall:
    target: Tensor
    drafts: Tensor
    parents: Tensor
    cu: Tensor
    params: sk.SamplingTensors
    position: Tensor | None
    options: dict = field(default_factory=dict)

    def arguments(self, options):
        target = None if "target_probs" in options else self.target
        return (target, self.drafts, self.parents, self.cu, self.params, self.position)

    def run(self, backend: str, **extra) -> sk.TreeOutput:
        return self.ask(sk, {**self.options, "logprobs": 1, "return_nucleus": True, "backend": backend, **extra})

    def oracle(self) -> python_ref.TreeResult:
        return self.ask(python_ref, self.options)

    def ask(self, package, options):
        if options["rule"] not in LOSSY_RULES:
            return package.verify_tree(*self.arguments(options), **options)
        target, drafts, parents, cu, params, position = self.arguments(options)
        rule, options = options["rule"], {k: v for k, v in options.items() if k != "rule"}
        return getattr(package.lossy, rule)(target, drafts, cu, params, position, parents=parents, **options)

    def but(self, **changes) -> "TreeCall":
        fields = {
            k: changes.pop(k)
            for k in tuple(changes)
            if k in ("target", "drafts", "parents", "cu", "params", "position")
        }
        options = {k: v for k, v in {**self.options, **changes}.items() if v is not None}
        return replace(self, options=options, **fields)


def random_parents(count: int, g: torch.Generator) -> list[int]:
    """Any tree, now and then with a node that is not there."""
    parents = [int(torch.randint(n, (1,), generator=g)) for n in range(1, count + 1)]
    return [-1 if torch.rand(1, generator=g) < 0.05 else p for p in parents]


def make_tree_call(
    kind="normal", vocab=1000, dtype=torch.float32, rule="target_only", replacement=None, q="logits", trees=None, filters=FILTERS,
    seed=0, order="hf", noise=0.7,
) -> TreeCall:  # fmt: skip
    """Requests with trees of several shapes; q is a noisy copy of each parent's target row."""
    g = generator("tree", kind, vocab, seed)
    B = len(filters)
    if trees is None:
        named = list(TREES.values())
        trees = [named[(b + seed) % len(named)] if b % 2 else random_parents(2 + b % 7, g) for b in range(B)]
    cu, params = offsets([len(t) for t in trees]), make_params(filters, seed)
    D = int(cu[-1])
    target = make_rows(kind, D + B, vocab, dtype, seed)
    position = torch.randint(0, 2**40, (B,), generator=g)
    logits = (target.float() + noise * torch.randn(D + B, vocab, generator=g)).to(dtype)
    tokens, rows = torch.full((D,), -1), torch.zeros(D, dtype=torch.int64)
    saved = torch.zeros(3, D)
    for b, tree in enumerate(trees):
        for node in range(len(tree) + 1):
            children = [n for n, parent in enumerate(tree, 1) if parent == node]
            at = int(cu[b]) + b + node
            for child in children:
                rows[int(cu[b]) + child - 1] = at
            if not children:
                continue
            request = torch.tensor([b])

            def draw(child, count):
                return python_ref.sample(
                    logits[at][None], params, position[b][None], rows=request, stream=0, ids=torch.tensor([child - 1]),  # noqa: B023
                    num_samples=count, filter_order=order,
                )  # fmt: skip

            if rule in ("recursive", "traversal") and replacement:
                out = [draw(c, 1) for c in children]
                drawn, nucleus = [int(o.tokens) for o in out], out[0].nucleus
            else:
                out = draw(children[0], len(children))
                drawn, nucleus = out.tokens.flatten().tolist(), out.nucleus
                if (
                    rule == "greedy_draft" and len(children) > 1
                ):  # the likeliest, and the first drawn that is not among them
                    top = (
                        logits[at]
                        .float()
                        .nan_to_num(-torch.inf, torch.inf, -torch.inf)
                        .topk(min(len(children) - 1, vocab))
                    )
                    rest = [t for t in drawn if t not in top.indices.tolist()]
                    drawn = [*top.indices.tolist(), *(rest[:1] or [-1])]
            for child, token in zip(children, drawn, strict=False):
                tokens[int(cu[b]) + child - 1] = token
                saved[:, int(cu[b]) + child - 1] = torch.stack([f[0].float() for f in nucleus])
    options = {"rule": rule, "filter_order": order}
    if rule in ("recursive", "traversal"):
        options["replacement"] = replacement
    call = TreeCall(
        target, tokens, torch.tensor([p for t in trees for p in t], dtype=torch.int64), cu, params, position, options
    )
    if rule == "target_only" or rule in LOSSY_RULES:
        return call
    if q == "probs":
        owner = torch.repeat_interleave(torch.arange(B), torch.tensor([len(t) + 1 for t in trees]))
        probs = python_ref.filter_probs(logits, params, rows=owner, filter_order=order)
        return call.but(draft_probs=probs.float(), draft_rows=rows)
    nucleus = sk.Nucleus(*saved) if q == "nucleus" else None
    return call.but(draft_logits=logits, draft_rows=rows, draft_params=params, draft_nucleus=nucleus)


@lru_cache(maxsize=256)
def known_tree_call(**key) -> tuple[TreeCall, python_ref.TreeResult]:
    """A call and the oracle's answer, made once for all backends."""
    call = make_tree_call(**key)
    return call, call.oracle()
