"""Exact laws of small random programs: enumerate every draw instead of sampling it.

`explore` runs a function once per sequence of choices and adds up the weights, so a law comes out exact to float64
rounding. `scripted` hands it the random decisions of the oracle's own functions (each race, each accept test), so that
what is enumerated is the oracle's control flow and not a model of it. The rest are the exact laws to compare with, written
from the definitions and sharing no code with the oracle. Works for any rule: add its decision to `scripted`.
"""

import importlib
import itertools
import math
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import torch

from python_ref import Nucleus, SamplingParams, rng, sample, verify_chain
from python_ref.nucleus import row_nucleus, row_probs
from python_ref.params import request_params
from python_ref.rows import accept_probability
from python_ref.sample import to_target_vocab
from python_ref.verify_chain import chain_law

TOLERANCE = 1e-12
"""Total variation below which two enumerated laws are the same law."""


def explore(run) -> dict:
    """Law of `run(choose)`, where each `choose(weights)` picks an index with probability proportional to its weight."""
    law = defaultdict(float)
    scripts = [()]
    while scripts:
        script, taken, weight = scripts.pop(), [], 1.0

        def choose(weights) -> int:
            nonlocal weight
            weights = [float(w) for w in weights]
            open_ = [i for i, w in enumerate(weights) if w > 0]
            if len(taken) < len(script):  # noqa: B023
                pick = script[len(taken)]  # noqa: B023
            else:
                pick = open_[0]
                scripts.extend((*taken, other) for other in open_[1:])  # noqa: B023
            taken.append(pick)  # noqa: B023
            weight *= weights[pick] / math.fsum(weights)
            return pick

        outcome = run(choose)  # before `weight` is read: the call multiplies it
        law[outcome] += weight
    return dict(law)


@contextmanager
def replaced_in_oracle(race_noise, coin, **decisions):
    """Inside, the oracle's `race`, `accepts`, `picks` and its sources of noise are the ones given."""
    # importlib: the package's functions hide its modules of the same name.
    names = ("sample", "rows", "verify_chain", "verify_tree", "lossy")
    modules = [importlib.import_module(f"python_ref.{m}") for m in names]
    with ExitStack() as stack:
        for module in modules:
            for name in decisions.keys() & vars(module).keys():
                stack.enter_context(patch.object(module, name, decisions[name]))
        stack.enter_context(patch.object(rng, "race_noise", race_noise))
        stack.enter_context(patch.object(rng, "coin", coin))
        yield


def scripted(choose):
    """Inside, the oracle's ops take every random decision from `choose`, with the probabilities that the decision has over
    its own noise: the race picks token v with weight[v], the accept test passes with `accept_probability`. That real noise
    has these laws is shown apart (`test_real_noise_*`, `test_accept_set_*`)."""

    def race(weights, noise, condition=None):
        if not (weights > 0).any():
            return 0, math.inf
        return choose(weights.clamp_min(0.0).tolist()), math.inf

    def accepts(coin, p_x, q_x):
        a = accept_probability(p_x, q_x)
        return choose([1.0 - a, a]) == 1

    def picks(coin, masses):
        return choose([*masses, max(0.0, 1.0 - math.fsum(masses))])

    no_noise = lambda seed, position, stream, id, vocab: torch.ones(vocab, dtype=torch.float64)  # noqa: E731
    no_coin = lambda seed, anchor, offset: 0.5  # noqa: E731
    return replaced_in_oracle(no_noise, no_coin, race=race, accepts=accepts, picks=picks)


def total_variation(a: dict, b: dict) -> float:
    return 0.5 * math.fsum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in a.keys() | b.keys())


def marginal(law: dict, of) -> dict:
    """Law of `of(outcome)`."""
    out = defaultdict(float)
    for outcome, weight in law.items():
        out[of(outcome)] += weight
    return dict(out)


