"""Speculative sampling over a chain of drafts: accept/reject, then a token from the residual or the bonus row.

Token rule (Leviathan et al. 2211.17192, Chen et al. 2302.01318): draft x_i ~ q_i is accepted with probability
min(1, p_i(x_i) / q_i(x_i)); the first rejected row emits a token of (p_i - q_i)_+ / sum, and a chain accepted to its end
emits one of p_d.

Block rule (Sun et al. 2403.10444): with the running weights w_0 = 1, w_{i+1} = min(1, w_i p_i(x_i) / q_i(x_i)) and the
residual masses Z_i = sum (w_i p_i - q_i)_+, the first i drafts may stand with probability h_i = Z_i / (Z_i + 1 - w_i) where
0 < i < d and h_d = w_d; the largest i whose coin says yes is the number of accepted drafts, and the row behind them emits a
token of (w_i p_i - q_i)_+, the bonus row one of p_d. All i are looked at: a failure does not end the chain. Never fewer
accepted drafts than the token rule on average, and the most that any rule of this kind can have.

Coupled rule (Daliri et al. 2408.07978): row i samples y_i ~ p_i with the noise that plain sampling would use, and x_i is
accepted while x_i = y_i.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import rng
from .nucleus import Nucleus
from .params import (
    STATUS_BAD_OFFSETS,
    STATUS_BAD_Q_ROW,
    STATUS_EMPTY_ROW,
    STATUS_PLACEHOLDER,
    STATUS_ZERO_Q,
    RowParams,
    request_params,
)
from .rows import (
    DraftRow,
    DraftSource,
    TargetRow,
    accept_probability,
    accepts,
    excess,
    finite,
    race_residual,
    residual,
    sampled_probs_status,
    target_row,
)
from .sample import race

RULES = ("token", "block", "coupled")


class VerifyResult(NamedTuple):
    """tokens int32 [B, K + 1], padded with -1 · num_accepted int32 [B] · num_emitted int32 [B] · status int32 [B] ·
    logprobs float64 [B, K + 1], log p of each emitted token (0 past num_emitted) · nucleus [B, K + 1] of the emitted rows
    (0 past num_emitted) · margin float64 [B]: the smallest relative error of the probabilities (p and q each) that could
    change any decision behind this request's output."""

    tokens: Tensor
    num_accepted: Tensor
    num_emitted: Tensor
    status: Tensor
    logprobs: Tensor
    nucleus: Nucleus
    margin: Tensor


class ChainLaw(NamedTuple):
    """What a rule does with one request's drafts, before any randomness: `count[i]` is the probability that i drafts are
    accepted and `emit[i]` the distribution [V] of the token after them (`emit[d]` is the bonus row). Enumerating these is
    enumerating the rule. `accept[i]`: under `token` the probability that draft i is accepted given that all before it
    were; under `block` the probability that i + 1 drafts are accepted given that no more are."""

    accept: list[float]
    emit: list[Tensor]
    count: list[float]


def chain_law(p: list[Tensor], q: list[Tensor | None], drafts: list[int], rule: str = "token") -> ChainLaw:
    """The law of rule "token" or "block".

    `p`: d + 1 rows [V]; `q`: d rows [V], None for a row that cannot be used; `drafts`: d target ids, negative or >= V for
    a placeholder. Where a draft has no usable q (None, q(x) not > 0, placeholder) it is rejected and its row emits from p.
    """
    usable = [
        0 <= x < p_i.numel() and q_i is not None and bool(q_i[x] > 0) for p_i, q_i, x in zip(p, q, drafts, strict=False)
    ]
    d = len(drafts)
    if rule == "token":
        accept = [
            accept_probability(float(p[i][drafts[i]]), float(q[i][drafts[i]])) if usable[i] else 0.0 for i in range(d)
        ]
        emit = [residual(p[i], q[i]) if usable[i] else p[i] for i in range(d)] + [p[d]]
        reached = [math.prod(accept[:i]) for i in range(d + 1)]
        count = [reached[i] * (1 - accept[i]) for i in range(d)] + [reached[d]]
    else:
        end = usable.index(False) if False in usable else d
        weights = chain_weights(p, q, drafts[:end])
        accept = [
            accept_probability(*block_odds(weights[i], p[i], q[i] if i < end else None)) for i in range(1, end + 1)
        ] + [0.0] * (d - end)
        emit = [residual(p[i], q[i], weights[i]) if i < end else p[i] for i in range(d + 1)]
        fails = [math.prod(1 - a for a in accept[i:]) for i in range(d + 1)]
        count = [fails[i] * (accept[i - 1] if i else 1.0) for i in range(d + 1)]
    return ChainLaw(accept, [e / e.sum() for e in emit], count)


