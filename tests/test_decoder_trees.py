"""Trees of drafts in the decoder: the same text as without them, whichever path is accepted and wherever the cache keeps it."""

import random

import pytest
import torch

from tests.laws import assert_law
from tests.smollm2_fixture import TINY, assert_same_text, recompute, tiny
from tests.test_decoder import padded, prompts, sampling

from specdec_kernels import SamplingTensors  # isort: skip
from specdec_kernels.decoding import DraftBatch, Drafter, ModelForward, SpeculativeDecoder  # isort: skip
from specdec_kernels.decoding.masks import TreeShape  # isort: skip

NEW = 30


class Forest(Drafter):
    """Random trees in which `truth` of each text runs along a random path among decoys; some nodes are not there."""

    deterministic, trees = True, True

    def __init__(self, truth, seed=0, holes=True):
        self.truth, self.random, self.holes = truth, random.Random(seed), holes
        self.outcomes, self.drafted = [], []

    def begin(self, prompts, params, max_tokens):
        self.lengths = [len(p) for p in prompts]

    def propose(self, context):
        tokens, parents, counts = [], [], []
        for text, budget in zip(context.tokens, context.budgets, strict=True):
            known = next((t for t in self.truth if t[: len(text)] == text), text)
            nodes, depth, tail = [], {0: 0}, 0
            for node in range(1, self.random.randint(1, context.max_nodes) + 1 if budget else 0):
                on_path = self.random.random() < 0.5 and depth[tail] < budget and len(known) > len(text) + depth[tail]
                parent = tail if on_path else self.random.choice([n for n in depth if depth[n] < budget])
                token = known[len(text) + depth[tail]] if on_path else self.random.randrange(64)
                while not on_path and (parent, token) in nodes:
                    token = self.random.randrange(64)
                if (parent, token) in nodes or (self.holes and self.random.random() < 0.1):
                    nodes.append((-1, self.random.choice([-1, token])))
                    continue
                nodes.append((parent, token))
                depth[node] = depth[parent] + 1
                tail = node if on_path else tail
            counts.append(len(nodes))
            parents += [p for p, _ in nodes]
            tokens += [t for _, t in nodes]
        self.drafted.append(counts)
        return DraftBatch(
            torch.tensor(tokens, dtype=torch.int32), counts, parents=torch.tensor(parents, dtype=torch.int32)
        )

    def observe(self, outcome):
        self.outcomes.append(outcome)


def texts_of(model, params, **kwargs):
    ids, mask = padded(prompts(len(params.seed)), "left")
    result = SpeculativeDecoder(model, **kwargs).generate(ids, mask, params, max_new_tokens=NEW)
    return ids, mask, [p + t for p, t in zip(prompts(len(params.seed)), result.tokens, strict=True)]


@pytest.mark.parametrize("cache", ["ragged", "paged"])
@pytest.mark.parametrize("kind", TINY)
def test_tree_text_is_the_plain_text(kind, cache):
    model, params = tiny(kind), sampling(3)
    ids, mask, texts = texts_of(model, params)
    drafter = Forest(texts)
    decoder = SpeculativeDecoder(model, drafter, num_draft=4, max_nodes=9, adaptive=False, cache=cache, page_size=4)
    result = decoder.generate(ids, mask, params, max_new_tokens=NEW)
    for b, (prompt, text) in enumerate(zip(prompts(3), texts, strict=True)):
        assert_same_text(model, prompt, result.tokens[b], text[len(prompt) :], params, b)
    paths = [path for o in drafter.outcomes for path in o.paths or []]
    assert any(path != sorted(range(1, len(path) + 1)) for path in paths), "no path that had to be moved"
    assert result.stats.tokens_per_call > 1.5 and result.stats.accepted == sum(map(len, paths))
    assert len(result.stats.drafted_at) <= 4


@pytest.mark.parametrize("rule", ["coupled", "target_only"])
def test_greedy_trees(rule):
    model, params = tiny("qwen3"), SamplingTensors.create(temperature=0.0, batch_size=3)
    ids, mask, texts = texts_of(model, params)
    decoder = SpeculativeDecoder(model, Forest(texts), num_draft=4, max_nodes=8, rule=rule, adaptive=False)
    result = decoder.generate(ids, mask, params, max_new_tokens=NEW)
    for b, (prompt, text) in enumerate(zip(prompts(3), texts, strict=True)):
        assert_same_text(model, prompt, result.tokens[b], text[len(prompt) :], params, b)
    assert result.stats.accepted > 10