class Table:
    """Logits that depend on the whole prefix: float64 [V], a fixed function of (seed, prefix). With `steps` they are
    rounded to multiples of 1 / steps, so that ties are common."""

    def __init__(self, vocab: int, seed: int, scale: float = 1.0, steps: int | None = None):
        self.vocab, self.seed, self.scale, self.steps = vocab, seed, scale, steps
        self._rows = {}

    def __call__(self, prefix: tuple) -> torch.Tensor:
        if prefix not in self._rows:
            generator = torch.Generator().manual_seed(
                hash((self.seed, *prefix)) % 2**63
            )  # hash of ints: the same in every process
            row = torch.randn(self.vocab, generator=generator, dtype=torch.float64) * self.scale
            self._rows[prefix] = row if self.steps is None else (row * self.steps).round() / self.steps
        return self._rows[prefix]


def filtered_probs(logits, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, order="hf") -> list[float]:
    """A filtered distribution from set definitions, O(V^2) and without sorting or cutoffs: top-k keeps v if fewer than k
    values beat it, top-p if the mass that beats it is short of p, min-p if it reaches that share of the maximum. (At
    exact equality of a mass and p the rounding of the masses decides.)"""
    z = [-math.inf if math.isnan(v) else float(v) for v in logits]
    top, everything = max(z, default=-math.inf), range(len(z))
    if top == -math.inf:
        return [0.0] * len(z)
    if temperature < 1e-5:
        return [float(v == z.index(top)) for v in everything]
    w = [1.0 if v == top else 0.0 if v - top == -math.inf else math.exp((v - top) / temperature) for v in z]

    def with_top_k(kept):
        if not 0 < top_k < len(z):
            return kept
        return {v for v in kept if sum(z[u] > z[v] for u in kept) < top_k}

    def with_top_p(kept):
        if top_p >= 1:
            return kept
        goal = max(top_p, 0.0) * math.fsum(w[u] for u in kept)
        return {v for v in kept if z[v] == top or math.fsum(w[u] for u in kept if z[u] > z[v]) < goal}

    def with_min_p(kept):
        return {v for v in kept if min_p <= 0 or w[v] >= min(min_p, 1.0)}

    kept = set(everything)
    if order == "hf":
        kept = with_min_p(with_top_p(with_top_k(kept)))
    elif order == "vllm":
        kept = with_top_p(with_top_k(with_min_p(kept)))
    else:
        kept = with_top_k(kept) & with_top_p(kept) & with_min_p(kept)
    total = math.fsum(w[v] for v in kept)
    return [w[v] / total if v in kept else 0.0 for v in everything]


def text_law(p, length: int, prefix: tuple = ()) -> dict:
    """Law of the next `length` tokens after `prefix` under plain sampling; `p(prefix)` is the next token's distribution."""
    law = {(): 1.0}
    for _ in range(length):
        law = {
            (*text, v): weight * w for text, weight in law.items() for v, w in enumerate(p((*prefix, *text))) if w > 0
        }
    return law


def completed(law: dict, p, length: int, prefix: tuple = (), tokens=lambda outcome: outcome[0]) -> dict:
    """Law of the first `length` tokens when each outcome's tokens are continued by plain sampling. Comparing completed
    texts compares the joint law of all positions, whatever number of tokens a step emitted."""
    out = defaultdict(float)
    for outcome, weight in law.items():
        text = tokens(outcome)[:length]
        for rest, w in text_law(p, length - len(text), (*prefix, *text)).items():
            out[(*text, *rest)] += weight * w
    return dict(out)


def steps_law(step, length: int) -> dict:
    """Law of (first `length` tokens, number of steps) of repeated steps; `step(prefix)` is one step's law over tuples of
    tokens. Steps are taken as independent given the text: that is what distinct random keys license."""
    done, running, laws = defaultdict(float), {((), 0): 1.0}, {}
    while running:
        following = defaultdict(float)
        for (text, count), weight in running.items():
            if text not in laws:
                laws[text] = step(text)
            for emitted, w in laws[text].items():
                longer = (text + emitted)[:length]
                (done if len(longer) == length else following)[longer, count + 1] += weight * w
        running = following
    return dict(done)


