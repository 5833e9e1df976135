"""The oracle's tree rules against exact enumeration: every rule with the drafters that it is exact for, the ones that it is
not, what they gain over each other, and texts over several steps with the real keys."""

import importlib
from unittest.mock import patch

import pytest
import torch

from python_ref import rng, sample, verify_chain, verify_tree
from tests.enumeration import (
    TOLERANCE,
    KeyRecorder,
    completed,
    expected_accepted,
    make_params,
    text_law,
    total_variation,
)
from tests.keyed import text_law_by_steps
from tests.tree_worlds import (
    SHAPES,
    TreeWorld,
    children_of,
    choose_top,
    draw_greedy_draft,
    draw_iid,
    draw_once_for_all,
    draw_without_replacement,
    tree_step,
)

VISIBLE_BIAS = 1e-2

#: rule, replacement, how the children are drawn
EXACT = [
    ("target_only", None, draw_iid),
    ("target_only", None, draw_without_replacement),
    ("target_only", None, choose_top),
    ("target_only", None, draw_once_for_all),
    ("recursive", True, draw_iid),
    ("recursive", False, draw_without_replacement),
    ("traversal", True, draw_iid),
    ("traversal", False, draw_without_replacement),
    ("greedy_draft", None, draw_greedy_draft),
    # A child that its siblings rule out has q = 0 and ends the node, so these are exact as well.
    ("recursive", False, draw_iid),
    ("traversal", False, draw_iid),
    ("greedy_draft", None, draw_iid),
]
BIASED = [
    ("recursive", True, draw_without_replacement),
    ("traversal", True, draw_without_replacement),
    ("recursive", True, draw_once_for_all),
    ("traversal", True, draw_once_for_all),
    ("recursive", False, choose_top),
    ("traversal", False, choose_top),
    ("greedy_draft", None, choose_top),
]
named = lambda rows: [f"{rule}-{draw.__name__}-{replacement}" for rule, replacement, draw in rows]  # noqa: E731


def bias(w: TreeWorld, law: dict | None = None) -> float:
    law = tree_step(w) if law is None else law
    return total_variation(completed(law, w.p, w.depth + 1), text_law(w.p, w.depth + 1))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("rule", "replacement", "draw"), EXACT, ids=named(EXACT))
def test_one_step_law_is_exact(rule, replacement, draw, shape):
    w = TreeWorld(SHAPES[shape], draw, 3, 5, rule=rule, replacement=replacement)
    law = tree_step(w)
    assert sum(law.values()) == pytest.approx(1, abs=TOLERANCE)
    assert bias(w, law) < TOLERANCE


@pytest.mark.parametrize(("rule", "replacement", "draw"), EXACT[:9], ids=named(EXACT[:9]))
def test_random_tables_and_filters(rule, replacement, draw):
    for seed in range(6):
        w = TreeWorld(
            [0, 0, 1], draw, 4 if seed % 2 else 2, seed, {"top_p": 0.8} if seed > 2 else None, rule, replacement
        )
        assert bias(w) < TOLERANCE


@pytest.mark.parametrize(("rule", "replacement", "draw"), BIASED, ids=named(BIASED))
def test_replacement_mismatch(rule, replacement, draw):
    """Controls: drafters that a rule is not exact for are seen by the same enumeration."""
    worlds = (TreeWorld([0, 0, 0], draw, 4, seed, rule=rule, replacement=replacement) for seed in range(2))
    assert max(map(bias, worlds)) > VISIBLE_BIAS


def test_a_child_with_zero_q_must_end_its_node():
    """Control: iid children verified as drawn without replacement, where a repeated child is rejected like any other."""
    tree = importlib.import_module("python_ref.verify_tree")
    right = tree._draft_left

    def never_zero(q, taken):
        q_now, error = right(q, taken)
        q_now[taken] = 1e-300
        return q_now, error

    w = TreeWorld([0, 0, 0], draw_iid, 4, 1, rule="recursive", replacement=False)
    assert bias(w) < TOLERANCE
    with patch.object(tree, "_draft_left", never_zero):
        assert bias(w) > VISIBLE_BIAS


