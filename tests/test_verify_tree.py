"""`verify_tree` on every backend that has it against the oracle on the same seeds, and what else is promised of it."""

from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare

import python_ref
import specdec_kernels as sk
from tests.cases import (
    DTYPES,
    FILTERS,
    KINDS,
    ORDERS,
    Tally,
    assert_same_bits,
    compare,
    create,
    generator,
    ids,
    make_call,
    make_rows,
    offsets,
    tensors_of,
)
from tests.tree_cases import RULES, TREES, known_tree_call, make_tree_call

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")
NAMES = [f"{rule}-{replacement}".removesuffix("-None") for rule, replacement in RULES]


def q_sources(rule):
    return ("none",) if rule == "target_only" else ("logits", "nucleus", "probs")


@pytest.mark.parametrize("dtype", DTYPES, ids=ids(DTYPES))
@pytest.mark.parametrize(("rule", "replacement"), RULES, ids=NAMES)
def test_parity(rule, replacement, dtype, backend):
    """Trees of every shape and filter in one batch, on all kinds of rows; vocabularies and filter orders turn. In Triton's
    interpreter each kind of row once per rule."""
    tally, deepest = Tally(), 0
    for k, q in enumerate(q_sources(rule)):
        for i, kind in enumerate(KINDS):
            if backend == "triton" and (i + k + DTYPES.index(dtype)) % (3 * len(q_sources(rule))):
                continue
            turn = i + k + DTYPES.index(dtype)
            key = {"vocab": (2, 17, 111, 1000)[turn % 4], "order": ORDERS[turn % 3], "seed": turn}
            call, ref = known_tree_call(kind=kind, dtype=dtype, rule=rule, replacement=replacement, q=q, **key)
            compare(call.run(backend), ref, tally)
            deepest = max(deepest, int(ref.num_accepted.max()))
    tally.assert_few()
    assert deepest >= (2 if backend == "triton" else 3)


@pytest.mark.parametrize("kind", ["normal", "flat", "lm", "hostile"])
@pytest.mark.parametrize(("rule", "replacement"), RULES, ids=NAMES)
def test_parity_of_a_large_vocabulary(rule, replacement, kind, native):
    tally = Tally()
    for dtype in (torch.float32, torch.bfloat16):
        trees = [TREES["pairs"], TREES["star"], TREES["chain"]]
        call = make_tree_call(
            kind, 32001, dtype, rule, replacement, trees=trees, filters=FILTERS[:2] + FILTERS[4:5], noise=0.3
        )
        compare(call.run(native), call.oracle(), tally)
    tally.assert_few(undecided=0.5, differ=0.05)


