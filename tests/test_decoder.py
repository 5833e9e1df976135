"""Speculative decoding on tiny models: the same text as without it, whatever the drafter, batch and padding."""

import itertools

import pytest
import torch

from tests.smollm2_fixture import TINY, assert_same_text, recompute, tiny

from specdec_kernels import SamplingTensors  # isort: skip
from specdec_kernels.decoding import (  # isort: skip
    DraftBatch,
    Drafter,
    DraftModelDrafter,
    PromptLookupDrafter,
    SpeculativeDecoder,
)

NEW = 40


class Scripted(Drafter):
    """Proposes what `choose(tokens, budget)` says; remembers its counts."""

    deterministic = True

    def __init__(self, choose):
        self.choose, self.counts = choose, []

    def begin(self, prompts, params, max_tokens):
        pass

    def propose(self, context):
        rows = [self.choose(t, n)[:n] for t, n in zip(context.tokens, context.budgets, strict=True)]
        self.counts.append([len(r) for r in rows])
        flat = [token for row in rows for token in row]
        return DraftBatch(torch.tensor(flat, dtype=torch.int32), self.counts[-1])


def knows(texts, wrong_every=0):
    """A drafter that knows how each text (prompt and output) goes on; every n-th position it is wrong about."""

    def choose(tokens, budget):
        text = next(t for t in texts if t[: len(tokens)] == tokens)
        drafts = text[len(tokens) : len(tokens) + budget]
        return [
            (d + 1) % 64 if wrong_every and (len(tokens) + i) % wrong_every == 0 else d for i, d in enumerate(drafts)
        ]

    return Scripted(choose)


def prompts(count=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(64, (n,), generator=generator).tolist() for n in (7, 3, 12, 5)[:count]]


def padded(texts, side):
    width = max(map(len, texts))
    fill = [[0] * (width - len(t)) for t in texts]
    ids = [f + t if side == "left" else t + f for f, t in zip(fill, texts, strict=True)]
    ones = [[1] * len(t) for t in texts]
    mask = [f + o if side == "left" else o + f for f, o in zip(fill, ones, strict=True)]
    return torch.tensor(ids), torch.tensor(mask)


def sampling(count, temperature=0.9, **kwargs):
    return SamplingTensors.create(
        temperature=temperature, seed=list(range(100, 100 + count)), batch_size=count, **kwargs
    )


def one(params, row):
    return SamplingTensors(
        *(getattr(params, f)[row : row + 1] for f in ("temperature", "top_p", "top_k", "min_p", "seed"))
    )


def drafters(model, kind):
    yield "lookup", PromptLookupDrafter()
    yield "itself", DraftModelDrafter(model)
    yield "other", DraftModelDrafter(tiny(kind, seed=9))
    cycle = itertools.count()
    yield "noise", Scripted(lambda tokens, n: [next(cycle) * 7 % 64 for _ in range(n)])


@pytest.mark.parametrize("packed", [False, "auto"])
@pytest.mark.parametrize("kind", TINY)
def test_greedy_is_transformers_greedy(kind, packed):
    model = tiny(kind)
    greedy = SamplingTensors.create(temperature=0.0)
    for prompt in prompts(2):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)
        expected = expected[0, len(prompt) :].tolist()
        for name, drafter in [("none", None), *drafters(model, kind)]:
            decoder = SpeculativeDecoder(model, drafter, packed=packed, adaptive=False)
            result = decoder.generate(ids, params=greedy, max_new_tokens=NEW)
            assert_same_text(model, prompt, result.tokens[0], expected)
            assert result.sequences[0].tolist() == prompt + result.tokens[0]
            if name == "itself":
                assert result.stats.acceptance_rate > 0.95