def test_what_the_rules_gain():
    """traversal accepts never fewer than recursive; without replacement beats iid on the whole."""
    totals = {}
    for seed in range(8):
        for draw, replacement in ((draw_iid, True), (draw_without_replacement, False)):
            accepted = {}
            for rule in ("recursive", "traversal"):
                w = TreeWorld([0, 0, 1, 1], draw, 3, seed, rule=rule, replacement=replacement)
                accepted[rule] = expected_accepted(tree_step(w))
                totals[rule, replacement] = totals.get((rule, replacement), 0.0) + accepted[rule]
            assert accepted["traversal"] >= accepted["recursive"] - TOLERANCE
    assert totals["traversal", False] > totals["recursive", False] > totals["recursive", True]
    assert totals["traversal", True] > totals["recursive", True]


# --- chains are trees --------------------------------------------------------------------------------------------------


def random_chain(seed: int, vocab: int = 12, d: int = 4, temperature: float = 1.0):
    g = torch.Generator().manual_seed(seed)
    target = 2 * torch.randn(d + 1, vocab, generator=g)
    draft = target[:d] + torch.randn(d, vocab, generator=g)
    params = make_params([{"temperature": temperature, "top_p": 0.95}], [seed])
    drafts = sample(draft, params, rows=torch.zeros(d, dtype=torch.int64), stream=0, ids=torch.arange(d)).tokens.long()
    return target, drafts, draft, params


@pytest.mark.parametrize(
    ("tree_rule", "chain_rule"), [("target_only", "token"), ("recursive", "token"), ("traversal", "block")]
)
def test_a_chain_is_verified_as_by_verify_chain(tree_rule, chain_rule):
    """The same coins and noise, so the same tokens: target_only as one-hot drafts, recursive as token, traversal as block."""
    counts = set()
    for seed in range(40):
        target, drafts, draft, params = random_chain(seed, temperature=0.0 if seed % 8 == 7 else 1.0)
        given = {} if tree_rule == "target_only" else {"draft_logits": draft, "draft_params": params}
        cu = torch.tensor([0, len(drafts)])
        chain = verify_chain(target, drafts, cu, params, rule=chain_rule, **given)
        replacement = None if tree_rule == "target_only" else bool(seed % 2)
        tree = verify_tree(
            target, drafts, torch.arange(4), cu, params, rule=tree_rule, replacement=replacement, **given
        )
        for name in ("tokens", "num_accepted", "num_emitted", "status", "logprobs"):
            assert torch.equal(getattr(tree, name), getattr(chain, name)), (seed, name)
        counts.add(int(tree.num_accepted))
        assert tree.path[0].tolist() == [*range(1, int(tree.num_accepted) + 1)] + [-1] * (4 - int(tree.num_accepted))
    assert counts == {0, 1, 2, 3, 4}


# --- several steps, real keys ------------------------------------------------------------------------------------------


def draw_with_keys(w: TreeWorld, text, seed, key_of=lambda anchor, depth, node: (anchor, node - 1)):
    """(drafts, rows of p, row of q behind each draft) with the real `sample` and its keys."""
    params, tokens, contexts, q_rows = make_params([w.filters or {}], [seed]), {}, {0: tuple(text)}, {}
    for node in range(len(w.parents) + 1):
        children = children_of(w.parents, node)
        if not children:
            continue
        row = w.draft(contexts[node])
        depth = len(contexts[node]) - len(text)

        def drawn_by(child, count, of=row):
            position, id_ = key_of(len(text), depth, child)  # noqa: B023
            at, ids = torch.tensor([position]), torch.tensor([id_])
            return sample(of[None], params, at, stream=0, ids=ids, num_samples=count).tokens.flatten().tolist()

        if w.draw is draw_without_replacement:
            drawn = drawn_by(children[0], len(children))
        elif w.draw is draw_greedy_draft:
            fixed = row.topk(min(len(children) - 1, w.vocab)).indices
            rest = row.index_fill(0, fixed, -torch.inf)
            fixed = [*fixed.tolist(), *[-1] * (len(children) - 1 - len(fixed))]
            drawn = [*fixed, *(drawn_by(children[-1], 1, rest) if rest.isfinite().any() else [-1])]
        else:
            drawn = [drawn_by(child, 1)[0] for child in children]
        for child, token in zip(children, drawn, strict=True):
            tokens[child], contexts[child], q_rows[child] = token, (*contexts[node], token), row
    nodes = range(1, len(w.parents) + 1)
    return [tokens[n] for n in nodes], [w.target(contexts[n]) for n in (0, *nodes)], [q_rows[n] for n in nodes]


