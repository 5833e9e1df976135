"""Trees that prompt lookup proposes, what it learns from the accepted path, and decoding with them."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.smollm2_fixture import TINY, assert_same_text, tiny
from tests.test_decoder import padded
from tests.test_drafters import begin, context

from specdec_kernels import SamplingTensors, verify_tree  # isort: skip
from specdec_kernels.decoding import PromptLookupDrafter, SpeculativeDecoder, StepOutcome  # isort: skip

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 32
# Behind 7 came 1 twice and 2 once; behind 7 1 came 3 and 4; behind 1 alone came 9 too.
TEXT = [7, 1, 3, 50, 7, 2, 51, 7, 1, 4, 52, 1, 9, 53, 7]


def trees_of(batch, texts):
    """[(parent, token), ..] of each request."""
    if batch is None:
        return [[] for _ in texts]
    nodes = iter(zip(batch.parents.tolist(), batch.tokens.tolist(), strict=True))
    return [[next(nodes) for _ in range(n)] for n in batch.counts]


def propose(drafter, texts, budget=4, **more):
    return trees_of(drafter.propose(context(texts, budget, **more)), texts)


def depths(tree):
    found = [0]
    for parent, _ in tree:
        found.append(found[parent] + 1)
    return found


def follow(tree, truth):
    """The path along which a tree agrees with a text."""
    path = []
    for token in truth:
        node = next((n for n, node in enumerate(tree, 1) if node == (path[-1] if path else 0, token)), None)
        if node is None:
            break
        path.append(node)
    return path


def test_tree_of_several_continuations():
    drafter = begin(PromptLookupDrafter(tree=True, max_nodes=16), [TEXT])
    tree = propose(drafter, [TEXT], 2)[0]
    # 1 before 2, which came less often; behind 7 1 the continuations of that match, the last of equals first, then that of 1.
    assert [t for p, t in tree if p == 0] == [1, 2]
    one, two = tree.index((0, 1)) + 1, tree.index((0, 2)) + 1
    assert [t for p, t in tree if p == one] == [4, 3, 9] and [t for p, t in tree if p == two] == [51]
    scores = [n.draft.score for n in drafter._texts[0].nodes[1:]]
    rates = drafter._rates
    assert scores[one - 1] == pytest.approx(rates[1] * 2 / 3) and scores[two - 1] == pytest.approx(rates[1] / 3)
    four, nine = tree.index((one, 4)), tree.index((one, 9))
    assert scores[four] == pytest.approx(scores[one - 1] * rates[2] / 2)
    left = 1 - rates[2]
    assert scores[nine] == pytest.approx(scores[one - 1] * left * rates[rates.fallback + 1])


def test_tree_of_one_continuation_is_the_chain():
    text = [*range(1, 20), 40, *range(1, 9)]
    tree = propose(begin(PromptLookupDrafter(tree=True, max_nodes=5), [text]), [text], 5)[0]
    assert tree == [(i, 9 + i) for i in range(5)]
    assert begin(PromptLookupDrafter(), [text]).propose(context([text])).tokens.tolist() == [t for _, t in tree]


def test_tree_limits_and_costs():
    drafter = begin(PromptLookupDrafter(tree=True, max_nodes=6), [TEXT])
    assert [len(propose(drafter, [TEXT], 4)[0]), max(depths(propose(drafter, [TEXT], 1)[0]))] == [6, 1]
    few = context([TEXT], 4)
    few.max_nodes = 3
    assert drafter.propose(few).counts == [3]
    assert drafter.propose(context([TEXT], 0)) is None
    # Expected tokens 1 + .23 + .13 + ..: the first draft pays at this cost, the second does not, at the next none does.
    assert propose(drafter, [TEXT], 4, cost=lambda d: 1 + 0.15 * d) == [[(0, 1)]]
    assert propose(drafter, [TEXT], 4, cost=lambda d: 1 + 0.3 * d) == [[]]
    batch = begin(drafter, [[1, 2], TEXT, TEXT]).propose(context([[1, 2], TEXT, TEXT], [4, 4, 0]))
    assert batch.counts == [0, 6, 0] and batch.parents.dtype == batch.tokens.dtype == torch.int32


def test_tree_learns_along_the_path():
    """The drafts behind each node of the path were judged: one of them was drawn there, or none. The others were not."""
    drafter = begin(PromptLookupDrafter(tree=True, max_nodes=7), [TEXT])
    tree = propose(drafter, [TEXT], 2)[0]
    learnt = []
    drafter._rates.update = lambda kind, promised, accepted: learnt.append((kind, promised, accepted))
    path = follow(tree, [2, 51])
    assert len(path) == 2 and path != [1, 2]
    drafter.observe(StepOutcome([[2, 51, 60]], [len(tree)], [2], paths=[path]))
    kinds = drafter._rates
    assert learnt == [
        (kinds.kind(1), pytest.approx(2 / 3), False),
        (kinds.kind(1), pytest.approx(1 / 3), True),
        (kinds.kind(2), pytest.approx(1.0), True),
    ]


def test_tree_copy_goes_on_behind_the_path():
    """7 2 51 was accepted along the second branch, then came 60 where its source has 7: the copy goes on at 1."""
    drafter = begin(PromptLookupDrafter(tree=True), [TEXT])
    tree = propose(drafter, [TEXT], 3)[0]
    path = follow(tree, [2, 51])
    drafter.observe(StepOutcome([[2, 51, 60]], [len(tree)], [2], paths=[path]))
    assert propose(drafter, [[*TEXT, 2, 51, 60]], 1) == [[(0, 1)]]


def test_tree_state_follows_the_rows():
    texts = [TEXT, [3, 4, 8, 3, 4], [5, 6, 7, 5, 6]]
    drafter = begin(PromptLookupDrafter(tree=True), texts)
    trees = propose(drafter, texts, 3)
    drafter.observe(StepOutcome([[9], [8], [60]], list(map(len, trees)), [0, 1, 0], paths=[[], [1], []]))
    drafter.select_rows([1, 2])
    assert propose(drafter, [[*texts[1], 8], [*texts[2], 60]], 1) == [[(0, 3)], [(0, 5)]]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_tree_properties(data):
    """Over whole texts: a trie in `verify_tree`'s layout, likeliest first, of continuations that add up to probabilities; and
    exactly the drafts behind the path's nodes are learnt from."""
    seed, vocab = data.draw(st.integers(0, 2**32 - 1)), data.draw(st.integers(1, 5))
    depth, most = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 20))
    drawn = random.Random(seed)
    texts = [[drawn.randrange(vocab) for _ in range(drawn.randint(1, 20))] for _ in range(2)]
    drafter = begin(PromptLookupDrafter(tree=True, max_nodes=most, history=data.draw(st.sampled_from([0, 30]))), texts)
    for other in range(3):
        begin(drafter, texts) if other else None
        running = [list(t) for t in texts]
        for _ in range(8):
            limits = [drawn.randint(0, depth) for _ in running]
            trees = propose(drafter, running, limits)
            learnt, update = [], type(drafter._rates).update.__get__(drafter._rates)
            drafter._rates.update = lambda *args, learnt=learnt, update=update: learnt.append(args) or update(*args)
            emitted, paths = [], []
            for text, tree, limit, state in zip(running, trees, limits, drafter._texts, strict=True):
                assert len(tree) <= min(most, 16) and max(depths(tree)) <= limit
                assert len(set(tree)) == len(tree) and all(0 <= parent <= i for i, (parent, _) in enumerate(tree))
                assert all(0 <= token < vocab for _, token in tree)
                scores = [1.0, *(node.draft.score for node in state.nodes[1:])]
                assert scores == sorted(scores, reverse=True)
                for n in range(len(tree) + 1):
                    assert sum(s for s, (p, _) in zip(scores[1:], tree, strict=True) if p == n) <= scores[n] + 1e-9
                truth = [drawn.randrange(vocab) for _ in range(limit + 1)]
                paths.append(follow(tree, truth[:limit]))
                emitted.append(truth[: len(paths[-1]) + 1])
                text += emitted[-1]
            drafter.observe(StepOutcome(emitted, list(map(len, trees)), list(map(len, paths)), paths=paths))
            judged = [parent in (0, *path) for tree, path in zip(trees, paths, strict=True) for parent, _ in tree]
            assert len(learnt) == sum(judged) and sum(hit for _, _, hit in learnt) == sum(map(len, paths))
            del drafter._rates.update