@pytest.mark.parametrize("kind", TINY)
def test_coupled_text_does_not_depend_on_the_drafter(kind):
    model = tiny(kind)
    texts = prompts()
    ids, mask = padded(texts, "left")
    params = sampling(3, top_p=0.95)
    plain = SpeculativeDecoder(model).generate(ids, mask, params, max_new_tokens=NEW).tokens
    for name, drafter in drafters(model, kind):
        result = SpeculativeDecoder(model, drafter, rule="coupled").generate(ids, mask, params, max_new_tokens=NEW)
        for b, prompt in enumerate(texts):
            assert_same_text(model, prompt, result.tokens[b], plain[b], params, b)
        if name == "itself":
            # Proposals made with the verifier's own noise are its own tokens.
            assert result.stats.acceptance_rate > 0.95


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_slot_dependent(kind, side):
    """Rows of a ragged, padded batch say what they say alone: greedy and sampled rows, accepting different numbers."""
    model = tiny(kind)
    texts = prompts(4)
    params = sampling(4, temperature=[0.9, 0.0, 0.7, 1.2], top_k=[0, 0, 20, 0], top_p=[0.9, 1.0, 1.0, 0.8])
    alone = [
        SpeculativeDecoder(model).generate(torch.tensor([t]), params=one(params, b), max_new_tokens=NEW).tokens[0]
        for b, t in enumerate(texts)
    ]
    ids, mask = padded(texts, side)
    drafter = knows([t + a for t, a in zip(texts, alone, strict=True)], wrong_every=5)
    result = SpeculativeDecoder(model, drafter, num_draft=4).generate(ids, mask, params, max_new_tokens=NEW)
    for b, prompt in enumerate(texts):
        assert_same_text(model, prompt, result.tokens[b], alone[b], params, b)
    assert 0.5 < result.stats.acceptance_rate < 0.95
    assert result.sequences.shape == (4, ids.shape[1] + NEW)


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_end_of_sequence_inside_an_accepted_run(rule):
    model = tiny("llama")
    prompt = prompts(1)[0]
    ids, greedy = torch.tensor([prompt]), SamplingTensors.create(temperature=0.0)
    text = SpeculativeDecoder(model).generate(ids, params=greedy, max_new_tokens=NEW).tokens[0]
    at = next(i for i in range(8, NEW) if text[i] not in text[:i])
    for first in range(5):
        # Starting the known continuation at each offset moves the end through the run, its bonus token included.
        seen = prompt + text[: at - first]
        drafter = knows([prompt + text])
        result = SpeculativeDecoder(model, drafter, rule=rule, adaptive=False).generate(
            torch.tensor([seen]), params=greedy, max_new_tokens=NEW, eos=[text[at]]
        )
        assert result.tokens[0] == text[at - first : at + 1]
        assert result.stats.tokens == first + 1


def test_rows_finish_early():
    """Rows end at different steps by length of text or end of sequence, leave the batch, and disturb no other row."""
    model = tiny("qwen3")
    texts = prompts(4)
    ids, mask = padded(texts, "left")
    params = sampling(4)
    free = SpeculativeDecoder(model).generate(ids, mask, params, max_new_tokens=NEW).tokens
    # Ends that occur early in one row each.
    ends = sorted({free[1][4], free[2][15]})
    expected = [t[: next((i + 1 for i, x in enumerate(t) if x in ends), NEW)] for t in free]
    assert len({len(t) for t in expected}) > 1
    known = [p + t for p, t in zip(texts, free, strict=True)]
    for drafter in (None, DraftModelDrafter(model), PromptLookupDrafter(), knows(known, 3)):
        decoder = SpeculativeDecoder(model, drafter, rule="coupled")
        result = decoder.generate(ids, mask, params, max_new_tokens=NEW, eos=ends, pad=63)
        for b, prompt in enumerate(texts):
            assert_same_text(model, prompt, result.tokens[b], expected[b], params, b)
        assert result.lengths == [len(t) for t in result.tokens]
        assert (result.sequences[1, ids.shape[1] + result.lengths[1] :] == 63).all()
        assert result.stats.target_rows < 4 * result.stats.target_calls, "finished rows must leave the batch"
    assert SpeculativeDecoder(model).generate(ids, mask, params, max_new_tokens=1, eos=[]).lengths == [1] * 4


