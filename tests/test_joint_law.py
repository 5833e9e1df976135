"""Joint outcomes at V = 4,096 with filters on, by chi-square: how many drafts are accepted, which, and what comes behind them.

Marginals can look right where joints are not: a coin shared with the race, a residual of the wrong row. The rows are the same
for all requests and do not depend on the drafts, so the law of (accepted, first draft, token behind) has a closed form; drafts
and decisions come from the real keys. Each law is also shown to be told from the nearest wrong one.
"""

import pytest
import torch
from scipy.stats import chisquare

import python_ref
import specdec_kernels as sk
from tests.cases import make_rows, offsets

VOCAB, REQUESTS, GROUPS = 4096, 30_000, 9
FILTERS = {"temperature": 0.9, "top_p": 0.9, "top_k": 400}


def filtered(logits):
    return python_ref.filter_probs(logits, sk.SamplingTensors.create(**FILTERS, batch_size=logits.shape[0]))


def setting(rows, seed):
    """(p logits, q logits, p, q, params, group of each token): q a noisy copy of p; the likeliest tokens have their own group."""
    p_logits = make_rows("lm", rows, VOCAB, seed=seed) / 3
    q_logits = p_logits + 0.5 * make_rows("normal", rows, VOCAB, seed=seed + 1) / 3
    p, q = filtered(p_logits), filtered(q_logits)
    params = sk.SamplingTensors.create(**FILTERS, seed=torch.arange(REQUESTS) * 7919 + seed)
    group = torch.full((VOCAB,), GROUPS)
    group[(p + q).sum(0).topk(GROUPS).indices] = torch.arange(GROUPS)
    return p_logits, q_logits, p, q, params, group


def grouped(weights, group, dim=-1):
    shape = list(weights.shape)
    shape[dim] = GROUPS + 1
    return torch.zeros(shape, dtype=weights.dtype).index_add(dim, group, weights)


def p_value(outcomes, law):
    """Of the observed outcome numbers under `law` (probabilities by outcome number); rare outcomes are pooled."""
    assert abs(float(law.sum()) - 1) < 1e-9
    counts, wanted = torch.bincount(outcomes, minlength=law.numel()).double(), law * len(outcomes)
    assert not counts[law == 0].any()
    often = wanted >= 5
    assert often.sum() >= 6
    seen, wanted = (torch.cat([v[often], v[~often].sum()[None]]) for v in (counts, wanted))
    if not float(wanted[-1]):
        seen, wanted = seen[:-1], wanted[:-1]
    return chisquare(seen.numpy(), wanted.numpy()).pvalue


# --- chains of two ------------------------------------------------------------------------------------------------------


def chain_law(rule, p, q, group):
    """P(accepted n, group of the first draft (0 for n = 0), group of the token behind), [3, G, G]."""
    law = torch.zeros(3, GROUPS + 1, GROUPS + 1, dtype=torch.float64)
    support = (q[0] > 0).nonzero()[:, 0]
    w1 = (p[0][support] / q[0][support]).clamp_max(1.0)
    first = q[0][support]
    if rule == "token":
        both = torch.minimum(p[1], q[1]).sum().expand_as(w1)
        two, one = first * w1 * both, first * w1 * (1 - both)
        rest = (p[1] - q[1]).clamp_min(0).expand(len(support), -1)
    else:
        rest = (w1[:, None] * p[1] - q[1]).clamp_min(0)
        z = rest.sum(1)
        both = torch.minimum(w1[:, None] * p[1], q[1]).sum(1)
        stands = torch.where(w1 >= 1, 1.0, z / (z + 1 - w1))
        two, one = first * both, first * (1 - both) * stands
    rest = rest / rest.sum(1, keepdim=True).clamp_min(1e-300)
    none = 1 - two.sum() - one.sum()
    zero = (p[0] - q[0]).clamp_min(0)
    law[0, 0] = none * grouped(zero / zero.sum(), group)
    law[1] = grouped(one[:, None] * grouped(rest, group), group[support], 0)
    law[2] = grouped(two, group[support])[:, None] * grouped(p[2], group)
    return law.flatten()


@pytest.mark.parametrize("rule", ["token", "block"])
def test_chain(rule, native):
    p_logits, q_logits, p, q, params, group = setting(3, 11)
    n = REQUESTS
    each = torch.arange(2).repeat(n)
    request = torch.arange(n).repeat_interleave(2)
    drafts = sk.sample(
        q_logits[:2].repeat(n, 1), params, torch.zeros(2 * n, dtype=torch.int64), rows=request, stream=0, ids=each,
        backend=native,
    )  # fmt: skip
    out = sk.verify_chain(
        p_logits.repeat(n, 1), drafts.tokens, offsets([2] * n), params, torch.zeros(n, dtype=torch.int64), rule=rule,
        draft_logits=q_logits[:2], draft_rows=each, draft_params=params, max_draft=2, backend=native,
    )  # fmt: skip
    accepted = out.num_accepted.long()
    behind = group[out.tokens.long().gather(1, accepted[:, None])[:, 0]]
    first = torch.where(accepted > 0, group[out.tokens[:, 0].long()], 0)
    outcome = (accepted * (GROUPS + 1) + first) * (GROUPS + 1) + behind
    assert p_value(outcome, chain_law(rule, p, q, group)) > 1e-3
    other = chain_law("block" if rule == "token" else "token", p, q, group)
    assert p_value(outcome, other) < 1e-9