def draft_law(q, length: int, prefix: tuple = (), goes_on=None) -> dict:
    """Law of the drafts of one step. Drafting stops early where `goes_on(drafts so far)` is false: a length that a draft's
    own value cannot influence (non-anticipating)."""
    law, done = {(): 1.0}, defaultdict(float)
    for _ in range(length):
        following = {}
        for drafts, weight in law.items():
            if goes_on is not None and not goes_on(drafts):
                done[drafts] += weight
                continue
            following |= {(*drafts, v): weight * w for v, w in enumerate(q((*prefix, *drafts))) if w > 0}
        law = following
    return dict(done) | law


def token_rule_law(p, q, drafts: dict, prefix: tuple = (), emit_bonus: bool = True) -> dict:
    """Joint law of (emitted tokens, accepted count) of the token rule in closed form, without residuals or ratios:
    P(X^i = x, i accepted) = prod min(p, q), and the token after them has mass p(y) - min(p(y), q(y)) where it is not the
    bonus. `drafts` gives the draft paths (only their lengths matter; each path's weight must come from q)."""
    law = defaultdict(float)

    def walk(path: tuple, weight: float) -> None:
        here = (*prefix, *path)
        goes_on = any(len(d) > len(path) and d[: len(path)] == path for d in drafts)
        if not goes_on and not emit_bonus:
            law[path, len(path)] += weight
            return
        q_row = q(here) if goes_on else [0.0] * len(p(here))
        for y, (p_y, q_y) in enumerate(zip(p(here), q_row, strict=True)):
            both = min(p_y, q_y)
            if p_y > both:
                law[(*path, y), len(path)] += weight * (p_y - both)
            if both > 0:
                walk((*path, y), weight * both)

    walk((), 1.0)
    return dict(law)


def block_rule_law(p, q, drafts: dict, prefix: tuple = ()) -> dict:
    """The block rule's joint law in closed form, without its acceptance probabilities: the drafts x have Q(x), and of it
    A(x) is accepted at least so far: A(()) = 1, A(x y) = min(Q(x) q(y), A(x) p(y)). Exactly i drafts and then y have the mass
    A(x) p(y) - A(x y)."""
    law = defaultdict(float)

    def walk(path: tuple, drafted: float, accepted: float) -> None:
        here = (*prefix, *path)
        goes_on = any(len(d) > len(path) and d[: len(path)] == path for d in drafts)
        q_row = q(here) if goes_on else [0.0] * len(p(here))
        for y, (p_y, q_y) in enumerate(zip(p(here), q_row, strict=True)):
            both = min(drafted * q_y, accepted * p_y)
            if accepted * p_y > both:
                law[(*path, y), len(path)] += accepted * p_y - both
            if q_y > 0:
                walk((*path, y), drafted * q_y, both)

    walk((), 1.0, 1.0)
    return dict(law)


def expected_accepted(law: dict) -> float:
    return math.fsum(weight * accepted for (_, accepted), weight in law.items())


def chain_step_law(law_of, drafts: dict, emit_bonus: bool = True) -> dict:
    """The same joint law from acceptance probabilities and emission rows: `law_of(drafts)` returns a `ChainLaw`."""
    out = defaultdict(float)
    for path, weight in drafts.items():
        chain = law_of(path)
        for i, (count, emit) in enumerate(zip(chain.count, chain.emit, strict=True)):
            if i == len(path) and not emit_bonus:
                out[path, i] += weight * count
                continue
            for y, w in enumerate(emit.tolist()):
                if w * count != 0:
                    out[(*path[:i], y), i] += weight * count * w
    return dict(out)


def product_law(laws: list[dict]) -> dict:
    """Law of independent outcomes, as tuples."""
    out = {}
    for combination in itertools.product(*(law.items() for law in laws)):
        out[tuple(outcome for outcome, _ in combination)] = math.prod(weight for _, weight in combination)
    return out


# --- a target, a drafter and one step of the oracle's own functions ---