def repeating(count, seed=0):
    """Prompts that say similar things again and again, so that their ends had several continuations."""
    drawn = random.Random(seed)
    parts = [[drawn.randrange(64) for _ in range(3)] for _ in range(3)]
    return [[t for _ in range(5 + b) for t in drawn.choice(parts)] for b in range(count)]


def plain_and_trees(model, params, **given):
    """Texts of both, the statistics of the second, and the paths that it accepted."""
    prompts, eos = repeating(len(params.seed)), given.pop("eos", None)
    ids, mask = padded(prompts, "left")
    plain = SpeculativeDecoder(model).generate(ids, mask, params, max_new_tokens=NEW, eos=eos)
    drafter, paths = PromptLookupDrafter(tree=True), []
    observe = drafter.observe
    drafter.observe = lambda outcome: (paths.extend(outcome.paths or []), observe(outcome))
    given = {"adaptive": False, **given}
    result = SpeculativeDecoder(model, drafter, **given).generate(ids, mask, params, max_new_tokens=NEW, eos=eos)
    for b, prompt in enumerate(prompts):
        assert_same_text(model, prompt, result.tokens[b], plain.tokens[b], params, b)
    return result, paths


@pytest.mark.parametrize(("kind", "cache"), [*((kind, "ragged") for kind in TINY), ("llama", "paged")])
def test_text_is_the_plain_text(kind, cache):
    params = SamplingTensors.create(temperature=0.25, seed=[3, 4, 5], batch_size=3)
    result, paths = plain_and_trees(tiny(kind), params, cache=cache)
    assert result.stats.accepted == sum(map(len, paths)) > 5
    assert any(path != list(range(1, len(path) + 1)) for path in paths), "no path that left the first branch"


