"""Laws of what is emitted, by chi-square against exact laws: one step's joint outcome, texts over several steps, and a
real vocabulary size. Seeds are fixed, so a test is deterministic: it passed once, it passes always. Controls show that
the same tests see the usual mistakes. Plain torch, which is slow, is tied to the enumerated oracle by parity instead.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from scipy import stats

import python_ref
import specdec_kernels as sk
from tests.cases import make_rows, offsets

VOCAB, K, BATCH = 5, 2, 40000
PASS = 1e-3
"""Every p-value here is above it (fixed seeds); a wrong law gives less than RED."""
RED = 1e-9

FILTERS = {
    "plain": {"temperature": 1.0},
    "top_p": {"temperature": 0.8, "top_p": 0.75},
    "top_k": {"temperature": 1.2, "top_k": 3},
    "min_p": {"temperature": 1.0, "min_p": 0.15},
    "mixed": {"temperature": 0.9, "top_p": 0.9, "top_k": 4, "min_p": 0.02},
}


def p_value(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Chi-square goodness of fit; bins of expected count below 5 are pooled. 0 if something impossible was seen."""
    expected = law.double() * (counts.sum() / law.double().sum())
    if counts[law == 0].any():
        return 0.0
    large = expected >= 5
    observed = torch.cat([counts[large], counts[~large].sum()[None]]).double()
    expected = torch.cat([expected[large], expected[~large].sum()[None]])
    if expected[-1] < 5:  # too little even in the pool
        observed, expected = observed[:-1], expected[:-1] * observed[:-1].sum() / expected[:-1].sum()
    return float(stats.chisquare(observed.numpy(), expected.numpy()).pvalue)


def params_of(filters: dict, batch: int, seed: int = 0) -> sk.SamplingTensors:
    return sk.SamplingTensors.create(**filters, seed=torch.arange(batch) * 7919 + seed)


def probs(logits, filters):
    return python_ref.filter_probs(logits, params_of(filters, logits.shape[0]))


def one_step(backend, filters, rule, draft_filters=None, claimed=None, stream=0):
    """Counts of (emitted tokens, number accepted), and the logits of p [K + 1, V] and q [K, V] behind them."""
    p_logits = 1.5 * make_rows("flat", K + 1, VOCAB, seed=1)
    q_logits = p_logits[:K] + make_rows("flat", K, VOCAB, seed=2)
    params, draft_params = params_of(filters, BATCH), params_of(draft_filters or filters, BATCH)
    position = torch.full((BATCH,), 1000)
    drafts = torch.stack(
        [
            sk.sample(
                q_logits[i : i + 1].expand(BATCH, VOCAB),
                draft_params,
                position + (i if stream == 2 else 0),
                stream=stream,
                ids=torch.full((BATCH,), i if stream == 0 else 0),
                backend=backend,
            ).tokens
            for i in range(K)
        ],
        1,
    )
    out = sk.verify_chain(
        p_logits.repeat(BATCH, 1),
        drafts.flatten(),
        offsets([K] * BATCH),
        params,
        position,
        draft_logits=q_logits,
        draft_rows=torch.arange(K).repeat(BATCH),
        draft_params=params_of(claimed, BATCH) if claimed else draft_params,
        rule=rule,
        max_draft=K,
        backend=backend,
    )
    code = out.num_accepted.long()
    for i in range(K + 1):
        code = code * (VOCAB + 1) + out.tokens[:, i] + 1
    return torch.bincount(code, minlength=(K + 1) * (VOCAB + 1) ** (K + 1)), p_logits, q_logits


def code_of(tokens, accepted) -> int:
    code = accepted
    for i in range(K + 1):
        code = code * (VOCAB + 1) + (tokens[i] + 1 if i < len(tokens) else 0)
    return code


def joint_law(p, q, rule) -> torch.Tensor:
    """Exact law of the outcome code: all draft paths by their probability, then the rule's own probabilities."""
    law = torch.zeros((K + 1) * (VOCAB + 1) ** (K + 1), dtype=torch.float64)
    for drafts in itertools.product(range(VOCAB), repeat=K):
        path = float(torch.stack([q[i, x] for i, x in enumerate(drafts)]).prod())
        if path == 0:
            continue
        if rule != "coupled":
            _, emit, count = python_ref.chain_law(list(p), list(q), list(drafts), rule)
        else:  # independent drafts are accepted where the target's own draw agrees
            accept = [float(p[i, x]) for i, x in enumerate(drafts)]
            emit = [p[i] * (torch.arange(VOCAB) != x) / (1 - p[i, x]).clamp_min(1e-300) for i, x in enumerate(drafts)]
            emit.append(p[K])
            count = [math.prod(accept[:a]) * (1 - (accept[a] if a < K else 0.0)) for a in range(K + 1)]
        for a in range(K + 1):
            for y in range(VOCAB):
                law[code_of((*drafts[:a], y), a)] += path * count[a] * float(emit[a][y])
    return law


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_one_step_joint_law(rule, name, native):
    counts, p, q = one_step(native, FILTERS[name], rule)
    law = joint_law(probs(p, FILTERS[name]), probs(q, FILTERS[name]), rule)
    assert abs(law.sum() - 1) < 1e-9
    assert p_value(counts, law) > PASS


def test_one_step_with_other_draft_filters(native):
    """Drafts sampled with the temperature alone, as engines often do, while the target is filtered."""
    drawn = {"temperature": 1.5}
    counts, p, q = one_step(native, FILTERS["mixed"], "token", draft_filters=drawn)
    assert p_value(counts, joint_law(probs(p, FILTERS["mixed"]), probs(q, drawn), "token")) > PASS


