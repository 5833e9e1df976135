"""EAGLE and FlashSpec drafters: exact whatever they draft, what they draft is what their formula says."""

import copy

import pytest
import torch

from tests.laws import assert_law
from tests.smollm2_fixture import assert_same_text, recompute, tiny
from tests.test_decoder import padded, prompts, sampling

from specdec_kernels import SamplingTensors  # isort: skip
from specdec_kernels.decoding import (  # isort: skip
    DraftBatch,
    DraftContext,
    DraftModelDrafter,
    EagleDrafter,
    EagleModel,
    FlashSpecDrafter,
    FlashSpecModel,
    ModelForward,
    PromptLookupDrafter,
    SpeculativeDecoder,
    StepOutcome,
)
from specdec_kernels.decoding.draft_stack import StackForward  # isort: skip
from specdec_kernels.decoding.masks import TreeShape  # isort: skip
from specdec_kernels.decoding.packed_layers import drafting_dtype  # isort: skip

NEW = 16
KEPT = [*range(0, 64, 2), 63]


def eagle(model, taps=(-1,), draft_ids=None, seed=1):
    torch.manual_seed(seed)
    return EagleModel(model, taps=taps, draft_ids=draft_ids)


def flashspec(model, draft_ids=None, seed=1):
    torch.manual_seed(seed)
    part = FlashSpecModel(model, shared=1, adapters=2, draft_ids=draft_ids)
    with torch.no_grad():
        for name, tensor in part.tensors().items():
            if tensor.dim() > 1:
                tensor.add_(torch.randn(tensor.shape), alpha=0.3 if name == "widen.weight" else 0.1)
    return part


def drafters(model):
    """name -> drafter, of every form."""
    yield "tree", EagleDrafter(eagle(model))
    yield (
        "tree of three taps, few ids",
        EagleDrafter(eagle(model, (0, 1, -1), KEPT), top_k=3, cache="paged", page_size=4),
    )
    yield "chain", EagleDrafter(eagle(model, (1,), KEPT), tree=False)
    yield "shared layers", FlashSpecDrafter(flashspec(model), block_size=None)
    for size in (1, 2, 3):
        yield f"blocks of {size}", FlashSpecDrafter(flashspec(model, KEPT), block_size=size)
    yield "blocks on a budget", FlashSpecDrafter(flashspec(model), cache="paged", page_size=4, budget=6, sinks=1)


@pytest.mark.parametrize(("kind", "temperature"), [("llama", 0.0), ("llama", 0.9), ("qwen3", 0.9), ("gemma3", 0.9)])
def test_same_text_as_without(kind, temperature):
    """Rows of different lengths that end at different steps; rule "coupled", or greedy under the rule that drafter has."""
    model, params = tiny(kind), sampling(3, temperature)
    ids, mask = padded(prompts(3), "left")
    ends = [5]
    plain = SpeculativeDecoder(model).generate(ids, mask, params, max_new_tokens=NEW, eos=ends).tokens
    for name, drafter in drafters(model):
        rule = "coupled" if temperature else "auto"
        decoder = SpeculativeDecoder(model, drafter, num_draft=4, max_nodes=12, rule=rule, adaptive=False)
        result = decoder.generate(ids, mask, params, max_new_tokens=NEW, eos=ends)
        for b, prompt in enumerate(prompts(3)):
            assert_same_text(model, prompt, result.tokens[b], plain[b], params, b)
        assert result.stats.drafted > 0, name


def forms(model):
    yield "target_only", EagleDrafter(eagle(model, draft_ids=[0, 1, 3, 4]), top_k=2)
    yield "token", EagleDrafter(eagle(model, draft_ids=[0, 1, 3, 4]), tree=False)
    yield "token", FlashSpecDrafter(flashspec(model, [0, 2, 3, 5]), block_size=2)
    yield "token", FlashSpecDrafter(flashspec(model), block_size=1)