@pytest.mark.parametrize("rule", ["coupled", "target_only"])
def test_greedy_text_by_either_rule(rule):
    params = SamplingTensors.create(temperature=0.0, seed=0, batch_size=2)
    result, paths = plain_and_trees(tiny("llama"), params, rule=rule)
    assert result.stats.accepted == sum(map(len, paths)) > 5


def test_adaptive_trees_of_rows_that_end_early():
    params = SamplingTensors.create(temperature=0.3, seed=[1, 2, 3, 4], batch_size=4)
    result, _ = plain_and_trees(tiny("qwen3"), params, adaptive=True, eos=[7, 30], num_draft=3)
    assert len(set(result.lengths)) > 1


def test_history_serves_the_next_batch():
    """The same prompt again: the answer is drafted from the last one, whatever the prompt has in it."""
    model, ids = tiny("llama"), torch.tensor([[11, 4, 30, 8, 1, 40]])
    params = SamplingTensors.create(temperature=0.25, seed=1)
    for tree in (True, False):
        decoder = SpeculativeDecoder(model, PromptLookupDrafter(tree=tree, history=100), adaptive=False)
        first = decoder.generate(ids, params=params, max_new_tokens=40)
        second = decoder.generate(ids, params=params, max_new_tokens=40)
        assert first.tokens == second.tokens
        assert second.stats.tokens_per_call > 4 > 1.2 * first.stats.tokens_per_call


def test_verify_tree_takes_the_layout():
    """Without a decoder: the tree's rows from a table of next tokens, verified by the op."""
    following = {7: 2, 2: 51, 51: 7, 1: 9}
    drafter = begin(PromptLookupDrafter(tree=True), [TEXT])
    batch = drafter.propose(context([TEXT], 3))
    logits = torch.zeros(batch.counts[0] + 1, 64)
    for row, token in enumerate([TEXT[-1], *batch.tokens.tolist()]):
        logits[row, following.get(token, 0)] = 9.0
    cu = torch.tensor([0, batch.counts[0]], dtype=torch.int32)
    out = verify_tree(logits, batch.tokens, batch.parents, cu, SamplingTensors.create(temperature=0.0), max_depth=3)
    path = follow(trees_of(batch, [TEXT])[0], [2, 51, 7])
    assert out.path[0].tolist() == path and len(path) == 3 and out.status.tolist() == [0]
