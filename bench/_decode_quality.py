"""Whether speculation leaves the text what it was: perplexity under the target, and two-sample tests against plain sampling."""

from __future__ import annotations

import math
from collections import Counter
from statistics import median

import torch
from scipy import stats
from torch import Tensor

from ._decode_methods import Method


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
    """Samples `rows` short continuations by each method and by plain decoding, each with seeds of its own, and compares their
    log-likelihoods (Kolmogorov-Smirnov) and their tokens by position (chi-square of the frequent ones, Fisher's method over
    positions). p values: small ones speak against the same law."""
    ids, temperature = prompt.expand(rows, -1).contiguous(), 0.8
    mask = torch.ones_like(ids)

    def draw(method: Method, salt: int) -> tuple[list[list[int]], list[float]]:
        texts = []
        step = 8 if method.batches else 1
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            texts += method.run(ids[part], mask[part], temperature, tokens, seed + 7919 * salt + start).tokens
        return texts, log_likelihoods(model, prompt[0].tolist(), texts, temperature)

    base_texts, base_scores = draw(plain, 0)
    out = {
        plain.name: {"perplexity": math.exp(-sum(base_scores) / len(base_scores)), "median_log_p": median(base_scores)}
    }
    for salt, method in enumerate(methods, 1):
        texts, scores = draw(method, salt)
        out[method.name] = {
            "perplexity": math.exp(-sum(scores) / len(scores)),
            "median_log_p": median(scores),
            "ks_p": float(stats.ks_2samp(scores, base_scores).pvalue),
            "tokens_p": _tokens_p(texts, base_texts),
        }
    return out


def _tokens_p(a: list[list[int]], b: list[list[int]]) -> float:
    values = []
    for place in range(max(map(len, a + b))):
        one, two = (Counter(t[place] for t in texts if len(t) > place) for texts in (a, b))
        if min(one.total(), two.total()) < 20:
            continue
        common = [t for t, n in (one + two).most_common(8) if n >= 10]
        table = [[c[t] for t in common] + [c.total() - sum(c[t] for t in common)] for c in (one, two)]
        columns = [pair for pair in zip(*table, strict=True) if sum(pair)]
        if len(columns) > 1:
            values.append(stats.chi2_contingency(list(zip(*columns, strict=True))).pvalue)
    return float(stats.combine_pvalues([max(v, 1e-300) for v in values]).pvalue) if values else 1.0