@pytest.mark.parametrize("form", range(4))
def test_sampled_law(form):
    """Three tokens over several steps against the model's own probabilities, by chi-square."""
    model, rows, prompt = tiny("llama", vocab=6, scale=0.15), 4096, [1, 4, 2]
    rule, drafter = list(forms(model))[form]
    params = SamplingTensors.create(temperature=1.0, seed=list(range(rows)), batch_size=rows)
    decoder = SpeculativeDecoder(model, drafter, num_draft=3, max_nodes=5, rule=rule, adaptive=False)
    result = decoder.generate(torch.tensor([prompt] * rows), params=params, max_new_tokens=4)
    assert result.stats.accepted > rows // 2
    assert result.stats.accepted < result.stats.drafted
    assert_law(model, prompt, result.tokens)


@torch.inference_mode()
def eagle_logits(part, text, drafted=()):
    """From the definition: entry i pairs the target's feature of token i with token i + 1, drafted ones go on from the layer's own
    states, each forward from scratch."""
    out = ModelForward(part.target)
    cache = out.new_cache(1, 64)
    features = part.fuse(out(torch.tensor([text]), [len(text)], cache, taps=part.taps).taps)[:-1]
    tokens = list(text[1:])
    for token in [*drafted, None]:
        x = part.join(part.embed(torch.tensor([tokens])), features[None])
        n = len(tokens)
        mask = torch.zeros(n, n).masked_fill_(torch.ones(n, n, dtype=torch.bool).triu(1), -1e30)
        states = part.stack(x, mask[None, None], torch.arange(n)[None])[0]
        logits = part.logits(part.stack.norm(states[-1]))
        if token is not None:
            features, tokens = torch.cat([features, states[-1:]]), [*tokens, token]
    return logits


@pytest.mark.parametrize("taps", [(-1,), (0, 1, -1)])
def test_eagle_tree_is_that_of_the_formula(taps):
    """All candidates of three levels: behind each node that was gone on from its likeliest tokens, and gone on from those whose
    paths are likeliest; over several steps, in which the drafter's own entries gave way to the target's features."""
    model, k = tiny("qwen3"), 3
    part, seen = eagle(model, taps, KEPT), []
    drafter = EagleDrafter(part, top_k=k, matmul_dtype=torch.float32)
    propose = drafter.propose

    def watch(context):
        batch = propose(context)
        seen.append(([list(t) for t in context.tokens], list(context.budgets), batch))
        return batch

    drafter.propose = watch
    ids, mask = padded(prompts(2), "left")
    decoder = SpeculativeDecoder(model, drafter, num_draft=3, max_nodes=40, adaptive=False)
    decoder.generate(ids, mask, sampling(2), max_new_tokens=7, eos=[])
    checked = 0
    for texts, budgets, batch in seen:
        start = 0
        for text, budget, count in zip(texts, budgets, batch.counts, strict=True):
            nodes = list(
                zip(
                    batch.parents[start : start + count].tolist(),
                    batch.tokens[start : start + count].tolist(),
                    strict=True,
                )
            )
            start += count
            path, score, children = {0: []}, {0: 0.0}, {}
            for node, (parent, token) in enumerate(nodes, 1):
                if parent >= 0:
                    path[node] = [*path[parent], token]
                    children.setdefault(parent, []).append(node)
            if not count:
                continue
            assert max(map(len, path.values())) == budget
            for depth in range(budget):
                level = [n for n in path if len(path[n]) == depth]
                for parent in [n for n in level if n in children]:
                    log_q = eagle_logits(part, text, path[parent]).double().log_softmax(-1)
                    drafted = [float(log_q[KEPT.index(path[n][-1])]) for n in children[parent]]
                    assert drafted == pytest.approx(log_q.topk(k).values.tolist(), abs=1e-4)
                    score |= {n: score[parent] + q for n, q in zip(children[parent], drafted, strict=True)}
                    checked += 1
                gone_on = sorted((score[n] for n in level if n in children), reverse=True)
                assert gone_on == pytest.approx(sorted((score[n] for n in level), reverse=True)[:k], abs=1e-4)
    assert checked > 20