def stepper(w: TreeWorld, **keys):
    def step(text, memory):
        drafts, p_rows, q_rows = draw_with_keys(w, text, 9, **keys)
        given = {"draft_logits": torch.stack(q_rows), "draft_params": make_params([w.filters or {}], [9])}
        out = verify_tree(
            torch.stack(p_rows), torch.tensor(drafts, dtype=torch.int64), torch.tensor(w.parents), torch.tensor([0, len(drafts)]),
            make_params([w.filters or {}], [9]), torch.tensor([len(text)]), rule=w.rule, replacement=w.replacement,
            **({} if w.rule == "target_only" else given),
        )  # fmt: skip
        return tuple(out.tokens[0, : int(out.num_emitted)].tolist()), ()

    return step


STEPPED = [EXACT[0], EXACT[4], EXACT[5], EXACT[6], EXACT[7], EXACT[8]]


@pytest.mark.parametrize("parents", [[0, 0, 0], [0, 1], [0, 0, 1]], ids=str)
@pytest.mark.parametrize(("rule", "replacement", "draw"), STEPPED, ids=named(STEPPED))
def test_texts_over_steps_with_real_keys(rule, replacement, draw, parents):
    """Four tokens and more over three steps and more. (Over two tokens, two children without replacement always hit.)"""
    w = TreeWorld(parents, draw, 2, 3, rule=rule, replacement=replacement)
    length = 4
    if draw in (draw_without_replacement, draw_greedy_draft) and parents != [0, 1]:
        length, w.parents = 6, parents[-2:] if parents[-1] == 0 else parents
    law, steps = text_law_by_steps(stepper(w), length)
    assert steps >= 3
    assert total_variation(law, text_law(w.p, length)) < TOLERANCE


def test_proposals_reused_in_the_next_step_are_seen():
    """Keyed by absolute position and not by node. (That iid siblings must not share a key is seen in one step: BIASED.)"""
    worst = 0.0
    for seed in range(4):
        w = TreeWorld([0, 1], draw_iid, 2, seed, rule="traversal", replacement=True)
        law, _ = text_law_by_steps(stepper(w, key_of=lambda anchor, depth, node: (anchor + depth, 0)), 4)
        worst = max(worst, total_variation(law, text_law(w.p, 4)))
    assert worst > VISIBLE_BIAS


@pytest.mark.parametrize(("rule", "replacement", "draw"), EXACT[:9], ids=named(EXACT[:9]))
def test_no_random_key_is_read_twice(rule, replacement, draw):
    """Over several steps of a larger vocabulary, every draw of drafter and verifier has a key of its own, so that steps are
    independent given the text and the exact one-step laws multiply."""
    w = TreeWorld([0, 0, 1, 1, 2, 4], draw, 7, 11, rule=rule, replacement=replacement)
    text = []
    with patch.object(rng, "words", recorder := KeyRecorder()):
        for _ in range(8):
            text += stepper(w)(tuple(text), ())[0]
    assert max(recorder.reads.values()) == 1
    assert {key[2] for key in recorder.reads} == {0, 1, 2}
