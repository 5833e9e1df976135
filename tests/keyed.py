"""Exact laws of texts over several steps, with the random keys that the oracle really uses.

Over a vocabulary of two a race is one uniform against one threshold, as a coin is. So what a run has learned of the uniform
behind a key is an interval, and the law of the next decision that reads the same key is known: a draw that is used twice
biases the text here exactly as it would in life, and distinct keys leave it exact.
"""

import math
from collections import defaultdict

import torch

from python_ref import rng
from python_ref.rows import accept_probability
from tests.enumeration import explore, replaced_in_oracle

FRESH = (0.0, 1.0)


class _Coin(float):
    key = None


class Uniforms:
    """Known intervals of the uniforms of a run; `below(key, t)` decides U < t and narrows the interval."""

    def __init__(self, known: dict, choose):
        self.known, self.choose, self.read = dict(known), choose, set()

    def below(self, key, threshold: float) -> bool:
        low, high = self.known.get(key, FRESH)
        self.read.add(key)
        t = min(max(threshold, low), high)
        yes = self.choose([t - low, high - t]) == 0
        self.known[key] = (low, t) if yes else (t, high)
        return yes


def keyed(uniforms: Uniforms):
    """Inside, each race between two tokens and each coin of the oracle is a threshold on the uniform of its key."""

    def noise(seed, position, stream, id, vocab):
        assert vocab == 2
        e = torch.ones(vocab, dtype=torch.float64)
        e.key = (int(seed), int(position), stream, int(id))
        return e

    def coin(seed, anchor, offset):
        c = _Coin(0.5)
        c.key = (int(seed), int(anchor), rng.STREAM_ACCEPT, int(offset))
        return c

    def race(weights, noise, condition=None):
        total = float(weights.sum())
        if not total > 0:
            return 0, math.inf
        return (0 if uniforms.below(noise.key, float(weights[0]) / total) else 1), math.inf

    def accepts(coin, p_x, q_x):
        return uniforms.below(coin.key, accept_probability(p_x, q_x))

    def picks(coin, masses):
        total = 0.0
        for i, mass in enumerate(masses):
            total += mass
            if uniforms.below(coin.key, total):
                return i
        return len(masses)

    return replaced_in_oracle(noise, coin, race=race, accepts=accepts, picks=picks)


def _step_law(step, text, memory, known: dict):
    """(law of (emitted, memory, intervals of the keys read), keys read) of one step."""
    read = set()

    def run(choose):
        uniforms = Uniforms(known, choose)
        with keyed(uniforms):
            emitted, kept = step(text, memory)
        read.update(uniforms.read)
        return emitted, kept, frozenset((key, uniforms.known[key]) for key in uniforms.read)

    return explore(run), read


def text_law_by_steps(step, length: int) -> tuple[dict, int]:
    """Law of the first `length` tokens and the most steps that a text took. `step(text, memory)` runs one step of real
    functions and returns (emitted tokens, memory for the next step), () at first."""

    def restricted(known, keys):
        return frozenset(item for item in known if item[0] in keys)

    done, running, most = defaultdict(float), {((), (), frozenset()): 1.0}, 0
    cache, reads = {}, {}
    while running:
        following = defaultdict(float)
        most += 1
        for (text, memory, known), weight in running.items():
            before = dict(known)
            at = (text, memory, restricted(known, reads.get((text, memory), ())))
            if at not in cache:
                law, read = _step_law(step, text, memory, before)
                reads[text, memory] = reads.get((text, memory), set()) | read
                at = (text, memory, restricted(known, reads[text, memory]))
                cache[at] = law
            for (emitted, kept, learned), w in cache[at].items():
                longer = (text + emitted)[:length]
                if len(longer) == length:
                    done[longer] += weight * w
                else:
                    following[longer, kept, frozenset((before | dict(learned)).items())] += weight * w
        running = following
    return dict(done), most