@pytest.mark.parametrize("limit", [1, 2, 6, 7])
def test_max_new_tokens_is_exact(limit):
    model = tiny("llama")
    texts = prompts(2)
    ids, mask = padded(texts, "right")
    greedy = SamplingTensors.create(temperature=0.0, batch_size=2)
    plain = SpeculativeDecoder(model).generate(ids, mask, greedy, max_new_tokens=20).tokens
    drafter = knows([p + t for p, t in zip(texts, plain, strict=True)])
    result = SpeculativeDecoder(model, drafter, adaptive=False).generate(ids, mask, greedy, max_new_tokens=limit)
    assert result.tokens == [t[:limit] for t in plain]
    assert all(n <= limit - 2 for step in drafter.counts for n in step)
    none = SpeculativeDecoder(model, drafter, num_draft=0).generate(ids, mask, greedy, max_new_tokens=limit)
    assert none.tokens == result.tokens and none.stats.drafted == 0


def test_zero_draft_advances():
    """Steps without drafts, of one row or of all, leave no trace in a row's randomness."""
    model = tiny("llama")
    texts = prompts(3)
    ids, mask = padded(texts, "left")
    params = sampling(3)
    plain = SpeculativeDecoder(model).generate(ids, mask, params, max_new_tokens=NEW).tokens
    known = [p + t for p, t in zip(texts, plain, strict=True)]

    def sometimes(tokens, budget):
        return knows(known, 4).choose(tokens, budget) if len(tokens) % 3 else []

    drafter = Scripted(sometimes)
    result = SpeculativeDecoder(model, drafter, rule="coupled").generate(ids, mask, params, max_new_tokens=NEW)
    assert any(0 in step and max(step) > 0 for step in drafter.counts)
    for b, prompt in enumerate(texts):
        assert_same_text(model, prompt, result.tokens[b], plain[b], params, b)


def test_first_seed_for_all():
    """Equal prompts with different seeds differ; the same seed gives the same text again."""
    model = tiny("llama")
    ids = torch.tensor([prompts(1)[0]] * 3)
    params = SamplingTensors.create(temperature=1.0, seed=[5, 6, 5], batch_size=3)
    decoder = SpeculativeDecoder(model, DraftModelDrafter(tiny("llama", seed=9)), rule="token", adaptive=False)
    a, b, c = decoder.generate(ids, params=params, max_new_tokens=20).tokens
    assert a == c and a != b
    assert decoder.generate(ids, params=params, max_new_tokens=20).tokens[0] == a