def make_params(requests: list[dict], seeds=None) -> SamplingParams:
    column = lambda name, off, dtype: torch.tensor([r.get(name, off) for r in requests], dtype=dtype)  # noqa: E731
    return SamplingParams(
        column("temperature", 1.0, torch.float32),
        column("top_p", 1.0, torch.float32),
        column("top_k", 0, torch.int32),
        column("min_p", 0.0, torch.float32),
        torch.tensor(seeds if seeds is not None else [0] * len(requests), dtype=torch.int64),
    )


@dataclass
class World:
    """A target, a drafter and the step between them. `target(context)` and `draft(context)` give raw logits, where the
    context is the text so far and the drafts after it."""

    target: object
    draft: object
    d: int = 2
    filters: dict | None = None
    draft_filters: dict | None = None
    order: str = "hf"
    q_form: str = "logits"  # logits, nucleus, probs, none (the drafter then takes its argmax)
    target_to_draft: list[int] | None = None
    emit_bonus: bool = True
    goes_on: object = lambda context: True  # is there a draft after this context?
    mishap: object = lambda context: (
        None
    )  # placeholder, too_large, zero_q, nan_row, empty_row: what the drafter does wrong

    @property
    def stochastic(self) -> bool:
        """Whether rules differ: neither drafts nor target are one-hot."""
        greedy = {"temperature": 0.0}.items()
        return self.q_form != "none" and not any(
            greedy <= (f or {}).items() for f in (self.filters, self.draft_filters)
        )

    def p(self, context) -> list[float]:
        filters = {k: float(np.float32(v)) for k, v in (self.filters or {}).items()}
        return filtered_probs(self.target(context).tolist(), order=self.order, **filters)

    def q(self, context) -> list[float]:
        filters = {k: float(np.float32(v)) for k, v in (self.draft_filters or {}).items()}
        if self.q_form == "none":
            filters = {"temperature": 0.0}
        q = filtered_probs(self.draft(context).tolist(), order=self.order, **filters)
        return q if self.target_to_draft is None else [q[i] if i >= 0 else 0.0 for i in self.target_to_draft]

    def usable(self, prefix):
        return lambda drafts: self.goes_on((*prefix, *drafts)) and self.mishap((*prefix, *drafts)) is None

    def exact(self, prefix=(), rule="token") -> dict:
        drafts = draft_law(self.q, self.d, prefix, self.usable(prefix))
        if rule == "block" and self.stochastic:
            return block_rule_law(self.p, self.q, drafts, prefix)
        return token_rule_law(self.p, self.q, drafts, prefix, self.emit_bonus)


def draw_drafts(world: World, prefix, choose):
    """One request's drafts from the real `sample`: (tokens, logits rows, saved nuclei)."""
    params = make_params([world.draft_filters or {}])
    mapping = None if world.target_to_draft is None else torch.tensor(world.target_to_draft)
    tokens, rows, nuclei = [], [], []
    while len(tokens) < world.d and world.goes_on((*prefix, *tokens)):
        context = (*prefix, *tokens)
        row = world.draft(context)
        out = sample(
            row[None],
            params,
            stream=0,
            ids=torch.tensor([len(tokens)]),
            target_to_draft=mapping,
            filter_order=world.order,
        )
        mishap, token = world.mishap(context), int(out.tokens)
        if world.q_form == "probs":
            token = choose(world.q(context))
        elif world.q_form == "none":
            token = int(row.argmax())
        if mishap is None:
            tokens.append(token), rows.append(row), nuclei.append(out.nucleus)
            continue
        row = row.clone()
        bad = {"placeholder": -1, "too_large": len(world.p(context)) + 7}.get(mishap, 1)
        row[1 if mishap == "zero_q" else slice(None)] = {"nan_row": math.nan}.get(mishap, -math.inf)
        # What follows looks good and must not count: the chain ends at the mishap.
        spoiled = [bad] + [0] * (world.d - len(tokens) - 1)
        rows += [row] + [world.draft(context)] * (len(spoiled) - 1)
        return tokens + spoiled, rows, nuclei + [out.nucleus] * len(spoiled)
    return tokens, rows, nuclei