def chain_weights(p: list[Tensor], q: list[Tensor], drafts: list[int]) -> list[float]:
    """w_0 .. w_d of the block rule: w_0 = 1, w_{i+1} = min(1, w_i p_i(x_i) / q_i(x_i))."""
    weights = [1.0]
    for p_i, q_i, x in zip(p, q, drafts, strict=False):
        weights.append(accept_probability(weights[-1] * float(p_i[x]), float(q_i[x])))
    return weights


def block_odds(weight: float, p: Tensor, q: Tensor | None) -> tuple[float, float]:
    """(a, b) such that the block rule lets the drafts before a row stand with probability a / b; `q` is None for the row
    behind the last draft. A weight of 1 always stands (where p = q too: 0 / 0 is 1)."""
    if q is None or weight >= 1:
        return weight, 1.0
    z = float(excess(p, q, weight).sum())
    return z, z + (1 - weight)


@dataclass
class _Request:
    """One request's rows, drafts and random numbers."""

    index: int
    start: int
    count: int
    params: RowParams
    anchor: int
    target: Tensor
    is_probs: bool
    draft_tokens: Tensor
    source: DraftSource
    filter_order: str
    emit_bonus: bool

    @property
    def vocab(self) -> int:
        return self.target.shape[1]

    @property
    def greedy(self) -> bool:
        return self.params.greedy and not self.is_probs

    def raw_row(self, i: int) -> Tensor:
        return self.target[self.start + self.index + i]

    def row(self, i: int) -> TargetRow:
        return target_row(self.raw_row(i), self.params, self.filter_order, self.is_probs)

    def draft(self, i: int) -> int:
        return int(self.draft_tokens[self.start + i])

    def draft_row(self, i: int) -> DraftRow:
        return self.source.row(self.start + i, self.index, self.draft(i))

    def coin(self, i: int) -> float:
        return rng.coin(self.params.seed, self.anchor, i)

    def noise(self, i: int) -> Tensor:
        return rng.race_noise(self.params.seed, self.anchor + i, rng.STREAM_SAMPLE, 0, self.vocab)

    def drawn_status(self, i: int) -> int:
        return sampled_probs_status(self.raw_row(i)) if self.is_probs else 0


class _Outcome(NamedTuple):
    accepted: int
    token: int | None
    """after the accepted drafts; None where nothing is emitted there"""
    rows: list[TargetRow]
    """the target rows of the emitted tokens, at least"""
    status: int
    margin: float


def _token_or_coupled(r: _Request, rule: str) -> _Outcome:
    """Row by row until one rejects."""
    state, margin, rows = 0, math.inf, []
    for i in range(r.count + 1):
        if i == r.count and not r.emit_bonus:
            return _Outcome(i, None, rows, state, margin)
        row = r.row(i)
        rows.append(row)
        state |= row.nucleus.status
        margin = min(margin, row.nucleus.margin)
        if row.nucleus.status & STATUS_EMPTY_ROW:
            return _Outcome(i, 0, rows, state, margin)
        x = r.draft(i) if i < r.count else None
        placeholder = x is not None and not 0 <= x < r.vocab
        if placeholder:
            state |= STATUS_PLACEHOLDER
        if x is None or rule == "coupled" or r.greedy or placeholder:
            token, gap = race(row.p, r.noise(i))
            margin = min(margin, gap)
            state |= r.drawn_status(i)
            if token != x or not bool(row.p[token] > 0):
                return _Outcome(i, token, rows, state, margin)
            continue
        q, q_margin = r.draft_row(i)
        margin = min(margin, q_margin)
        if q is None or not q[x] > 0:
            state |= STATUS_BAD_Q_ROW if q is None else STATUS_ZERO_Q
            token, gap = race(row.p, r.noise(i))
            return _Outcome(i, token, rows, state | r.drawn_status(i), min(margin, gap))
        p_x, q_x, coin = float(row.p[x]), float(q[x]), r.coin(i)
        if p_x > 0:
            margin = min(margin, abs(math.log(coin) + math.log(q_x) - math.log(p_x)) / 2)
        if not accepts(coin, p_x, q_x):
            token, gap = race_residual(row.p, q, r.noise(i))
            return _Outcome(i, token, rows, state | r.drawn_status(i), min(margin, gap))
    raise AssertionError("the bonus row ends every chain")