@pytest.mark.parametrize(("drafts", "rule"), [("model", "token"), ("peaked", "token"), ("model", "block")])
def test_sampled_law(drafts, rule):
    """The joint law of three tokens over several steps is the target's own, by chi-square."""
    vocab, batch, runs, length = 6, 2048, 8, 3
    target = tiny("llama", vocab=vocab, scale=2.0)
    draft = tiny("llama", seed=3, vocab=vocab, scale=2.0 if drafts == "model" else 4.0)
    prompt = [1, 2, 3]
    temperature, top_k = 2.0, 5

    expected = torch.zeros(vocab, vocab, vocab, dtype=torch.float64)
    law = {}
    for n in range(length):
        for prefix in itertools.product(range(vocab), repeat=n):
            logits = recompute(target, prompt + list(prefix))[-1].double() / temperature
            kept = logits >= logits.topk(top_k).values[-1]
            law[prefix] = logits.masked_fill(~kept, -torch.inf).softmax(-1)
    for path in itertools.product(range(vocab), repeat=length):
        expected[path] = law[()][path[0]] * law[path[:1]][path[1]] * law[path[:2]][path[2]]

    observed = torch.zeros_like(expected)
    decoder = SpeculativeDecoder(target, DraftModelDrafter(draft), num_draft=2, rule=rule, adaptive=False)
    # One token more than is judged: the last token of a row has no draft.
    ids = torch.tensor([prompt] * batch)
    for run in range(runs):
        params = SamplingTensors.create(temperature=temperature, top_k=top_k, seed=run, batch_size=batch)
        result = decoder.generate(ids, params=params, max_new_tokens=length + 1)
        for tokens in result.tokens:
            observed[tuple(tokens[:length])] += 1
    assert observed[expected == 0].sum() == 0
    counts = expected.flatten() * batch * runs
    order = counts.argsort()
    counts, seen = counts[order], observed.flatten()[order]
    rare = int((counts.cumsum(0) < 20).sum()) + 1
    rare = max(rare, int((counts < 5).sum()))
    counts = torch.cat([counts[:rare].sum()[None], counts[rare:]])
    seen = torch.cat([seen[:rare].sum()[None], seen[rare:]])
    statistic = float(((seen - counts) ** 2 / counts).sum())
    freedom = len(counts) - 1
    # 5 standard deviations of the chi-square distribution (Wilson-Hilferty).
    limit = freedom * (1 - 2 / (9 * freedom) + 5 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < limit, f"chi-square {statistic:.0f} on {freedom} degrees of freedom"
    assert 0.1 < result.stats.acceptance_rate < 0.95


def test_speculation_pauses_where_it_does_not_pay():
    model = tiny("llama")
    ids, params = torch.tensor([prompts(1)[0]]), sampling(1)
    noise = Scripted(lambda tokens, n: [(tokens[-1] * 31 + i) % 64 for i in range(n)])
    decoder = SpeculativeDecoder(model, noise, rule="coupled")
    # Costs as measured would be, instead of what this machine's other work makes of them.
    decoder.costs.record = lambda *args: None
    decoder.costs.wants_plain = lambda *args: False
    decoder.costs.relative = lambda batch, drafts, depth=None: 1.0 + 0.2 * drafts
    result = decoder.generate(ids, params=params, max_new_tokens=120)
    assert result.stats.fallbacks >= 1
    assert result.stats.plain_steps > 0.5 * result.stats.target_calls
    plain = SpeculativeDecoder(model).generate(ids, params=params, max_new_tokens=120)
    assert_same_text(model, ids[0].tolist(), result.tokens[0], plain.tokens[0], params)
    watchless = SpeculativeDecoder(model, noise, rule="coupled", adaptive=False)
    assert watchless.generate(ids, params=params, max_new_tokens=60).stats.fallbacks == 0


def test_streamer_gets_every_token_once():
    class Streamer:
        def __init__(self):
            self.values, self.ended = [], 0

        def put(self, value):
            assert not self.ended
            self.values.append(value)

        def end(self):
            self.ended += 1

    model, streamer = tiny("llama"), Streamer()
    prompt = prompts(1)[0]
    decoder = SpeculativeDecoder(model, DraftModelDrafter(model), adaptive=False)
    result = decoder.generate(torch.tensor([prompt]), params=sampling(1), max_new_tokens=NEW, streamer=streamer)
    assert streamer.values[0].tolist() == [prompt]
    assert [t for value in streamer.values[1:] for t in value.tolist()] == result.tokens[0]
    assert max(value.numel() for value in streamer.values[1:]) > 1 and streamer.ended == 1


def test_progress_bar_counts_tokens(capsys):
    model, texts = tiny("llama"), prompts(2)
    ids, mask = padded(texts, "left")
    SpeculativeDecoder(model).generate(ids, mask, sampling(2), max_new_tokens=15, progress=True)
    assert "30/30" in capsys.readouterr().err


def test_caches_hold_the_committed_text():
    """One forward of the new tokens per step: never the whole text again, and nothing of rejected drafts."""
    model = tiny("llama")
    seen = []
    handle = model.model.embed_tokens.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[1]))
    try:
        prompt = prompts(3)[2]
        decoder = SpeculativeDecoder(model, PromptLookupDrafter(), packed=False)
        decoder.generate(torch.tensor([prompt]), params=sampling(1), max_new_tokens=NEW)
    finally:
        handle.remove()
    assert seen[0] == len(prompt) and max(seen[1:]) <= 6


