"""Whether speculation leaves the text what it was: perplexity under the target, and two-sample tests against plain sampling."""

from __future__ import annotations

import math
import random
from collections import Counter
from statistics import median

import torch
from scipy import stats
from torch import Tensor

from ._decode_method import Method


@torch.inference_mode()
def log_likelihoods(model, prompt: list[int], texts: list[list[int]], temperature: float = 1.0) -> list[float]:
    """Mean log-probability per token of each continuation under the target at this temperature."""
    width = max(map(len, texts))
    ids = torch.tensor([prompt + t + [0] * (width - len(t)) for t in texts])
    log_p = (model(ids).logits[:, len(prompt) - 1 : -1].float() / temperature).log_softmax(-1)
    out = []
    for row, text in zip(log_p, texts, strict=True):
        picked = row[: len(text)].gather(1, torch.tensor(text)[:, None])
        out.append(float(picked.mean()))
    return out


def two_sample(
    model, methods: list[Method], plain: Method, prompt: Tensor, *, rows: int, tokens: int, seed: int
) -> dict:
    """Samples `rows` short continuations at temperature 0.8 by each method and by plain decoding, each with seeds of its own.
    `perplexity` of all their tokens under the target at temperature 1; p values against plain decoding, of which small ones speak
    against the same law: `ks_p` of the texts' mean log-probabilities (Kolmogorov-Smirnov), `tokens_p` of the tokens by position (a
    permutation test over whole texts)."""
    ids, temperature = prompt.expand(rows, -1).contiguous(), 0.8
    mask, start_of = torch.ones_like(ids), prompt[0].tolist()

    def draw(method: Method, salt: int) -> tuple[list[list[int]], list[float], float]:
        texts = []
        step = 8 if method.batches else 1
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            texts += method.run(ids[part], mask[part], temperature, tokens, seed + 7919 * salt + start).tokens
        means = log_likelihoods(model, start_of, texts)
        total = sum(m * len(t) for m, t in zip(means, texts, strict=True)) / sum(map(len, texts))
        return texts, log_likelihoods(model, start_of, texts, temperature), math.exp(-total)

    base_texts, base_scores, perplexity = draw(plain, 0)
    out = {plain.name: {"perplexity": perplexity, "median_log_p": median(base_scores)}}
    for salt, method in enumerate(methods, 1):
        texts, scores, perplexity = draw(method, salt)
        out[method.name] = {
            "perplexity": perplexity,
            "median_log_p": median(scores),
            "ks_p": float(stats.ks_2samp(scores, base_scores).pvalue),
            "tokens_p": _tokens_p(texts, base_texts, seed),
        }
    return out


def _tokens_p(a: list[list[int]], b: list[list[int]], seed: int, rounds: int = 400) -> float:
    texts, rng = a + b, random.Random(seed)
    real = _distance(a, b)
    as_far = 0
    for _ in range(rounds):
        rng.shuffle(texts)
        as_far += _distance(texts[: len(a)], texts[len(a) :]) >= real
    return (1 + as_far) / (1 + rounds)


def _distance(a: list[list[int]], b: list[list[int]]) -> float:
    """Sum over positions and tokens of the chi-square terms of two samples."""
    total = 0.0
    for place in range(max(map(len, a + b))):
        one, two = (Counter(t[place] for t in texts if len(t) > place) for texts in (a, b))
        n, m = one.total(), two.total()
        if n and m:
            total += sum((one[t] * m - two[t] * n) ** 2 / ((one[t] + two[t]) * n * m) for t in one | two)
    return total
