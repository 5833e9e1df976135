"""Whether sampled texts of a tiny model have its law."""

import torch
from scipy import stats

from tests.smollm2_fixture import recompute


def assert_law(model, prompt, texts, vocab=6):
    """The second, third and fourth new token of many texts behind one prompt, by chi-square against the model's own probabilities:
    all three together, and the second by itself, the first one that a step with drafts can give."""
    seen = torch.zeros(vocab, vocab, vocab)
    for tokens in texts:
        seen[tuple(tokens[1:4])] += 1
    law = torch.zeros(vocab, vocab, vocab, dtype=torch.float64)
    for a in range(vocab):
        for b in range(vocab):
            for c in range(vocab):
                p = recompute(model, [*prompt, a, b, c]).double().softmax(-1)
                place = len(prompt) - 1
                law[b, c] += p[place, a] * p[place + 1, b] * p[place + 2, c] * p[place + 3]
    expected = law * len(texts)
    for found, wanted in ((seen.flatten(), expected.flatten()), (seen.sum((1, 2)), expected.sum((1, 2)))):
        big = wanted >= 4
        found, wanted = (torch.cat([t[big], t[~big].sum()[None]]) for t in (found, wanted))
        used = wanted > 0
        statistic = float(((found - wanted) ** 2 / wanted)[used].sum())
        assert int(used.sum()) > 4
        assert stats.chi2.sf(statistic, int(used.sum()) - 1) > 1e-4