def _block_margin(coin: float, ratio: float, p: Tensor, q: Tensor | None, accepted: int) -> float:
    """Relative error of the probabilities that turns the test of `accepted` drafts, whose weight is min(1, `ratio`): the
    weight may be wrong by two errors a draft, each term of the residual's mass by one more on either side."""
    w = min(1.0, ratio)
    mass = 1.0 if q is None else float(excess(p, q, w).sum())
    if w == 1:  # a weight just below 1 fails where the coin is near 1 and little is left of p - q
        return (ratio - 1 + mass * (1 - coin)) / (2 * accepted)
    if q is None:
        return abs(w - coin) / (2 * accepted * w)
    each = (2 * accepted + 1) * w * p + finite(q)
    signed = w * p - finite(q)
    if not mass > 0:  # the first token to be left over after all
        return float((-signed / each)[p > 0].min())
    error = float(each[(signed > -1e-3 * each) & (p > 0)].sum())  # tokens at the edge count as well
    return abs(mass - coin * (mass + 1 - w)) / ((1 - coin) * error + coin * 2 * accepted * w)


def _block(r: _Request) -> _Outcome:
    """Forward for the weights, as long as they are positive; then back from the last row to the first that stands."""
    margin, rows, q, states, weights, ratios = math.inf, [], [], [], [1.0], [1.0]
    end = 0
    while True:
        row = r.row(end)
        rows.append(row)
        margin = min(margin, row.nucleus.margin)
        states.append(row.nucleus.status)
        x = r.draft(end) if end < r.count else None
        if x is None or row.nucleus.status & STATUS_EMPTY_ROW:
            break
        if not 0 <= x < r.vocab:
            states[-1] |= STATUS_PLACEHOLDER
            break
        q_row, q_margin = r.draft_row(end)
        margin = min(margin, q_margin)
        if q_row is None or not q_row[x] > 0:
            states[-1] |= STATUS_BAD_Q_ROW if q_row is None else STATUS_ZERO_Q
            break
        q.append(q_row)
        ratios.append(weights[-1] * float(row.p[x]) / float(q_row[x]))
        weights.append(min(1.0, ratios[-1]))
        if weights[-1] == 0:  # so are all that follow, and none of them stands
            break
        end += 1

    accepted = len(weights) - 1
    while accepted:
        w, p = weights[accepted], rows[accepted].p if accepted < len(rows) else None
        q_row = q[accepted] if accepted < len(q) else None
        if w > 0:
            a, b = block_odds(w, p, q_row)
            coin = r.coin(accepted - 1)
            margin = min(margin, _block_margin(coin, ratios[accepted], p, q_row, accepted))
            if accepts(coin, a, b):
                break
        accepted -= 1
    state = 0
    for i in range(accepted + 1):
        state |= states[i]
    if states[accepted] & STATUS_EMPTY_ROW:
        return _Outcome(accepted, 0, rows, state, margin)
    p, noise = rows[accepted].p, r.noise(accepted)
    if accepted < len(q):
        token, gap = race_residual(p, q[accepted], noise, weights[accepted], 2 * accepted + 1)
    else:
        token, gap = race(p, noise)
    return _Outcome(accepted, token, rows, state | r.drawn_status(accepted), min(margin, gap))