def test_guessed_q(native):
    """Control: drafts sampled with the temperature alone, q claimed to be filtered. The bias is seen."""
    drawn = {"temperature": 1.5}
    counts, p, q = one_step(native, FILTERS["mixed"], "token", draft_filters=drawn, claimed=FILTERS["mixed"])
    assert p_value(counts, joint_law(probs(p, FILTERS["mixed"]), probs(q, drawn), "token")) < RED


def test_shared_noise(native):
    """Control: drafts proposed with the noise that the residual will use. The joint law is far off."""
    counts, p, q = one_step(native, FILTERS["plain"], "token", stream=2)
    assert p_value(counts, joint_law(probs(p, FILTERS["plain"]), probs(q, FILTERS["plain"]), "token")) < RED


# --- several steps ------------------------------------------------------------------------------------------------------

STATES, LENGTH, TEXTS = 4, 4, 60000


def texts(backend, rule, filters, advance=True, stream=None):
    """[TEXTS, LENGTH] tokens of a Markov target, two drafts a step from a Markov drafter. `advance=False`: every step
    claims the same position."""
    p_table = 1.5 * make_rows("flat", STATES, STATES, seed=3)
    q_table = p_table + make_rows("flat", STATES, STATES, seed=4)
    params = params_of(filters, TEXTS, seed=11)
    stream = (2 if rule == "coupled" else 0) if stream is None else stream
    start = torch.full((TEXTS,), 50)
    text = torch.full((TEXTS, LENGTH + 2 * K + 1), -1)
    length = torch.zeros(TEXTS, dtype=torch.int64)
    last = torch.zeros(TEXTS, dtype=torch.int64)
    while int(length.min()) < LENGTH:
        anchor = start + length if advance else start
        seen, q_rows = [last], []
        for i in range(K):
            q_rows.append(q_table[seen[-1]])
            position = anchor if stream == 0 else anchor + i
            out = sk.sample(
                q_rows[-1],
                params,
                position,
                stream=stream,
                ids=torch.full((TEXTS,), i * (stream == 0)),
                backend=backend,
            )
            seen.append(out.tokens.long())
        out = sk.verify_chain(
            p_table[torch.stack(seen, 1)].view(-1, STATES),
            torch.stack(seen[1:], 1).flatten(),
            offsets([K] * TEXTS),
            params,
            anchor,
            draft_logits=torch.stack(q_rows, 1).view(-1, STATES),
            draft_params=params,
            rule=rule,
            max_draft=K,
            backend=backend,
        )
        column = length[:, None] + torch.arange(K + 1)
        text.scatter_(
            1, torch.where(out.tokens >= 0, column, text.shape[1] - 1).clamp_max(text.shape[1] - 1), out.tokens.long()
        )
        last = out.tokens.gather(1, (out.num_emitted - 1).long()[:, None])[:, 0].long()
        length = (length + out.num_emitted).clamp_max(LENGTH)  # a finished text goes on, out of sight
    text = text[:, :LENGTH]
    code = (text * STATES ** torch.arange(LENGTH)).sum(1)
    p = probs(p_table, filters)
    law = torch.zeros(STATES**LENGTH, dtype=torch.float64)
    for path in itertools.product(range(STATES), repeat=LENGTH):
        weight = float(torch.stack([p[a, b] for a, b in itertools.pairwise((0, *path))]).prod())
        law[sum(t * STATES**i for i, t in enumerate(path))] = weight
    return torch.bincount(code, minlength=STATES**LENGTH), law


@pytest.mark.parametrize("name", ["plain", "mixed"])
@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_texts_over_several_steps(rule, name, native):
    assert p_value(*texts(native, rule, FILTERS[name])) > PASS


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_noise_reused_next_step(rule, native):
    """Control: the second step claims the first one's position and so draws the same noise."""
    assert p_value(*texts(native, rule, FILTERS["plain"], advance=False)) < RED


# --- a real vocabulary --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "filters", [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.95}, {"top_k": 500}], ids=str
)
def test_first_token_at_32000(filters, native):
    """The first emitted token's marginal is p's, through rejections and acceptances; one row of p and q serves all."""
    vocab, batch = 32000, 20000
    p_row = 1.3 * make_rows("lm", 1, vocab, seed=5) / 3
    q_row = p_row + 0.5 * make_rows("flat", 1, vocab, seed=6)
    params = params_of(filters, batch, seed=3)
    position = torch.zeros(batch, dtype=torch.int64)
    ids = torch.zeros(batch, dtype=torch.int64)
    drafted = sk.sample(
        q_row.expand(batch, vocab), params, position, stream=0, ids=ids, return_nucleus=True, backend=native
    )
    out = sk.verify_chain(
        p_row.expand(2 * batch, vocab),
        drafted.tokens,
        offsets([1] * batch),
        params,
        position,
        draft_logits=q_row,
        draft_rows=ids,
        draft_params=params,
        draft_nucleus=drafted.nucleus,
        emit_bonus=False,
        max_draft=1,
        backend=native,
    )
    accepted = out.num_accepted.double().mean()
    p, q = (python_ref.filter_probs(row, replace(params)).squeeze(0) for row in (p_row, q_row))
    overlap = float(torch.minimum(p, q).sum())
    assert 0.3 < overlap < 0.95
    assert abs(accepted - overlap) < 4 * (overlap * (1 - overlap) / batch) ** 0.5
    assert p_value(torch.bincount(out.tokens[:, 0], minlength=vocab), p) > PASS
    assert p_value(torch.bincount(drafted.tokens, minlength=vocab), q) > PASS
    # The chi-square has power here: the same counts do not fit q.
    assert p_value(torch.bincount(out.tokens[:, 0], minlength=vocab), torch.where(p > 0, q + 1e-12, 0.0)) < RED