@torch.inference_mode()
@pytest.mark.parametrize("cache", ["ragged", "paged"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_trees_that_grow(kind, cache):
    """A tree read level by level, each level a forward over the cache: a node's states are those of its path, read from scratch."""
    model = tiny(kind)
    stack = eagle(model).stack
    forward = StackForward(stack)
    generator = torch.Generator().manual_seed(0)
    text, levels = (
        [torch.randn(n, 32, generator=generator) for n in (9, 4)],
        [torch.randn(2, 3, 32, generator=generator) for _ in range(3)],
    )
    made = forward.new_cache(2, 32, cache, page_size=4)
    forward(torch.nn.utils.rnn.pad_sequence(text, batch_first=True), [9, 4], made)
    made.advance([9, 4])
    parents = [[[0, 0, 0]] * 2, [[0, 0, 2], [1, 1, 1]], [[2, 0, 1], [2, 2, 0]]]
    seen, depth = torch.zeros(2, 3, 0, dtype=torch.bool), torch.zeros(2, 0, dtype=torch.int64)
    paths = [[[] for _ in range(3)] for _ in range(2)]
    for level, x in enumerate(levels):
        parent = torch.tensor(parents[level])
        if level:
            seen = seen.gather(1, parent[:, :, None].expand(-1, -1, seen.shape[2]))
            paths = [[paths[b][p] for p in parents[level][b]] for b in range(2)]
        seen = torch.cat([seen, torch.eye(3, dtype=torch.bool).expand(2, 3, 3)], 2)
        depth = torch.nn.functional.pad(depth, (0, 3), value=level)
        paths = [[[*path, x[b, i]] for i, path in enumerate(paths[b])] for b in range(2)]
        states = forward(x, [3, 3], made, TreeShape(depth, seen)).view(2, 3, 32)
        made.advance([3, 3])
        for b in range(2):
            for i in range(3):
                whole = torch.cat([text[b], torch.stack(paths[b][i])])[None]
                n = whole.shape[1]
                mask = torch.zeros(n, n).masked_fill_(torch.ones(n, n, dtype=torch.bool).triu(1), -1e30)
                want = stack(whole, mask[None, None], torch.arange(n)[None])[0, -1]
                torch.testing.assert_close(states[b, i], want, atol=2e-4, rtol=0)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-4), (torch.bfloat16, 0.1)])
def test_chains_sample_their_own_law(dtype, atol):
    """The q rows that a chain hands to verification are the model's logits behind the text and the drafts before, to the
    precision that its matrices are multiplied in."""
    if dtype is torch.bfloat16 and drafting_dtype() is not dtype:
        pytest.skip("this processor does not multiply bfloat16")
    model, far = tiny("llama", scale=0.3), 0.0
    for part, kind in ((eagle(model, (0, -1), KEPT), EagleDrafter), (flashspec(model, KEPT), FlashSpecDrafter)):
        drafter = kind(part, matmul_dtype=dtype, **({"tree": False} if kind is EagleDrafter else {"block_size": None}))
        seen, propose = [], drafter.propose
        drafter.propose = lambda c, propose=propose, seen=seen: (
            seen.append(([list(t) for t in c.tokens], propose(c))) or seen[-1][1]
        )
        ids, mask = padded(prompts(2), "left")
        decoder = SpeculativeDecoder(model, drafter, num_draft=3, rule="token", adaptive=False)
        decoder.generate(ids, mask, sampling(2), max_new_tokens=8, eos=[])
        for texts, batch in seen[:3]:
            rows = range(sum(batch.counts)) if batch.rows is None else batch.rows.tolist()
            place = 0
            for text, count in zip(texts, batch.counts, strict=True):
                for i in range(count):
                    before = batch.tokens[place : place + i].tolist()
                    if kind is EagleDrafter:
                        want = eagle_logits(part, text, before)
                    else:
                        want = flashspec_logits(part, text + before)
                    torch.testing.assert_close(batch.logits[rows[place + i]], want, atol=atol, rtol=0)
                    far = max(far, float((batch.logits[rows[place + i]] - want).abs().max()))
                place += count
    assert (far > 1e-3) == (dtype is torch.bfloat16)