def real_step(worlds: list[World], prefix=(), rule="token", length_of=len) -> dict:
    """Law of the outcomes (tokens, accepted) of all requests of one call of the real functions."""
    first = worlds[0]

    def run(choose):
        with scripted(choose):
            drawn = [draw_drafts(w, prefix, choose) for w in worlds]
            drawn = [tuple(part[: length_of(one[0])] for part in one) for one in drawn]
            target = [
                w.target((*prefix, *tokens[:i]))
                for w, (tokens, _, _) in zip(worlds, drawn, strict=True)
                for i in range(len(tokens) + 1)
            ]
            tokens, rows, nuclei = ([item for one in drawn for item in one[k]] for k in range(3))
            rows = torch.stack(rows) if rows else torch.zeros(0, first.draft(prefix).numel(), dtype=torch.float64)
            q = {}
            if first.q_form in ("logits", "nucleus"):
                q = {"draft_logits": rows, "draft_params": make_params([w.draft_filters or {} for w in worlds])}
            if first.q_form == "nucleus":
                q["draft_nucleus"] = Nucleus(
                    *(torch.tensor([n[k] for n in nuclei], dtype=torch.float64) for k in range(3))
                )
            if first.q_form == "probs":
                dense = [filtered_probs(r.tolist(), order=first.order, **(first.draft_filters or {})) for r in rows]
                q = {"draft_probs": torch.tensor(dense, dtype=torch.float64).reshape(rows.shape)}
            out = verify_chain(
                torch.stack(target),
                torch.tensor(tokens, dtype=torch.int64),
                torch.tensor([0, *np.cumsum([len(one[0]) for one in drawn])]),
                make_params([w.filters or {} for w in worlds]),
                target_to_draft=None if first.target_to_draft is None else torch.tensor(first.target_to_draft),
                max_draft=max(w.d for w in worlds),
                emit_bonus=first.emit_bonus,
                filter_order=first.order,
                rule=rule,
                **q,
            )
        return tuple(
            (tuple(out.tokens[b, : out.num_emitted[b]].tolist()), int(out.num_accepted[b])) for b in range(len(worlds))
        )

    law = explore(run)
    return law if len(worlds) > 1 else marginal(law, lambda outcome: outcome[0])


def chain_law_of(world: World, prefix=(), rule=chain_law):
    """`rule` (p rows, q rows, drafts) on this world's rows, filtered by the oracle's own pieces."""
    params, draft_params = (request_params(make_params([f or {}]), 0) for f in (world.filters, world.draft_filters))
    mapping = None if world.target_to_draft is None else torch.tensor(world.target_to_draft)

    def law_of(drafts):
        contexts = [(*prefix, *drafts[:i]) for i in range(len(drafts) + 1)]
        p, q = [], []
        for context in contexts:
            row = world.target(context)
            p.append(row_probs(row, row_nucleus(row, params, world.order), params))
            if world.q_form == "none":
                q.append(torch.tensor(world.q(context)))
                continue
            row = world.draft(context)
            one = row_probs(row, row_nucleus(row, draft_params, world.order), draft_params)
            q.append(to_target_vocab(one, mapping, p[-1].numel()))
        return rule(p, q[: len(drafts)], list(drafts))

    return law_of


def world(vocab=3, seed=0, steps=None, draft_vocab=None, **kw) -> World:
    return World(Table(vocab, 2 * seed, 1.2, steps), Table(draft_vocab or vocab, 2 * seed + 1, 1.2, steps), **kw)


class KeyRecorder:
    """Counts the reads of each random key (seed, position, stream, id)."""

    def __init__(self):
        self.reads, self._words = {}, rng.words

    def __call__(self, seed, position, stream, id, index):
        key = (int(seed), int(position), stream, int(id))
        self.reads[key] = self.reads.get(key, 0) + 1
        return self._words(seed, position, stream, id, index)