# --- trees of one level -------------------------------------------------------------------------------------------------


def star_law(rule, replacement, p, q, fixed, group):
    """P(which child is accepted (3: none), group of the emitted first token), [4, G]."""
    law = torch.zeros(4, VOCAB, dtype=torch.float64)
    if rule == "target_only":
        for j, c in enumerate(fixed):
            law[j, c] = p[c]
        law[3] = p.index_fill(0, fixed, 0.0)
    elif rule == "greedy_draft":
        rest = q.index_fill(0, fixed[:2], 0.0)
        rest = rest / rest.sum()
        law[2] = torch.minimum(p, rest)
        left = (p - rest).clamp_min(0)
        for j, c in enumerate(fixed[:2]):
            law[j, c] = left[c]
        law[3] = left.index_fill(0, fixed[:2], 0.0)
    elif replacement:
        share, r = 1.0, p
        for j in range(3):
            law[j] = share * torch.minimum(q, r)
            left = (r - q).clamp_min(0)
            share, r = share * float(left.sum()), left / left.sum()
        law[3] = share * r
    else:  # two children: the second from what the first leaves
        law[0] = torch.minimum(p, q)
        left = (p - q).clamp_min(0)
        r = left / left.sum()
        for x in (q > 0).nonzero()[:, 0].tolist():
            reject = float((q[x] - p[x]).clamp_min(0))
            q_2 = q.index_fill(0, torch.tensor([x]), 0.0) / (1 - q[x])
            law[1] += reject * torch.minimum(q_2, r)
            law[3] += reject * (r - q_2).clamp_min(0)
    return grouped(law, group, 1).flatten()


CASES = [
    ("target_only", None, 3),
    ("recursive", True, 3),
    ("recursive", False, 2),
    ("traversal", True, 3),
    ("traversal", False, 2),
    ("greedy_draft", None, 3),
]


@pytest.mark.parametrize(("rule", "replacement", "children"), CASES, ids=str)
def test_star(rule, replacement, children, native):
    p_logits, q_logits, (p,), (q,), params, group = setting(1, 23)
    n, k = REQUESTS, children
    zeros = torch.zeros(n, dtype=torch.int64)
    fixed = q.topk(3).indices
    if rule == "target_only":
        drafts = fixed.expand(n, -1)
    elif rule == "greedy_draft":
        rest = q_logits[0].index_fill(0, fixed[:2], -torch.inf)
        # q's own filters, without its top two: the nucleus is q's, so the rest is drawn from its tokens unfiltered
        rest = torch.where(q > 0, rest, -torch.inf)
        plain = sk.SamplingTensors.create(FILTERS["temperature"], seed=params.seed)
        last = sk.sample(rest.expand(n, -1), plain, zeros, stream=0, ids=zeros + 2, backend=native).tokens
        drafts = torch.cat([fixed[:2].expand(n, -1), last[:, None].long()], 1)
    elif replacement:
        ids, request = torch.arange(k).repeat(n), torch.arange(n).repeat_interleave(k)
        drafts = sk.sample(
            q_logits.expand(n * k, -1), params, zeros.repeat_interleave(k), rows=request, stream=0, ids=ids, backend=native
        ).tokens.view(n, k)  # fmt: skip
    else:
        drafts = sk.sample(
            q_logits.expand(n, -1), params, zeros, stream=0, ids=zeros, num_samples=k, backend=native
        ).tokens
    given = {"draft_logits": q_logits, "draft_rows": torch.zeros(n * k, dtype=torch.int64), "draft_params": params}
    out = sk.verify_tree(
        p_logits.expand(n * (k + 1), -1), drafts.flatten(), torch.zeros(n * k, dtype=torch.int64), offsets([k] * n), params,
        zeros, rule=rule, replacement=replacement, max_depth=1, backend=native, **(given if rule != "target_only" else {}),
    )  # fmt: skip
    child = torch.where(out.num_accepted > 0, out.path[:, 0].long() - 1, 3)
    outcome = child * (GROUPS + 1) + group[out.tokens[:, 0].long()]
    law = star_law(rule, replacement, p, q, fixed, group)
    assert p_value(outcome, law) > 1e-3
    # The marginals of the right law, made independent of each other.
    table = law.view(4, -1)
    assert p_value_or_zero(outcome, (table.sum(1, keepdim=True) * table.sum(0)).flatten()) < 1e-9


def p_value_or_zero(outcomes, law):
    return p_value(outcomes, law + 1e-12 * (law == 0) - 1e-12 * (law == 0).sum() * law)
