"""A second implementation of `sample` and `verify_chain`, written from the README's semantics alone (numpy, scalar loops,
sorting, linear search), against the oracle on random small calls full of hostile values.

Where the semantics leave a choice open, the comment "choice:" marks it; there the oracle's behaviour is pinned.
"""

import functools
import math
import random
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import pytest
import torch

from python_ref import Nucleus, SamplingParams, rng, sample, verify_chain

INF, NAN = math.inf, math.nan
GREEDY_BELOW = float(np.float32(1e-5))  # temperatures are float32, and so is the bound
EMPTY_ROW, NAN_SEEN, ZERO_Q, BAD_Q_ROW, PLACEHOLDER, BAD_OFFSETS = 1, 2, 4, 8, 16, 32
UNDECIDED = 1e-9
"""A margin below this may be decided either way by float64 rounding."""

# --- the second implementation -----------------------------------------------------------------------------------------


def philox(seed: int, position: int, stream: int, id_: int, blocks: int) -> np.ndarray:
    u64, low = np.uint64, np.uint64(0xFFFFFFFF)
    words = [int(seed) % 2**64, int(position) % 2**64]
    c = np.empty((blocks, 4), np.uint64)
    c[:, 0], c[:, 1], c[:, 2], c[:, 3] = (
        np.arange(blocks),
        words[1] % 2**32,
        words[1] // 2**32,
        (stream + 256 * id_) % 2**32,
    )
    key = [words[0] % 2**32, words[0] // 2**32]
    for _ in range(10):
        x, y = c[:, 0] * u64(0xD2511F53), c[:, 2] * u64(0xCD9E8D57)
        high = [v >> u64(32) for v in (x, y)]
        c = np.stack([high[1] ^ c[:, 1] ^ u64(key[0]), y & low, high[0] ^ c[:, 3] ^ u64(key[1]), x & low], 1)
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return c.ravel()


def uniforms(words: np.ndarray) -> np.ndarray:
    u = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    return np.minimum(u, np.float32(1 - 2**-24)).astype(np.float64)


def exponentials(seed, position, stream, id_, vocab) -> np.ndarray:
    return -np.log1p(-uniforms(philox(seed, position, stream, id_, (vocab + 3) // 4))[:vocab])


def winner(weights: np.ndarray, e: np.ndarray) -> int:
    """argmin e_v / w_v over positive weights, lowest id first; 0 if there are none."""
    best, token = None, 0
    for v, w in enumerate(weights):
        if w > 0:
            finish = math.log(e[v]) - math.log(w)  # in logs: e / w overflows where w is subnormal
            if best is None or finish < best:
                best, token = finish, v
    return token


@dataclass
class Row:
    """A filtered row: its probabilities, its three numbers and its status bits."""

    p: np.ndarray
    nucleus: tuple = (0.0, 0.0, 0.0)
    status: int = 0


def filter_row(logits: np.ndarray, request: dict, order: str) -> Row:
    z = np.where(np.isnan(logits), -INF, logits.astype(np.float64))
    status = NAN_SEEN if np.isnan(logits).any() else 0
    top = z.max(initial=-INF)
    if top == -INF:
        return Row(np.zeros(len(z)), (INF, -INF, -INF), status | EMPTY_ROW)
    t = request["temperature"]
    if not t >= GREEDY_BELOW:  # choice: a negative or NaN temperature that nobody refused is greedy
        return Row((np.arange(len(z)) == np.argmax(z)).astype(float), (top, top, 0.0), status)
    x = np.full(len(z), 0.0)
    below = z < top
    gap = z[below] - top
    x[below] = np.where(gap == -INF, -INF, gap / t if t < INF else 0.0)
    w = np.exp(x)
    ranks = np.argsort(-z, kind="stable")
    sorted_z, sorted_w = z[ranks], w[ranks]

    def up_to_ties(i: int) -> float:
        return sorted_z[i]

    def mass_from(cut: float) -> float:
        return math.fsum(w[z >= cut])

    # choice: a NaN top_p or min_p is off, as any comparison with it says
    k_cut = up_to_ties(request["top_k"] - 1) if 0 < request["top_k"] < len(z) else -INF
    m_cut = min(z[w >= min(request["min_p"], 1.0)]) if request["min_p"] > 0 else -INF
    p_cut = -INF
    if request["top_p"] < 1:
        base = {"hf": k_cut, "vllm": max(k_cut, m_cut), "joint": -INF}[order]
        goal = max(request["top_p"], 0.0) * mass_from(base)
        running = np.cumsum(sorted_w)
        p_cut = next((c for c in dict.fromkeys(sorted_z) if running[np.count_nonzero(z >= c) - 1] >= goal), -INF)
        p_cut = max(p_cut, base)
    cut = max(k_cut, m_cut, p_cut)
    if top == INF and cut > -INF:
        cut = INF  # choice: what a filter keeps besides the +inf tokens has no probability, so the cutoff is theirs
    log_mass = math.log(mass_from(cut))
    return Row(np.where(z >= cut, np.exp(x - log_mass), 0.0), (cut, top, log_mass), status)


def to_targets(row: np.ndarray, mapping, vocab: int) -> np.ndarray:
    out = np.zeros(vocab)
    for v in range(vocab):
        at = v if mapping is None else int(mapping[v])
        if 0 <= at < len(row):  # choice: without a map a shorter draft row has q = 0 above it, a longer one is cut
            out[v] = row[at]
    return out


def request_of(params, b: int) -> dict:
    s = b if params.slots is None else int(params.slots[b])
    return {name: getattr(params, name)[s].item() for name in ("temperature", "top_p", "top_k", "min_p", "seed")}


def draft_row(c: "Case", j: int, b: int, token: int) -> np.ndarray | None:
    """q over target ids, None where the row is unusable."""
    delta = (np.arange(c.vocab) == token).astype(float)
    if c.draft_logits is None and c.draft_probs is None:
        return delta
    source = numpy(c.draft_probs if c.draft_logits is None else c.draft_logits)
    source = source.reshape(-1, source.shape[-1])
    at = j if c.draft_rows is None else int(c.draft_rows[j])
    if not 0 <= at < len(source):  # choice: an index outside the buffer is an unusable row, of a greedy draft too
        return None
    if c.draft_probs is not None:
        q = to_targets(source[at].astype(np.float64), c.target_to_draft, c.vocab)
        # choice: probabilities are "taken as they are": a NaN elsewhere in the row counts as 0, an all-zero row as q(x) = 0
        return q if math.isfinite(q[token]) else None
    request = request_of(c.draft_params, b)
    if not request["temperature"] >= GREEDY_BELOW:
        return delta
    if c.draft_nucleus is None:
        row = filter_row(source[at], request, c.filter_order)
        return None if row.status else to_targets(row.p, c.target_to_draft, c.vocab)
    cut, top, log_mass = (float(f[j]) for f in c.draft_nucleus)
    if math.isnan(cut) or math.isnan(top) or top == -INF or not math.isfinite(log_mass):
        return None
    q = np.zeros(source.shape[1])
    for v, z in enumerate(source[at].astype(np.float64)):
        if z >= cut:  # choice: with a saved nucleus a NaN logit is -inf, the row is not searched for it
            x = 0.0 if z == top else z - top
            x = x if x == -INF else x / request["temperature"]
            with np.errstate(over="ignore"):  # under the nucleus of another row
                q[v] = np.exp(np.float64(x - log_mass))
    return to_targets(q, c.target_to_draft, c.vocab)


def verify_request(c: "Case", b: int, widest: int) -> dict:
    request = request_of(c.params, b)
    anchor = 0 if c.position is None else int(c.position[b])
    available, rows = len(c.draft_tokens), numpy(c.target)
    # choice: bad offsets are clamped to [0, D] and made non-decreasing; the request's rows start at the clamped offset
    claimed = int(c.cu_num_draft[b]), int(c.cu_num_draft[b + 1])
    start = sorted((0, claimed[0], available))[1]
    end = sorted((start, claimed[1], available))[1]
    d = min(end - start, widest, len(rows) - start - b - 1)
    out = {"tokens": [], "logprobs": [], "nucleus": [], "accepted": 0, "status": 0}
    if claimed != (start, start + d):
        out["status"] |= BAD_OFFSETS
    if d < 0:  # choice: no row at all emits id 0
        return out | {"tokens": [0], "logprobs": [-INF], "nucleus": [(INF, -INF, -INF)], "status": BAD_OFFSETS}

    def emit(token: int, row: Row) -> None:
        out["tokens"].append(token)
        out["logprobs"].append(math.log(row.p[token]) if row.p[token] > 0 else -INF)
        out["nucleus"].append(row.nucleus)

    for i in range(d + 1):
        if i == d and not c.emit_bonus:
            break
        logits = rows[start + b + i]
        if c.is_probs:
            # choice: a row of probabilities is looked at as a whole, and reported, only where a token is drawn from it
            row = Row(np.where(logits > 0, logits, 0).astype(np.float64))
            when_drawn = NAN_SEEN * bool(np.isnan(logits).any()) | EMPTY_ROW * (not row.p.any())
        else:
            row, when_drawn = filter_row(logits, request, c.filter_order), 0
        out["status"] |= row.status
        if row.status & EMPTY_ROW:  # choice: the drafted token of an empty row is not looked at, not even for status
            emit(0, row)
            break
        e = exponentials(request["seed"], anchor + i, 2, 0, c.vocab)
        x = int(c.draft_tokens[start + i]) if i < d else None
        coupled = c.rule == "coupled" or (not c.is_probs and not request["temperature"] >= GREEDY_BELOW)
        weights, accepted = row.p, False
        if x is not None and not 0 <= x < c.vocab:
            out["status"] |= PLACEHOLDER
        elif x is not None and coupled:
            accepted = winner(row.p, e) == x and row.p[x] > 0
        elif x is not None:
            q = draft_row(c, start + i, b, x)
            if q is None or not q[x] > 0:
                out["status"] |= BAD_Q_ROW if q is None else ZERO_Q
            else:
                coin = uniforms(philox(request["seed"], anchor, 1, i, 1)[:1])[0]
                accepted = row.p[x] > 0 and (row.p[x] >= q[x] or coin < row.p[x] / q[x])
                weights = np.array(
                    [max(p_v - (q_v if q_v > 0 else 0.0), 0.0) for p_v, q_v in zip(row.p, q, strict=True)]
                )
                weights = weights if weights.any() else row.p
        if coupled or not accepted:
            out["status"] |= when_drawn
        emit(x if accepted else winner(weights, e), row)
        if not accepted:
            break
        out["accepted"] += 1
    return out


# --- random calls ------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    vocab: int
    target: torch.Tensor
    is_probs: bool
    draft_tokens: torch.Tensor
    cu_num_draft: torch.Tensor
    params: SamplingParams
    position: torch.Tensor | None
    rule: str
    max_draft: int | None
    emit_bonus: bool
    filter_order: str
    draft_logits: torch.Tensor | None = None
    draft_rows: torch.Tensor | None = None
    draft_nucleus: Nucleus | None = None
    draft_probs: torch.Tensor | None = None
    draft_params: SamplingParams | None = None
    target_to_draft: torch.Tensor | None = None

    def call(self):
        options = ("rule", "max_draft", "emit_bonus", "filter_order", "draft_logits", "draft_rows", "draft_nucleus")
        options += ("draft_probs", "draft_params", "target_to_draft")
        target = {"target_probs": self.target} if self.is_probs else {}
        return verify_chain(
            None if self.is_probs else self.target,
            self.draft_tokens,
            self.cu_num_draft,
            self.params,
            self.position,
            **target,
            **{name: getattr(self, name) for name in options},
        )


def numpy(x: torch.Tensor) -> np.ndarray:
    return x.to(torch.float64).numpy()


def random_rows(r: random.Random, rows: int, vocab: int, hostile: float) -> torch.Tensor:
    """Logits with ties, in any dtype, as a strided view between NaN columns."""
    wide = torch.full((rows, vocab + 3), NAN)
    scale = r.choice([0.0, 0.5, 2.0, 8.0])
    values = torch.tensor([[r.gauss(0, scale) for _ in range(vocab)] for _ in range(rows)]).reshape(rows, vocab)
    wide[:, 1 : vocab + 1] = values.round() if r.random() < 0.3 else values
    view = wide.to(r.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64]))[:, 1 : vocab + 1]
    for n in range(rows):
        if r.random() < hostile:
            view[n, r.randrange(vocab)] = r.choice([NAN, INF, -INF, -INF, 1e4])
        if r.random() < hostile / 3:
            view[n] = r.choice([NAN, -INF, INF, 0.0])
    return view


def random_params(r: random.Random, n: int, slots: bool) -> SamplingParams:
    states = n + 2 if slots else n
    column = lambda choices, dtype: torch.tensor([r.choice(choices) for _ in range(states)], dtype=dtype)  # noqa: E731
    return SamplingParams(
        column([0.0, 1e-6, 1e-5, 1e-2, 0.5, 0.8, 1.0, 1.0, 2.0, 1e4, INF, -1.0, NAN], torch.float32),
        column([1.0, 1.0, 1.0, 0.9, 0.5, 0.2, 0.0, -1.0, 3.0, NAN], torch.float32),
        column([0, 0, 0, -1, 1, 2, 3, 1000], torch.int32),
        column([0.0, 0.0, 0.0, 0.05, 0.4, 1.0, 2.0, -1.0, NAN], torch.float32),
        column([0, 1, -1, 2**40 + 3, -(2**63)], torch.int64),
        torch.tensor([r.randrange(states) for _ in range(n)], dtype=torch.int32) if slots else None,
    )


def random_case(seed: int) -> Case:
    r = random.Random(seed)
    batch, vocab, hostile = r.randrange(1, 4), r.choice([1, 2, 3, 4, 5, 9]), r.choice([0.0, 0.1, 0.3])
    lengths = [r.randrange(4) for _ in range(batch)]
    cu = [sum(lengths[:b]) for b in range(batch + 1)]
    total, position = cu[-1], [0, 1, 2**32 - 2, 2**40, -3]
    target = random_rows(r, total + batch + r.randrange(3), vocab, hostile)
    if is_probs := r.random() < 0.15:
        target = target.double().softmax(-1).float() if r.random() < 0.7 else target
    if r.random() < 0.1:  # bad offsets, or rows missing
        cu[r.randrange(batch + 1)] = r.choice([-2, 0, total + 3, 1])
        target = target[: r.randrange(1, len(target) + 1)]
    drafts = [
        r.choice([-1, vocab, 2**31 - 1, -(2**31)]) if r.random() < 0.07 else r.randrange(vocab) for _ in range(total)
    ]
    c = Case(
        vocab,
        target,
        is_probs,
        torch.tensor(drafts, dtype=r.choice([torch.int32, torch.int64])),
        torch.tensor(cu, dtype=torch.int32),
        random_params(r, batch, r.random() < 0.3),
        torch.tensor([r.choice(position) for _ in range(batch)]) if r.random() < 0.8 else None,
        r.choice(["token", "token", "token", "coupled"]),
        r.choice([None, 3, 3, 1, 0, 5]),
        r.random() < 0.8,
        r.choice(["hf", "vllm", "joint"]),
    )
    form = r.choice(["logits", "logits", "nucleus", "probs", "none"])
    draft_vocab = vocab
    if r.random() < 0.25:
        draft_vocab = r.randrange(1, vocab + 2)
        c.target_to_draft = torch.tensor([r.randrange(-1, draft_vocab + 1) for _ in range(vocab)])
    q_rows, buffer = total, r.random() < 0.4
    if buffer:
        q_rows = 2 * 6
        c.draft_rows = torch.tensor(
            [r.randrange(-1, q_rows + 1) if r.random() < 0.1 else r.randrange(q_rows) for _ in range(total)]
        )
    q = random_rows(r, q_rows, draft_vocab, hostile)
    if form != "probs":
        c.draft_params = c.params if r.random() < 0.4 else random_params(r, batch, False)
    if form == "probs":
        c.draft_probs = q.double().softmax(-1).float() if r.random() < 0.8 else q.float()
    elif form in ("logits", "nucleus"):
        c.draft_logits = q
    if form == "nucleus" and total:
        fields = [[], [], []]
        for j in range(total):
            b = max(i for i in range(batch) if sum(lengths[:i]) <= j and lengths[i])
            at = j if c.draft_rows is None else min(max(int(c.draft_rows[j]), 0), q_rows - 1)
            row = filter_row(numpy(q)[at], request_of(c.draft_params, b), c.filter_order)
            for k in range(3):
                fields[k].append(r.choice([NAN, INF, -INF, 0.3]) if r.random() < 0.05 else row.nucleus[k])
        c.draft_nucleus = Nucleus(*(torch.tensor(f, dtype=torch.float64) for f in fields))
    if buffer and form != "none" and r.random() < 0.5:
        name = "draft_probs" if form == "probs" else "draft_logits"
        setattr(c, name, getattr(c, name).reshape(2, 6, draft_vocab))
    return c


@pytest.fixture(autouse=True)
def remembered_words():
    """The calls draw from few seeds and positions: remember the oracle's own Philox blocks (they are most of its time)."""
    real = functools.lru_cache(None)(lambda s, p, st, i, n: original(s, p, st, i, torch.arange(n)))
    original = rng.words
    with patch.object(rng, "words", lambda s, p, st, i, index: real(s, p, st, i, index.numel())):
        yield


def same(a, b) -> bool:
    return np.allclose(np.asarray(a, float), np.asarray(b, float), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("part", range(4))
def test_verify_chain_second_opinion(part):
    undecided, requests, statuses, accepted = 0, 0, 0, set()
    for seed in range(part * 600, (part + 1) * 600):
        c = random_case(seed)
        out = c.call()
        widest = c.max_draft if c.max_draft is not None else max(0, *np.diff(c.cu_num_draft.numpy()))
        widest = widest if c.max_draft is not None else min(widest, c.draft_tokens.numel())
        assert out.tokens.shape == (len(c.cu_num_draft) - 1, widest + 1), seed
        for b in range(out.tokens.shape[0]):
            requests += 1
            if float(out.margin[b]) < UNDECIDED:
                undecided += 1
                continue
            mine, n = verify_request(c, b, widest), int(out.num_emitted[b])
            pad = out.tokens.shape[1] - len(mine["tokens"])
            assert out.tokens[b].tolist() == mine["tokens"] + [-1] * pad, (seed, b)
            assert n == len(mine["tokens"]), (seed, b)
            assert int(out.num_accepted[b]) == mine["accepted"], (seed, b)
            assert int(out.status[b]) == mine["status"], (seed, b)
            assert same(out.logprobs[b], mine["logprobs"] + [0.0] * pad), (seed, b)
            assert same(torch.stack(list(out.nucleus), -1)[b], mine["nucleus"] + [(0, 0, 0)] * pad), (seed, b)
            statuses |= mine["status"]
            accepted.add(mine["accepted"])
    assert statuses == 63  # every status bit came up
    assert accepted >= {0, 1, 2, 3}
    assert undecided <= 0.005 * requests


def test_sample_second_opinion():
    undecided, compared = 0, 0
    for seed in range(600):
        r = random.Random(10_000 + seed)
        n, vocab, batch, order = (
            r.randrange(1, 4),
            r.choice([1, 2, 3, 5, 9]),
            r.randrange(1, 4),
            r.choice(["hf", "vllm", "joint"]),
        )
        logits, params = random_rows(r, n, vocab, 0.15), random_params(r, batch, r.random() < 0.3)
        rows = torch.tensor([r.randrange(batch) for _ in range(n)])
        position = torch.tensor([r.choice([0, 7, 2**33, -2]) for _ in range(n)]) if r.random() < 0.8 else None
        ids = torch.tensor([r.choice([0, 1, 255]) for _ in range(n)]) if r.random() < 0.5 else None
        stream = r.choice([0, 2])
        mapping = (
            torch.tensor([r.randrange(-1, vocab + 1) for _ in range(r.choice([1, 4, 11]))])
            if r.random() < 0.4
            else None
        )
        out = sample(
            logits, params, position, rows=rows, stream=stream, ids=ids, target_to_draft=mapping, filter_order=order
        )
        for i in range(n):
            if float(out.margin[i]) < UNDECIDED:
                undecided += 1
                continue
            compared += 1
            request = request_of(params, int(rows[i]))
            row = filter_row(numpy(logits)[i], request, order)
            p = row.p
            if not request["temperature"] >= GREEDY_BELOW and mapping is not None:
                # choice: greedy under a map is the lowest *target* id of the maximum, like every other tie
                z = np.nan_to_num(numpy(logits)[i], nan=-INF, posinf=INF, neginf=-INF)
                p = to_targets((z == z.max()) * (z.max() > -INF), mapping.tolist(), len(mapping))
                p = (np.arange(len(p)) == p.argmax()) * p
            elif mapping is not None:
                p = to_targets(p, mapping.tolist(), len(mapping))
            pos, id_ = 0 if position is None else int(position[i]), 0 if ids is None else int(ids[i])
            token = winner(p, exponentials(request["seed"], pos, stream, id_, len(p)))
            assert int(out.tokens[i]) == token, (seed, i)
            assert same(out.logprobs[i], math.log(p[token]) if p[token] > 0 else -INF), (seed, i)
            # choice: a row whose whole mass lies outside the map is an empty row
            assert int(out.status[i]) == row.status | (0 if p.any() else EMPTY_ROW), (seed, i)
            assert same([f[i] for f in out.nucleus], row.nucleus), (seed, i)
    assert compared > 1000
    assert undecided <= 0.01 * compared


@pytest.mark.parametrize("rule", ["token", "coupled"])
def test_errors_below_the_margin_never_change_the_output(rule):
    """p and q off by less than the margin, each entry its own way; well beyond it outputs do change."""
    r, changed_beyond, tried = random.Random(5), 0, 0
    for _ in range(150):
        d, vocab = 2, 5
        p, q = (
            torch.tensor([[r.gauss(0, 1) for _ in range(vocab)] for _ in range(n)]).double().softmax(-1)
            for n in (d + 1, d)
        )
        drafts, offsets = torch.tensor([r.randrange(vocab) for _ in range(d)]), torch.tensor([0, d])
        column = torch.ones(1)
        params = SamplingParams(column, column, column.int() * 0, column * 0, torch.tensor([r.choice([0, 1, 2, 3])]))

        def call(p, q):
            out = verify_chain(None, drafts, offsets, params, draft_probs=q, target_probs=p, rule=rule)  # noqa: B023
            return out.tokens.tolist(), float(out.margin)

        def off(x, size):
            signs = torch.tensor([r.choice([-1.0, 1.0]) for _ in range(x.numel())], dtype=torch.float64)
            return x * torch.exp(size * signs.reshape(x.shape))

        tokens, margin = call(p, q)
        if margin > 0.1:  # margins are of first order
            continue
        tried += 1
        for _ in range(6):
            assert call(off(p, 0.9 * margin), off(q, 0.9 * margin))[0] == tokens
        changed_beyond += any(call(off(p, 3 * margin), off(q, 3 * margin))[0] != tokens for _ in range(6))
    assert tried > 15
    assert changed_beyond > 0.5 * tried