@torch.inference_mode()
def flashspec_logits(part, text):
    """The target's own first layer, then the adapters."""
    states = []
    layer = part.target.model.layers[part.options["shared"] - 1]
    handle = layer.register_forward_hook(lambda m, a, o: states.append(o[0] if isinstance(o, tuple) else o))
    recompute(part.target, text)
    handle.remove()
    upper = part.stack.upper(states[0].view(1, len(text), -1), torch.arange(len(text))[None])
    return part.logits(part.finish(upper[0, -1]))


def test_flashspec_shares_the_target():
    """Embedding, first layers and LM head are the target's own storage, and no parameter of the file's."""
    model = tiny("llama")
    part = FlashSpecModel(model, shared=1, adapters=2)
    assert part.stack.decoder.layers[0] is model.model.layers[0]
    assert part.head.data_ptr() == model.lm_head.weight.data_ptr()
    assert not any("layers.0." in name or "embed" in name or "lm_head" in name for name in part.tensors())
    drafter = FlashSpecDrafter(part)
    decoder = SpeculativeDecoder(model, drafter, packed=True)
    ids = torch.tensor([[1, 2, 3]])
    decoder.generate(ids, params=sampling(1), max_new_tokens=4)
    assert drafter.forward.stack._layers.layers[0] is decoder.forward.layers[0]
    with torch.no_grad():
        saved = model.model.layers[0].mlp.down_proj.weight.clone()
        model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    old = decoder.forward.layers[0]
    decoder.generate(ids, params=sampling(1), max_new_tokens=4)
    assert drafter.forward.stack._layers.layers[0] is decoder.forward.layers[0] is not old
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.copy_(saved)


@torch.no_grad()  # in inference mode a write would leave the version as it is
@pytest.mark.parametrize("kind", ["eagle", "flashspec"])
@pytest.mark.parametrize("what", ["own", "head"])
def test_changed_weights_are_taken_in(kind, what):
    """Weights are packed; a `begin` after a change proposes what a new drafter would."""
    model = copy.deepcopy(tiny("llama", scale=0.3))
    part = eagle(model, (0, -1), KEPT) if kind == "eagle" else flashspec(model, KEPT)
    make = (lambda: EagleDrafter(part, tree=False)) if kind == "eagle" else (lambda: FlashSpecDrafter(part))
    text, params = [3, 1, 4, 1, 5], sampling(1)

    def logits(drafter):
        drafter.begin([text], params, 32)
        if drafter.taps:
            hidden = ModelForward(model)
            cache = hidden.new_cache(1, 8)
            out = hidden(torch.tensor([text[:-1]]), [4], cache, last_only=True, taps=drafter.taps)
            drafter._pending._prompts = [4]
            drafter.observe(StepOutcome([text[-1:]], [0], [0], out.taps))
        return drafter.propose(DraftContext([text], torch.tensor([5]), params, [3], "token", lambda d: None)).logits

    drafter = make()
    before = logits(drafter).clone()
    changed = next(t for n, t in part.tensors().items() if t.dim() == 2) if what == "own" else model.lm_head.weight
    changed.add_(torch.randn(changed.shape), alpha=0.5)
    after = logits(drafter)
    torch.testing.assert_close(after, logits(make()))
    assert not torch.allclose(after, before)


