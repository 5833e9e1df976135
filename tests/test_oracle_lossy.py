"""What the lossy rules of the oracle give up, by exact enumeration: their laws in closed form, and how far those are from p."""

import math

import pytest
import torch

import python_ref
from tests.enumeration import TOLERANCE, explore, make_params, scripted


def typical_accepts(p: torch.Tensor, epsilon: float = 0.09, delta: float = 0.3) -> torch.Tensor:
    entropy = -math.fsum(float(v) * math.log(v) for v in p if v > 0)
    return p > min(epsilon, delta * math.exp(-entropy))


def random_p(seed: int, vocab: int = 6, scale: float = 1.5) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(vocab, generator=g, dtype=torch.float64)).softmax(0)


def first_token_law(rule: str, p: torch.Tensor, drafts: list[int], **options) -> tuple[torch.Tensor, float]:
    """(law of the first token, expected number of accepted drafts) where `drafts` are the root's children, by enumeration of
    the oracle's own decisions."""

    def run(choose):
        with scripted(choose):
            out = getattr(python_ref.lossy, rule)(
                None, torch.tensor(drafts), torch.tensor([0, len(drafts)]), make_params([{}]),
                parents=torch.zeros(len(drafts), dtype=torch.int64), target_probs=p.expand(len(drafts) + 1, -1), **options,
            )  # fmt: skip
        return int(out.tokens[0, 0]), int(out.num_accepted)

    law, accepted = torch.zeros_like(p), 0.0
    for (token, count), weight in explore(run).items():
        law[token] += weight
        accepted += weight * count
    return law, accepted


def tv(a: torch.Tensor, b: torch.Tensor) -> float:
    return 0.5 * float((a - b).abs().sum())


@pytest.mark.parametrize("acc", [0.25, 0.5, 1.0])
def test_law_of_threshold_acc(acc):
    """One child x is emitted with min(1, p(x) / a), the others share the rest: TV is what x gained, and 0 at a = 1."""
    for seed in range(8):
        p = random_p(seed)
        for x in range(len(p)):
            law, accepted = first_token_law("threshold", p, [x], threshold_acc=acc)
            gets = min(1.0, float(p[x]) / acc)
            wanted = p * (1 - gets) / (1 - p[x])
            wanted[x] = gets
            assert tv(law, wanted) < TOLERANCE and abs(accepted - gets) < TOLERANCE
            assert abs(tv(law, p) - (gets - float(p[x]))) < TOLERANCE


def test_law_of_several_children_under_threshold():
    """The children up to the i-th are reached by min(1, S_i / a), or by 1 once one of them has p >= threshold_single."""
    largest = 0.0
    for seed in range(12):
        p, drafts = random_p(seed), [3, 0, 3, 5]
        for single, acc in ((1.0, 0.6), (0.3, 0.8), (0.15, 1.0), (1.0, 1.0)):
            single, acc = (float(torch.tensor(v, dtype=torch.float32)) for v in (single, acc))
            law, _ = first_token_law("threshold", p, drafts, threshold_single=single, threshold_acc=acc)
            wanted, reached, total = p.clone(), 0.0, 0.0
            for x in (3, 0, 5):
                total += float(p[x])
                now = 1.0 if reached == 1.0 or p[x] >= single else min(1.0, total / acc)
                wanted[x], reached = now - reached, now
            others = [1, 2, 4]
            wanted[others] = p[others] * (1 - reached) / p[others].sum()
            assert tv(law, wanted) < TOLERANCE
            if single == acc == 1.0:
                assert tv(law, p) < TOLERANCE
            largest = max(largest, tv(law, p))
    assert largest > 0.3


def test_law_of_typical():
    """A draft x of q is emitted if it is likely enough, else a token of p: q(y) A(y) + (1 - sum q A) p(y). It is not p, and
    more drafts stand than under the token rule, whose acceptance is sum min(p, q)."""
    gained, largest = [], 0.0
    for seed in range(12):
        p, q = random_p(seed, 12), random_p(seed + 50, 12)
        a = typical_accepts(p)
        assert a.any() and not a.all()
        law, accepted = torch.zeros_like(p), 0.0
        for x, weight in enumerate(q):
            here, count = first_token_law("typical", p, [x])
            law, accepted = law + weight * here, accepted + float(weight) * count
        stands = float(q[a].sum())
        wanted = q * a + (1 - stands) * p
        assert tv(law, wanted) < TOLERANCE and abs(accepted - stands) < TOLERANCE
        assert abs(tv(law, p) - tv(q * a, stands * p)) < TOLERANCE
        gained.append(accepted - float(torch.minimum(p, q).sum()))
        largest = max(largest, tv(law, p))
    assert sum(gained) / len(gained) > 0.1 and largest > 0.2