@pytest.mark.parametrize("rule", ["coupled", "target_only"])
def test_trees_keep_the_law(rule):
    """Three tokens over several steps, by chi-square against the model's own probabilities."""
    model, rows, prompt = tiny("llama", vocab=6, scale=0.1), 4096, [1, 4, 2]

    class Fixed(Drafter):
        deterministic, trees = True, True

        def begin(self, prompts, params, max_tokens):
            pass

        def propose(self, context):
            # Two children of the root, two behind the first: deterministic, and told apart from the law by their choice.
            tree = [(0, 3), (0, 1), (1, 0), (1, 5)]
            kept = [[node for node in tree if node[0] == 0 or n > 1] if n else [] for n in context.budgets]
            flat = [node for nodes in kept for node in nodes]
            return DraftBatch(
                torch.tensor([t for _, t in flat]), list(map(len, kept)), parents=torch.tensor([p for p, _ in flat])
            )

    params = SamplingTensors.create(temperature=1.0, seed=list(range(rows)), batch_size=rows)
    decoder = SpeculativeDecoder(model, Fixed(), num_draft=2, rule=rule, adaptive=False)
    result = decoder.generate(torch.tensor([prompt] * rows), params=params, max_new_tokens=4)
    assert result.stats.accepted > rows // 2
    assert_law(model, prompt, result.tokens)


@torch.inference_mode()
@pytest.mark.parametrize("kind", TINY)
@pytest.mark.parametrize("packed", [True, False])
def test_tree_forward(kind, packed):
    """Each node's logits are those of the text that leads to it, and so are the tapped states."""
    model = tiny(kind)
    decoder = SpeculativeDecoder(model, packed="auto" if packed else False)
    forward = decoder.forward
    if packed != (type(forward) is not ModelForward):
        pytest.skip("not packed")
    texts = [[5, 9, 2, 7, 1, 3, 8, 4, 4, 60, 12], [11, 4, 30]]
    cache = forward.new_cache(2, 32)
    forward(torch.tensor([texts[0], texts[1] + [0] * 8]), [11, 3], cache)
    cache.advance([11, 3])
    # The second row's tree is deeper than the window, with a sibling at each level, so that places and positions differ.
    shallow, deep = [0, 0, 1, 1, 3, 2], [0, 0, *(n for k in range(9) for n in (2 * k + 1,) * 2)]
    width = len(deep) + 1
    parents = torch.tensor([shallow + [-1] * (len(deep) - len(shallow)), deep])
    tokens = torch.randint(64, (2, width), generator=torch.Generator().manual_seed(2))
    counts = [len(shallow) + 1, width]
    visible = torch.zeros(2, width, width, dtype=torch.bool)
    depth = torch.zeros(2, width, dtype=torch.int64)
    paths = {}
    for b in range(2):
        for n in range(width):
            path = [n]
            while path[0] and int(parents[b, path[0] - 1]) >= 0:
                path.insert(0, int(parents[b, path[0] - 1]))
            visible[b, n, path] = True
            depth[b, n] = len(path) - 1
            paths[b, n] = path
    out = forward(tokens, counts, cache, tree=TreeShape(depth, visible), taps=(0, -1))
    layer = model.model.layers[0]
    row = 0
    for b in range(2):
        for n in range(counts[b]):
            text = texts[b] + tokens[b, paths[b, n]].tolist()
            states = []
            hooks = [
                layer.register_forward_hook(
                    lambda m, a, o, s=states: s.append((o[0] if isinstance(o, tuple) else o)[0, -1])
                ),
                model.lm_head.register_forward_pre_hook(lambda m, a, s=states: s.append(a[0][0, -1])),
            ]
            torch.testing.assert_close(out.logits[row], recompute(model, text)[-1], atol=2e-4, rtol=0)
            for hook in hooks:
                hook.remove()
            torch.testing.assert_close(out.taps[row], torch.cat(states), atol=2e-4, rtol=0)
            row += 1
    assert row == len(out.logits) == len(out.taps)