def test_tokens_beyond_the_vocabulary_are_refused():
    class Wrong(PromptLookupDrafter):
        def propose(self, context):
            return DraftBatch(torch.tensor([64]), [1])

    decoder = SpeculativeDecoder(tiny("llama"), Wrong(), adaptive=False)
    with pytest.raises(ValueError, match="drafter's tokens must be below the target's 64, got 64"):
        decoder.generate(torch.tensor([[1, 2]]), params=sampling(1))


def test_layers_of_no_width_are_refused():
    with pytest.raises(ValueError, match="intermediate_size must be >= 1 or None, got 0"):
        EagleModel(tiny("llama"), intermediate_size=0)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["draft model", "flashspec"])
def test_rows_without_drafts_are_not_read_past_their_text(kind):
    """A proposal for one row of three, then one for all: q is the model's behind each text, and no draw is made twice."""
    model = tiny("llama", scale=0.3)
    part = flashspec(model)
    drafter = (
        DraftModelDrafter(model, block_size=2)
        if kind == "draft model"
        else FlashSpecDrafter(part, matmul_dtype=torch.float32)
    )
    texts, params = [[1, 0, 2, 1], [5, 9], [2, 1, 7]], sampling(3)
    drafter.begin(texts, params, 64)

    def propose(counts):
        position = torch.tensor([len(t) for t in texts])
        return drafter.propose(DraftContext(texts, position, params, counts, "token", lambda d: None))

    texts[2] = texts[2] + propose([0, 0, 2]).tokens.tolist()
    batch = propose([2, 2, 2])
    tokens = batch.tokens.view(3, 2).tolist()
    for b, text in enumerate(texts):
        for i in range(2):
            whole = text + tokens[b][:i]
            want = recompute(model, whole)[-1] if kind == "draft model" else flashspec_logits(part, whole)
            torch.testing.assert_close(batch.logits[2 * b + i], want, atol=2e-4, rtol=0)


@pytest.mark.parametrize("seed", range(4))
def test_blocks_of_rows_that_end_at_different_steps(seed):
    """The parameters that q was sampled with follow the rows that are left, also where no row needs a new draft."""
    model = tiny("llama", scale=0.3)
    params = SamplingTensors.create(temperature=[0.7, 1.0, 1.3], seed=[seed, seed + 9, seed + 30], batch_size=3)
    ids, mask = padded(prompts(3), "left")
    decoder = SpeculativeDecoder(model, DraftModelDrafter(model, block_size=2), rule="token", adaptive=False)
    result = decoder.generate(ids, mask, params, max_new_tokens=24, eos=list(range(0, 64, 5)))
    assert len(set(result.lengths)) > 1 and result.stats.accepted > 0