def verify_chain(
    target_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_num_draft: Tensor,
    params,
    position: Tensor | None = None,
    *,
    draft_logits: Tensor | None = None,
    draft_rows: Tensor | None = None,
    draft_nucleus: Nucleus | None = None,
    draft_probs: Tensor | None = None,
    draft_params=None,
    target_to_draft: Tensor | None = None,
    target_probs: Tensor | None = None,
    rule: str = "token",
    max_draft: int | None = None,
    emit_bonus: bool = True,
    filter_order: str = "hf",
) -> VerifyResult:
    """One speculative step of B requests; arguments as `specdec_kernels.verify_chain`."""
    if rule not in RULES:
        raise ValueError(f"rule must be one of {RULES}, got {rule!r}")
    if (target_logits is None) == (target_probs is None):
        raise ValueError("exactly one of target_logits and target_probs must be given")
    if draft_logits is not None and (draft_probs is not None or draft_params is None):
        raise ValueError("draft_logits needs draft_params and excludes draft_probs")
    if rule == "block" and not emit_bonus:
        raise ValueError("emit_bonus=False needs rule 'token' or 'coupled': block verification of a part is biased")
    target = target_logits if target_logits is not None else target_probs
    vocab, num_rows = target.shape[1], target.shape[0]
    offsets = [int(v) for v in cu_num_draft]
    B, D = len(offsets) - 1, draft_tokens.numel()
    if max_draft is None:
        max_draft = min(max([0, *(offsets[b + 1] - offsets[b] for b in range(B))]), D)
    source = DraftSource(
        vocab, draft_logits, draft_rows, draft_nucleus, draft_probs, draft_params, target_to_draft, filter_order
    )

    tokens = torch.full((B, max_draft + 1), -1, dtype=torch.int32)
    logprobs = torch.zeros(B, max_draft + 1, dtype=torch.float64)
    fields = torch.zeros(3, B, max_draft + 1, dtype=torch.float64)
    num_accepted, num_emitted, status = (torch.zeros(B, dtype=torch.int32) for _ in range(3))
    margins = torch.full((B,), math.inf, dtype=torch.float64)

    for b in range(B):
        start = min(max(offsets[b], 0), D)
        end = min(max(offsets[b + 1], start), D)
        d = min(end - start, max_draft, num_rows - 1 - start - b)
        if d < 0:  # not even one row is there
            tokens[b, 0], num_emitted[b], status[b], logprobs[b, 0] = 0, 1, STATUS_BAD_OFFSETS, -math.inf
            fields[:, b, 0] = torch.tensor([math.inf, -math.inf, -math.inf], dtype=torch.float64)
            continue
        request = _Request(
            index=b,
            start=start,
            count=d,
            params=request_params(params, b),
            anchor=int(position[b]) if position is not None else 0,
            target=target,
            is_probs=target_probs is not None,
            draft_tokens=draft_tokens,
            source=source,
            filter_order=filter_order,
            emit_bonus=emit_bonus,
        )
        if rule == "block" and not request.greedy and not source.deterministic(b):
            out = _block(request)
        else:  # with one-hot q the block rule has the law of the token rule
            out = _token_or_coupled(request, "coupled" if rule == "coupled" else "token")
        emitted = [request.draft(i) for i in range(out.accepted)]
        if out.token is not None:
            emitted.append(out.token)
        for i, token in enumerate(emitted):
            tokens[b, i] = token
            p_x = float(out.rows[i].p[token])
            logprobs[b, i] = math.log(p_x) if p_x > 0 else -math.inf
            fields[:, b, i] = torch.tensor(out.rows[i].nucleus[:3], dtype=torch.float64)
        num_accepted[b], num_emitted[b], margins[b] = out.accepted, len(emitted), out.margin
        whole = (start, start + d) == (offsets[b], offsets[b + 1])
        status[b] = out.status | (0 if whole else STATUS_BAD_OFFSETS)
    return VerifyResult(tokens, num_accepted, num_emitted, status, logprobs, Nucleus(*fields), margins)