def test_warmup_measures_costs():
    decoder = SpeculativeDecoder(tiny("llama"), PromptLookupDrafter(), num_draft=4)
    assert decoder.costs.relative(2, 4) is None
    decoder.warmup(2, context=8, repeats=2)
    assert decoder.costs.relative(2, 4) > 0 and decoder.costs.relative(2, 3) > 0
    assert decoder.costs.relative(1, 4) is None
    SpeculativeDecoder(tiny("llama"), PromptLookupDrafter(), num_draft=0).warmup(1, context=8, repeats=1)


def test_drafter_after_a_failed_step():
    """What an interrupted batch left with the drafter is none of the next one's."""
    model = tiny("llama")
    drafter = DraftModelDrafter(tiny("llama", seed=9), packed=False)
    decoder = SpeculativeDecoder(model, drafter, packed=False, adaptive=False)
    ids, mask = padded(prompts(3), "left")
    forward, calls = decoder.forward, []

    def interrupted(*args, **options):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(*args, **options)

    for name in ("model", "device", "vocab_size", "new_cache", "refresh"):
        setattr(interrupted, name, getattr(forward, name))
    decoder.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        decoder.generate(ids, mask, sampling(3), max_new_tokens=12)
    decoder.forward = forward
    got = decoder.generate(ids[:1], mask[:1], sampling(1), max_new_tokens=12).tokens
    assert got == SpeculativeDecoder(model, drafter, forward=forward, adaptive=False).generate(
        ids[:1], mask[:1], sampling(1), max_new_tokens=12
    ).tokens  # fmt: skip


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: d.generate([[1]]), r"input_ids must be int64 \[B, n\], got list"),
        (lambda d: d.generate(torch.ones(2, 3)), r"input_ids must be int64 \[B, n\], got torch.float32 \[2, 3\]"),
        (
            lambda d: d.generate(torch.ones(1, 3, dtype=torch.int64), torch.ones(1, 4)),
            r"attention_mask must be \[1, 3\]",
        ),
        (lambda d: d.generate(torch.ones(1, 3, dtype=torch.int64), torch.zeros(1, 3)), r"row 0 has none"),
        (
            lambda d: d.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=0),
            r"max_new_tokens must be >= 1, got 0",
        ),
        (
            lambda d: d.generate(torch.ones(3, 3, dtype=torch.int64), params=sampling(2)),
            r"params must describe one request per row of input_ids \[3\], got 2",
        ),
        (lambda d: d.generate(torch.ones(2, 3, dtype=torch.int64), streamer=object()), r"batch of 1, got 2"),
        (
            lambda d: SpeculativeDecoder(d.target, rule="typical"),
            r"rule must be one of auto, token, block, coupled, target_only, got 'typical'",
        ),
        (lambda d: SpeculativeDecoder(d.target, d.target), r"drafter must be a Drafter or None, got LlamaForCausalLM"),
        (lambda d: SpeculativeDecoder(d.target, num_draft=-1), r"num_draft must be >= 0 or \"auto\", got -1"),
        (lambda d: SpeculativeDecoder(tiny("qwen3"), forward=d.forward), r"forward must be of the same target"),
        (lambda d: SpeculativeDecoder(tiny("gemma3"), packed=True), r"model must be one of .*, got Gemma3ForCausalLM"),
    ],
)
def test_errors_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call(SpeculativeDecoder(tiny("llama")))