def test_rotary_frequencies_are_the_target_s():
    """A target in bfloat16 keeps them in float32; a shared layer that rounded them would drift with the position."""
    model = copy.deepcopy(tiny("llama"))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    for part in (EagleModel(model), FlashSpecModel(model, shared=1, adapters=1)):
        assert torch.equal(part.stack.decoder.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
        assert part.stack.decoder.rotary_emb.inv_freq.dtype == torch.float32
        assert all(p.dtype == torch.bfloat16 for p in part.parameters())


def test_verifying_blocks_of_a_draft_model():
    """A draft model that is the target: every draft is accepted, every step emits its block and no token more."""
    model, params = tiny("qwen3"), sampling(2)
    ids, mask = padded(prompts(2), "left")
    plain = SpeculativeDecoder(model).generate(ids, mask, params, max_new_tokens=25).tokens
    for rule in ("coupled", "token"):
        drafter = DraftModelDrafter(model, block_size=3)
        decoder = SpeculativeDecoder(model, drafter, num_draft=5, rule=rule, adaptive=False)
        result = decoder.generate(ids, mask, params, max_new_tokens=25)
        assert result.stats.accepted == result.stats.drafted == 48
        assert result.stats.target_calls == 8 and result.stats.tokens_per_call == 3.0
        assert result.stats.discarded == 0
        if rule == "coupled":
            for b, prompt in enumerate(prompts(2)):
                assert_same_text(model, prompt, result.tokens[b], plain[b], params, b)


def test_drafting_runs_beside_the_target():
    """The next block is asked for while the target's forward runs: neither waits for the other."""
    import threading

    model = tiny("llama")
    drafter = DraftModelDrafter(model, block_size=2)
    decoder = SpeculativeDecoder(model, drafter, num_draft=6, rule="coupled", adaptive=False, packed=False)
    meet, met = threading.Barrier(2, timeout=20), []
    forward, propose = decoder.forward, drafter.propose

    class Meeting:
        def __getattr__(self, name):
            return getattr(forward, name)

        def __call__(self, tokens, *args, **kwargs):
            if tokens.shape[1] <= 3 and len(met) < 2:
                meet.wait()
                met.append(threading.get_ident())
            return forward(tokens, *args, **kwargs)

    def proposes(context):
        if threading.current_thread() is not threading.main_thread() and len(met) < 2:
            meet.wait()
        return propose(context)

    decoder.forward, drafter.propose = Meeting(), proposes
    decoder.generate(torch.tensor([[1, 2, 3, 4, 5]]), params=sampling(1), max_new_tokens=9, eos=[])
    assert len(met) == 2


def test_errors_name_the_argument():
    model, other = tiny("llama"), tiny("llama", seed=5)
    deep = SpeculativeDecoder(model, EagleDrafter(eagle(model), top_k=32), adaptive=False)
    blocks_of_trees = EagleDrafter(eagle(model))
    blocks_of_trees.block_size = 2
    for call, message in (
        (
            lambda: EagleDrafter(eagle(model, draft_ids=[4, 9]), top_k=3),
            "top_k must be at most the 2 ids that can be drafted",
        ),
        (lambda: deep.generate(torch.tensor([[1, 2]]), max_new_tokens=9), "makes 4128 candidates, at most 4096"),
        (
            lambda: SpeculativeDecoder(model, blocks_of_trees),
            "a block_size must have neither trees nor taps, got trees",
        ),
        (
            lambda: EagleDrafter(eagle(model), matmul_dtype=torch.float16),
            "matmul_dtype must be None, torch.float32 or torch.bfloat16, got torch.float16",
        ),
        (lambda: EagleDrafter(eagle(model), top_k=0), "top_k must be an int in 1..32, got 0"),
        (lambda: SpeculativeDecoder(other, EagleDrafter(eagle(model))), "EagleDrafter: target must be the model's own"),
        (lambda: SpeculativeDecoder(other, FlashSpecDrafter(flashspec(model))), "FlashSpecDrafter: target must be"),
        (lambda: SpeculativeDecoder(model, EagleDrafter(eagle(model, (2,)))), "taps must be layers of the target"),
        (lambda: FlashSpecModel(model, shared=3), "shared must be an int in 1..2, the target's layers, got 3"),
        (lambda: FlashSpecModel(model, adapters=0), "adapters must be an int >= 1, got 0"),
        (lambda: eagle(model, draft_ids=[3, 3]), "draft_ids must be ascending target ids"),
        (lambda: eagle(model, draft_ids=[3, 64]), "draft_ids must be below 64, got 64"),
        (lambda: FlashSpecDrafter(flashspec(model), block_size=0), "FlashSpecDrafter: block_size must be an int >= 1"),
        (lambda: eagle(model).save("x", dtype="int4"), 'dtype must be "float32", "float16" or "int8", got \'int4\''),
        (
            lambda: SpeculativeDecoder(model, FlashSpecDrafter(flashspec(model), block_size=6)),
            "num_draft must be at least the drafter's block_size 6, got 5",
        ),
        (
            lambda: SpeculativeDecoder(model, FlashSpecDrafter(flashspec(model)), rule="block"),
            "rule must be token or coupled for drafts verified block by block, got 'block'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