def test_many_siblings(backend):
    """Stars and deep trees at the limit of 128 drafts; what is past it is not looked at, and reported."""
    tally = Tally()
    trees = [[0] * 128, list(range(128)), [0] * 131, [n // 3 for n in range(128)]]
    for rule, replacement in RULES:
        vocab = 150 if backend == "triton" else 400
        call = make_tree_call(
            "normal", vocab, rule=rule, replacement=replacement, trees=trees, filters=[(1.0, 1.0, 0, 0.0)] * 4
        )
        ref = call.oracle()
        compare(call.run(backend), ref, tally)
        assert (ref.status & 32).bool().tolist() == [False, False, True, False]
    tally.assert_few(undecided=0.3)


@pytest.mark.parametrize(("rule", "replacement"), RULES, ids=NAMES)
def test_repeated_siblings(rule, replacement, backend):
    """A token counts once among siblings, whatever the rule makes of the second."""
    tally, trees = Tally(), [[0, 0, 0, 0], [0, 0, 1, 1, 1, 2, 2], [0] * 6]
    for seed in range(3):
        call = make_tree_call(
            "normal", 12, rule=rule, replacement=replacement, trees=trees, filters=[(0.7, 1.0, 0, 0.0)] * 3, seed=seed
        )
        first = torch.tensor([0, 0, 2, 2, 4, 4, 6, 6, 6, 9, 9, 11, 11, 11, 14, 14, 16])
        call = call.but(drafts=call.drafts[first])
        compare(call.run(backend), call.oracle(), tally)
    tally.assert_few()


@pytest.mark.parametrize(
    ("tree", "chain"),
    [(("target_only", None), "token"), (("recursive", True), "token"), (("traversal", False), "block")],
    ids=str,
)
def test_a_chain_is_verified_as_by_verify_chain(tree, chain, backend):
    """Bit for bit: the same coins, noise and arithmetic."""
    for seed in range(4):
        q = "none" if tree[0] == "target_only" else ("logits", "nucleus", "probs", "logits")[seed]
        call = make_call(("normal", "lm", "hostile", "tied")[seed], 300, q=q, rule=chain, seed=seed)
        want = call.run(backend, max_draft=4)
        parents = torch.cat([torch.arange(d) for d in call.lengths])
        options = {k: v for k, v in call.options.items() if k not in ("rule", "max_draft")}
        got = sk.verify_tree(
            call.target, call.drafts, parents, call.cu, call.params, call.position, rule=tree[0], replacement=tree[1],
            max_depth=4, logprobs=1, return_nucleus=True, backend=backend, **options,
        )  # fmt: skip
        for name in ("tokens", "num_accepted", "num_emitted", "status", "logprobs", "nucleus"):
            a, b = getattr(got, name), getattr(want, name)
            if tree[0] == "traversal" and name in ("logprobs", "nucleus"):
                continue
            assert_same_bits(a, b, f"{name} {seed}")


@pytest.mark.parametrize(("rule", "replacement"), RULES, ids=NAMES)
def test_target_probs_and_reduced_vocabulary(rule, replacement, backend):
    tally = Tally()
    for seed in range(3):
        call = make_tree_call("normal", 111, rule=rule, replacement=replacement, q="probs", seed=seed)
        probs = make_rows("normal", call.target.shape[0], 111, seed=seed + 9).softmax(1)
        probs[0], probs[3] = 0.0, torch.nan
        changed = call.but(target_probs=probs)
        compare(changed.run(backend), changed.oracle(), tally)
        if rule != "target_only":
            mapping = torch.randperm(111, generator=generator("map", seed)).int()
            mapping[::7] = -1
            changed = call.but(target_to_draft=mapping)
            compare(changed.run(backend), changed.oracle(), tally)
    tally.assert_few()


BAD_PARENTS = {
    "itself": [0, 2, 1, 0],
    "later": [3, 0, 0, 1],
    "negative": [0, -2, 1, 0],
    "huge": [0, 2**31 - 1, -(2**31), 0],
    "cut_off": [-1, 1, 2, 0],
}


@pytest.mark.parametrize("name", BAD_PARENTS)
def test_bad_parents(name, backend):
    """A draft whose parent makes no sense is not there, nor what hangs from it; reported, but for -1 which is ordinary."""
    trees = [BAD_PARENTS[name], [0, 0, 1, 2]]
    for rule, replacement in RULES:
        call = make_tree_call("lm", 50, rule=rule, replacement=replacement, trees=trees, filters=FILTERS[:2])
        call = call.but(drafts=torch.where(call.drafts < 0, 3, call.drafts))
        ref = call.oracle()
        compare(call.run(backend), ref, Tally())
        assert (int(ref.status[0]) & 32 > 0) == (name != "cut_off") and not int(ref.status[1]) & 32


@pytest.mark.parametrize("offsets_", [[0, -3, 2, 4], [0, 4, 2, 5], [0, 2, 4, 99], [2**31 - 1] * 4], ids=str)
def test_bad_offsets(offsets_, backend):
    for missing in (0, 4, 20):
        call = make_tree_call("normal", 17, trees=[[0, 0], [0, 1], [0]], filters=FILTERS[:3])
        target = call.target[: max(call.target.shape[0] - missing, 0)]
        call = call.but(target=target, cu=torch.tensor(offsets_, dtype=torch.int32), max_depth=2)
        ref = call.oracle()
        assert (ref.status & 32).any()
        compare(call.run(backend), ref, Tally())


def test_depth_is_cut(backend):
    for rule, replacement in RULES:
        filters = FILTERS[:4] if backend == "triton" else FILTERS
        call = make_tree_call("lm", 60, rule=rule, replacement=replacement, filters=filters, noise=0.1)
        for depth in (0, 1, 2, 9):
            changed = call.but(max_depth=depth)
            out = changed.run(backend)
            assert out.tokens.shape[1] == depth + 1 and out.path.shape[1] == depth
            compare(out, changed.oracle(), Tally())


def test_only_visited_rows_are_read(backend):
    """target_only: rows off the accepted path may hold anything. NaN would show in the status of a row that is looked at."""
    call = make_tree_call(
        "lm", 500, trees=[TREES["unbalanced"], TREES["pairs"], TREES["star"]], filters=FILTERS[:1] * 3
    )
    want = call.run(backend)
    keep = torch.zeros(call.target.shape[0], dtype=torch.bool)
    for b in range(3):
        keep[int(call.cu[b]) + b + torch.tensor([0, *want.path[b, : int(want.num_accepted[b])].tolist()])] = True
    assert 3 < int(keep.sum()) < keep.numel()
    assert_same_bits(call.but(target=torch.where(keep[:, None], call.target, torch.nan)).run(backend), want)


def test_greedy_requests(backend):
    """Temperature 0 under every rule: the path of argmaxes, the lowest id among equals, then the argmax behind it."""
    target = torch.full((7, 30), -1.0)
    for row, best in enumerate((4, 9, 2, 7, 5, 1, 6)):
        target[row, [best, 29]] = 3.0
    drafts, parents = torch.tensor([8, 4, 4, 2, 2, 9]), torch.tensor([0, 0, 0, 2, 4, 2])
    for rule, replacement in RULES:
        q = {} if rule == "target_only" else {"draft_logits": target[1:], "draft_params": create(1.0)}
        out = sk.verify_tree(
            target,
            drafts,
            parents,
            offsets([6]),
            create(0.0),
            rule=rule,
            replacement=replacement,
            backend=backend,
            logprobs=1,
            **q,
        )
        assert out.path[0].tolist() == [2, 4, -1] and out.tokens[0].tolist() == [4, 2, 5, -1], rule
        assert out.logprobs[0].tolist() == [0, 0, 0, 0]


def test_placeholders_are_skipped(backend):
    """A child with an id that is none is passed over; its siblings are tried."""
    target = torch.zeros(4, 20)
    target[0, 5] = 50.0
    for bad in (-1, 20, 2**31 - 1):
        drafts = torch.tensor([bad, 5, bad])
        out = sk.verify_tree(target, drafts, torch.tensor([0, 0, 2]), offsets([3]), create(1.0), backend=backend)
        assert out.path[0].tolist() == [2, -1] and int(out.status) == 16


@pytest.mark.parametrize(("rule", "replacement"), RULES, ids=NAMES)
def test_slot_dependent(rule, replacement, backend):
    """Alone, in reverse, doubled, through slots: request b's bits do not change, whatever the thread count."""
    call = make_tree_call("normal", 900, rule=rule, replacement=replacement, seed=3).but(max_depth=7)
    torch.set_num_threads(1)
    whole = call.run(backend)
    B = len(call.cu) - 1

    def take(order):
        starts, lengths = call.cu[:-1].tolist(), call.cu.long().diff().tolist()
        drafts = torch.cat([torch.arange(starts[b], starts[b] + lengths[b]) for b in order])
        rows = torch.cat([torch.arange(starts[b] + b, starts[b] + b + lengths[b] + 1) for b in order])
        params = replace(call.params, slots=torch.tensor(order, dtype=torch.int32))
        changes = (
            {"draft_rows": call.options["draft_rows"][drafts], "draft_params": params} if rule != "target_only" else {}
        )
        return call.but(
            target=call.target[rows], drafts=call.drafts[drafts], parents=call.parents[drafts], params=params,
            cu=offsets([lengths[b] for b in order]), position=call.position[torch.tensor(order)], **changes,
        )  # fmt: skip

    orders = [[b] for b in range(0, B, 3)] + [list(range(B))[::-1], [*range(B), *range(B)]]
    if backend == "triton":
        orders = [[4], [7, 7, 3]]
    for n in (1, 3) if backend == "native" else (1,):
        torch.set_num_threads(n)
        for order in orders:
            index, got = torch.tensor(order), take(order).run(backend)
            assert_same_bits([*got[:6], *got.nucleus], [t[index] for t in (*whole[:6], *whole.nucleus)], f"{n} {order}")


@pytest.mark.parametrize(("rule", "replacement"), RULES, ids=NAMES)
def test_first_token_has_the_target_s_law(rule, replacement, native):
    """V = 4,096, filters on, 6,000 requests over the same rows: the first token is p's by chi-square, and is
    seen not to be q's."""
    vocab, batch, children, filters = 4096, 6000, 3, {"temperature": 0.9, "top_p": 0.9}
    p_row = make_rows("lm", 1, vocab, seed=5) / 3
    q_row = p_row + 0.5 * make_rows("normal", 1, vocab, seed=7) / 3
    params = sk.SamplingTensors.create(**filters, seed=torch.arange(batch) * 7919 + 3)
    p, q = (
        python_ref.filter_probs(row, sk.SamplingTensors.create(**filters, batch_size=1))[0] for row in (p_row, q_row)
    )
    g = torch.Generator().manual_seed(1)  # only the law of the children matters here
    if rule == "greedy_draft":
        top = q.topk(children - 1).indices
        last = q.scatter(0, top, 0.0).multinomial(batch, replacement=True, generator=g)
        drafts = torch.cat([top.expand(batch, -1), last[:, None]], 1)
    elif replacement is False:
        noise = torch.empty(batch, vocab, dtype=torch.float64).exponential_(generator=g)
        drafts = (q / noise).topk(children, dim=1).indices
    else:
        drafts = q.multinomial(batch * children, replacement=True, generator=g).view(batch, children)
    rows = torch.zeros(batch * children, dtype=torch.int64)
    given = {} if rule == "target_only" else {"draft_logits": q_row, "draft_rows": rows, "draft_params": params}
    out = sk.verify_tree(
        p_row.expand(batch * (children + 1), vocab), drafts.flatten(), rows, offsets([children] * batch), params, rule=rule,
        replacement=replacement, max_depth=1, backend=native, **given,
    )  # fmt: skip
    counts = torch.bincount(out.tokens[:, 0].long(), minlength=vocab).double()
    assert not counts[p == 0].any()
    large = p * batch >= 5
    assert large.sum() > 20

    def p_value(law):
        seen, wanted = (torch.cat([v[large], v[~large].sum()[None]]) for v in (counts, law * batch))
        return chisquare(seen.numpy(), wanted.numpy()).pvalue

    assert p_value(p) > 1e-3
    assert p_value(torch.where(large, q + 1e-9, q) / (q + 1e-9 * large).sum()) < 1e-9
    assert 0.02 < float(out.num_accepted.double().mean()) < 0.98


# --- contract -----------------------------------------------------------------------------------------------------------


def test_out_is_used_and_written_whole(backend):
    for rule, replacement in RULES:
        call = make_tree_call("hostile", 90, rule=rule, replacement=replacement, seed=2).but(max_depth=5)
        for extra in ({}, {"logprobs": 0, "return_nucleus": False}):
            want, out = call.run(backend, **extra), call.run(backend, **extra)
            for t in tensors_of(out):
                t.fill_(torch.nan if t.is_floating_point() else 12345)
            got = call.run(backend, out=out, **extra)
            assert [t.data_ptr() for t in tensors_of(got)] == [t.data_ptr() for t in tensors_of(out)]
            assert_same_bits(got, want)
            assert ((got.tokens >= 0).sum(1) == got.num_emitted).all() and (got.tokens < 90).all()


def test_drawn_child_that_is_not_there(backend):
    """greedy_draft whose last child is a placeholder: nothing was drawn, so p decides about the others alone. (Testing the last
    that is there as if it had been drawn gave P(0) = .56 for p = (.5, .5), q = (.9, .1).)"""
    n = 400 if backend == "triton" else 4000
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    params = create(1.0, n=n)
    out = sk.verify_tree(
        p.expand(3 * n, 2), torch.tensor([0, -1] * n), torch.zeros(2 * n, dtype=torch.int64), offsets([2] * n), params,
        rule="greedy_draft", draft_logits=q, draft_rows=torch.zeros(2 * n, dtype=torch.int64), draft_params=params, max_depth=1,
        backend=backend,
    )  # fmt: skip
    assert abs(float((out.tokens[:, 0] == 0).double().mean()) - 0.5) < 4 * 0.5 / n**0.5
    call = make_tree_call(
        "normal", 40, rule="greedy_draft", trees=[[0, 0, 1, 1], [0] * 131, [0, 0, 0, 9]], filters=FILTERS[:3]
    )
    for drafts in (call.drafts, torch.where(torch.arange(call.drafts.numel()) % 3 == 1, -1, call.drafts)):
        changed = call.but(drafts=drafts)
        compare(changed.run(backend), changed.oracle(), Tally())


def test_greedy_walk_into_an_empty_row(backend):
    target = torch.tensor([[0.0, 9.0], [-torch.inf, -torch.inf]])
    out = sk.verify_tree(
        target, torch.tensor([1]), torch.tensor([0]), offsets([1]), create(0.0), logprobs=1, backend=backend
    )
    assert out.tokens.tolist() == [[1, 0]] and out.logprobs.tolist() == [[0.0, -torch.inf]] and int(out.status) == 1


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_children_of_a_peaked_q(rule, backend):
    """All but the first of three children drawn without replacement live in the last e^-60 of q's mass: the products of what
    they leave must not underflow. (In Triton's interpreter: the tokens of plain torch.)"""
    n = {"native": 20_000, "eager": 3_000, "triton": 30}[backend]
    q, p = torch.tensor([[60.0, 0, 1, 2, 0.5]]), torch.tensor([[-3.0, 2, 1, 0, 1]])
    params = create(1.0, n=n)
    zeros = torch.zeros(n, dtype=torch.int64)
    drafts = sk.sample(q.expand(n, 5), params, stream=0, ids=zeros, num_samples=3, backend=backend).tokens
    rows = torch.zeros(3 * n, dtype=torch.int64)

    def run(backend):
        return sk.verify_tree(
            p.expand(4 * n, 5), drafts.flatten(), rows, offsets([3] * n), params, rule=rule, replacement=False,
            draft_logits=q, draft_rows=rows, draft_params=params, max_depth=1, backend=backend,
        )  # fmt: skip

    out = run(backend)
    if backend == "triton":
        assert len(out.tokens[:, 0].unique()) > 2
        assert_same_bits(out.tokens, run("eager").tokens)
        return
    counts = torch.bincount(out.tokens[:, 0].long(), minlength=5).double()
    assert chisquare(counts.numpy(), (p[0].double().softmax(0) * n).numpy()).pvalue > 1e-3


def test_mass_that_no_id_can_reach(backend):
    """A draft row wider than the target's vocabulary, and a map with holes: what the taken children leave of q is summed."""
    tally = Tally()
    for rule, replacement in RULES[1:]:
        call = make_tree_call("normal", 60, rule=rule, replacement=replacement, seed=5)
        wide = torch.nn.functional.pad(call.options["draft_logits"], (0, 9), value=2.0)
        changed = call.but(draft_logits=wide)
        compare(changed.run(backend), changed.oracle(), tally)
        mapping = torch.randperm(60, generator=generator("holes")).int()
        mapping[::5] = -1
        changed = call.but(target_to_draft=mapping)
        compare(changed.run(backend), changed.oracle(), tally)
    tally.assert_few()