@pytest.mark.parametrize("trees", [True, False])
@pytest.mark.parametrize("cache", ["ragged", "paged"])
def test_hidden_states_are_those_of_the_text(trees, cache):
    """What `observe` is given, put together, is the states of a forward over the whole text."""
    model, params = tiny("qwen3"), sampling(3)
    ids, mask, texts = texts_of(model, params)
    collected, running = {}, []

    class Listening(Forest):
        taps = (1, -1)

        def begin(self, prompts, params, max_tokens):
            super().begin(prompts, params, max_tokens)
            running[:] = range(len(prompts))
            self.counts = [len(p) for p in prompts]

        def propose(self, context):
            batch = super().propose(context)
            if not trees:
                rows = [
                    next(t for t in texts if t[: len(x)] == x)[len(x) :][:n]
                    for x, n in zip(context.tokens, context.budgets, strict=True)
                ]
                rows = [[t if i != 2 else 0 for i, t in enumerate(r)] for r in rows]
                batch = DraftBatch(torch.tensor([t for r in rows for t in r]), list(map(len, rows)))
            return batch

        def observe(self, outcome):
            counts = self.counts or [a + 1 for a in outcome.accepted]
            for row, part in zip(running, outcome.hidden.split(counts), strict=True):
                collected.setdefault(row, []).append(part)
            self.counts = None

        def select_rows(self, rows):
            running[:] = [running[r] for r in rows]

    drafter = Listening(texts, holes=False)
    drafter.trees = trees
    decoder = SpeculativeDecoder(model, drafter, num_draft=3, max_nodes=6, adaptive=False, cache=cache, page_size=4)
    result = decoder.generate(ids, mask, params, max_new_tokens=NEW)
    assert result.stats.accepted > 10
    for b, (prompt, tokens) in enumerate(zip(prompts(3), result.tokens, strict=True)):
        got = torch.cat(collected[b])
        # The last step may have gone past the end; its last token was not fed.
        want = torch.cat(states_of(model, prompt + tokens), 1)
        n = min(len(got), len(want))
        assert n >= len(prompt) + len(tokens) - 1
        torch.testing.assert_close(got[:n], want[:n], atol=2e-4, rtol=0)


@torch.inference_mode()
def states_of(model, text):
    states = []
    layer = model.model.layers[1]
    hooks = [
        layer.register_forward_hook(lambda m, a, o: states.append((o[0] if isinstance(o, tuple) else o)[0])),
        model.lm_head.register_forward_pre_hook(lambda m, a: states.append(a[0][0])),
    ]
    recompute(model, text)
    for hook in hooks:
        hook.remove()
    return states


def test_errors_of_trees():
    model, params = tiny("llama"), SamplingTensors.create(temperature=0.0, batch_size=1)
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(ValueError, match="rule must be target_only or coupled for a drafter of trees, got 'token'"):
        SpeculativeDecoder(model, Forest([]), rule="token")
    with pytest.raises(ValueError, match="rule must be token, block or coupled for chains, got 'target_only'"):
        chain = Forest([])
        chain.trees = False
        SpeculativeDecoder(model, chain, rule="target_only")
    for nodes in (0, 129, 2.0):
        with pytest.raises(ValueError, match=f"max_nodes must be an int in 1..128, got {nodes}"):
            SpeculativeDecoder(model, Forest([]), max_nodes=nodes)

    class Wrong(Forest):
        def propose(self, context):
            return DraftBatch(torch.zeros(9, dtype=torch.int32), [9], parents=torch.arange(9))

    with pytest.raises(ValueError, match=r"drafter's counts\[0\] must be in \[0, 8\], got 9"):
        SpeculativeDecoder(model, Wrong([]), max_nodes=8).generate(ids, params=params)

    class Deep(Forest):
        def propose(self, context):
            return DraftBatch(torch.zeros(4, dtype=torch.int32), [4], parents=torch.arange(4))

    with pytest.raises(ValueError, match="tree of request 0 must be no deeper than its budget, got 4"):
        SpeculativeDecoder(model, Deep([]), num_draft=3).generate(ids, params=params)
    with pytest.raises(ValueError, match="tree of request 0 must be no deeper than its budget, got 4"):
        SpeculativeDecoder(model, Deep([])).generate(ids, params=params, max_new_tokens=5)
    lying = Wrong([])
    lying.trees = False
    with pytest.raises(ValueError, match="drafter must propose chains"):
        SpeculativeDecoder(model, lying, num_draft=9).generate(ids, params=params)
    tapping = Forest([])
    tapping.taps = (2,)
    with pytest.raises(ValueError, match="Forest: taps must be layers of the target, -1 to 1, got 2"):
        SpeculativeDecoder(model, tapping)
