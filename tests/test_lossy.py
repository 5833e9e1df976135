"""`specdec_kernels.lossy` on every backend that has `verify_tree` against the oracle on the same seeds, and what each rule
gives up, measured."""

import math
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from scipy.stats import chisquare

import python_ref
import specdec_kernels as sk
from specdec_kernels import _schemas
from tests.cases import (
    DTYPES,
    FILTERS,
    KINDS,
    ORDERS,
    Tally,
    assert_same_bits,
    compare,
    create,
    ids,
    make_rows,
    offsets,
    tensors_of,
)
from tests.test_oracle_lossy import typical_accepts
from tests.tree_cases import TREES, make_tree_call

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")
RULES = _schemas.LOSSY_RULES
UNFILTERED = (1.0, 1.0, 0, 0.0)
SETTINGS = {
    "typical": ({}, {"epsilon": 0.6, "delta": 0.8}, {"epsilon": 0.001, "delta": 0.0}),
    "threshold": ({"threshold_single": 0.4, "threshold_acc": 0.5}, {"threshold_acc": 0.3}, {"threshold_single": 0.07}),
    "synthetic": ({"rates": torch.tensor([0.9, 0.8, 0.9, 0.5])}, {"rates": torch.tensor([2.0, torch.nan])}, {"rates": torch.ones(9)}),
}  # fmt: skip
EVERY = [(rule, i) for rule in RULES for i in range(3)]
NAMES = [f"{rule}-{i}" for rule, i in EVERY]


@lru_cache(maxsize=256)
def known_call(rule, i, **key):
    """A call and the oracle's answer, made once for all backends."""
    call = make_tree_call(rule=rule, **key).but(**SETTINGS[rule][i])
    return call, call.oracle()


# --- the same decisions as the oracle ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=ids(DTYPES))
@pytest.mark.parametrize(("rule", "i"), EVERY, ids=NAMES)
def test_parity(rule, i, dtype, backend):
    """Trees of every shape and filter in one batch, on all kinds of rows; vocabularies and filter orders turn."""
    tally, deepest = Tally(), 0
    for k, kind in enumerate(KINDS):
        turn = i + k + DTYPES.index(dtype)
        if backend == "triton" and turn % 3:  # in its interpreter each kind of row once for each setting
            continue
        key = {"vocab": (2, 17, 111, 1000)[turn % 4], "order": ORDERS[turn % 3], "seed": turn}
        call, ref = known_call(rule, i, kind=kind, dtype=dtype, **key)
        compare(call.run(backend), ref, tally)
        deepest = max(deepest, int(ref.num_accepted.max()))
    tally.assert_few(
        undecided=0.1 if backend == "triton" else 0.03
    )  # two calls of twelve requests, two of them at T = 50
    assert deepest >= (1 if rule == "synthetic" and i == 1 else 2 if backend == "triton" else 3)


@pytest.mark.parametrize("kind", ["normal", "flat", "lm", "hostile"])
@pytest.mark.parametrize("rule", RULES)
def test_parity_of_a_large_vocabulary(rule, kind, native):
    """Rows of many tiles, so that entropies are summed over them."""
    tally = Tally()
    trees = [TREES["pairs"], TREES["star"], TREES["chain"], TREES["later_siblings"]]
    for dtype in (torch.float32, torch.bfloat16):
        for filters in (FILTERS[:2] + FILTERS[4:6], [(0.7, 1.0, 0, 0.0), (1.5, 1.0, 0, 0.0)] * 2):
            call = make_tree_call(kind, 32001, dtype, rule, trees=trees, filters=filters, noise=0.3)
            call = call.but(**SETTINGS[rule][0])
            compare(call.run(native), call.oracle(), tally)
    tally.assert_few(undecided=0.25)


def test_many_siblings(backend):
    """Stars and deep trees at the limit of 128 drafts; what is past it is not looked at, and reported."""
    tally, deepest = Tally(), 0
    trees = [[0] * 128, list(range(128)), [0] * 131, [n // 3 for n in range(128)]]
    for rule in RULES:
        options = {"rates": torch.full((128,), 0.99)} if rule == "synthetic" else SETTINGS[rule][0]
        for noise in (0.7, 0.0):
            call = make_tree_call("peaked", 400, rule=rule, trees=trees, filters=[(2.0, 1.0, 0, 0.0)] * 4, noise=noise)
            call = call.but(**options)
            ref = call.oracle()
            compare(call.run(backend), ref, tally)
            assert (ref.status & 32).bool().tolist() == [False, False, True, False]
            deepest = max(deepest, int(ref.num_accepted.max()))
    tally.assert_few(undecided=0.2)
    assert deepest > 15


@pytest.mark.parametrize("rule", RULES)
def test_chains(rule, backend):
    """Without parents every draft hangs from the one before it, at whatever lengths; a placeholder ends its chain."""
    lengths, tally = [3, 0, 1, 5, 0, 2, 4, 1, 5, 3, 5, 0], Tally()
    for kind, index in (("lm", torch.int64), ("hostile", torch.int32)):
        call = make_tree_call(kind, 60, rule=rule, trees=[list(range(d)) for d in lengths], noise=0.1)
        holes = torch.where(torch.arange(call.drafts.numel()) % 11 == 7, -1, call.drafts).to(index)
        call = call.but(drafts=holes, **SETTINGS[rule][0])
        got, ref = call.but(parents=None).run(backend), call.but(parents=None).oracle()
        compare(got, ref, tally)
        assert got.path.shape[1] == 5
        assert_same_bits(got, call.run(backend))
    tally.assert_few()
    bad = torch.tensor([0, 4, -9, 99, *call.cu[4:].tolist()], dtype=torch.int32)
    out = call.but(parents=None, cu=bad, max_depth=5).run(backend)
    assert (out.status & 32).any() and (out.tokens < 60).all() and ((out.tokens >= 0).sum(1) == out.num_emitted).all()
    empty = create(1.0, n=0)
    more = {"rates": torch.ones(1)} if rule == "synthetic" else {}
    ask = getattr(sk.lossy, rule)
    out = ask(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), offsets([]), empty, backend=backend, **more)
    assert out.tokens.shape == (0, 1)


@pytest.mark.parametrize("rule", RULES)
def test_target_probs(rule, backend):
    """Rows taken as they are: empty ones, NaN, and such that do not sum to 1, also in their entropy."""
    tally = Tally()
    for seed in range(3):
        for setting in SETTINGS[rule]:
            call = make_tree_call("normal", 111, rule=rule, seed=seed)
            probs = make_rows("normal", call.target.shape[0], 111, seed=seed + 9).softmax(1)
            probs[0], probs[3], probs[6:9] = 0.0, torch.nan, probs[6:9] * 40
            call = call.but(target_probs=probs, **setting)
            compare(call.run(backend), call.oracle(), tally)
    tally.assert_few()


def test_what_makes_no_sense_is_not_there(backend):
    """Parents, offsets and depths out of range: reported, and the same tree as the oracle's."""
    tally = Tally()
    for rule in RULES:
        for parents in ([0, 2, 1, 0], [3, 0, 0, 1], [0, -2, 1, 0], [0, 2**31 - 1, -(2**31), 0], [-1, 1, 2, 0]):
            call = make_tree_call("lm", 50, rule=rule, trees=[parents, [0, 0, 1, 2]], filters=FILTERS[:2])
            call = call.but(drafts=torch.where(call.drafts < 0, 3, call.drafts), **SETTINGS[rule][0])
            compare(call.run(backend), call.oracle(), tally)
        for cu in ([0, -3, 2, 4], [0, 4, 2, 5], [0, 2, 4, 99], [2**31 - 1] * 4):
            call = make_tree_call("normal", 17, rule=rule, trees=[[0, 0], [0, 1], [0]], filters=FILTERS[:3])
            call = call.but(cu=torch.tensor(cu, dtype=torch.int32), max_depth=2, **SETTINGS[rule][0])
            compare(call.run(backend), call.oracle(), tally)
        for depth in (0, 1, 2, 9):
            call = make_tree_call("lm", 60, rule=rule, noise=0.1).but(max_depth=depth, **SETTINGS[rule][0])
            compare(call.run(backend), call.oracle(), tally)
    tally.assert_few()


def test_duplicates_and_placeholders(backend):
    """A token twice among siblings, children that are none, nodes behind both."""
    tally = Tally()
    trees = [[0, 0, 0, 0, 1, 2, 3], [0, 0, 1, 1, 1, 2], [0, -1, 0, 1, 1, 3]]
    for rule in RULES:
        for seed in range(4):
            call = make_tree_call("lm", 40, rule=rule, trees=trees, filters=FILTERS[:2] + FILTERS[6:7], seed=seed)
            drafts = call.drafts.clone()
            drafts[1], drafts[3], drafts[8], drafts[14] = drafts[0], -1, 40, drafts[13]
            call = call.but(drafts=drafts, **SETTINGS[rule][seed % 3])
            compare(call.run(backend), call.oracle(), tally)
    tally.assert_few()


def test_threshold_at_one_is_target_only(backend):
    """Bit for bit, outputs of every kind."""
    for seed, kind in enumerate(KINDS):
        call = make_tree_call(kind, 300, rule="threshold", seed=seed)
        assert_same_bits(call.run(backend), call.but(rule="target_only").run(backend), kind)
        ours, theirs = call.oracle(), call.but(rule="target_only").oracle()
        assert_same_bits([*ours[:6], *ours.nucleus], [*theirs[:6], *theirs.nucleus], kind)


# --- what each rule gives up ----------------------------------------------------------------------------------------------


def test_threshold_rates_are_those_of_its_law(backend):
    """The real coins: two children, 0.9 times and 1 / 0.8 times."""
    n = {"native": 20_000, "eager": 2_000, "triton": 200}[backend]
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])
    out = sk.lossy.threshold(
        p.log().expand(3 * n, 4), torch.tensor([1, 0] * n), offsets([2] * n), create(1.0, n=n),
        parents=torch.zeros(2 * n, dtype=torch.int64), threshold_acc=0.8, max_depth=1, backend=backend,
    )  # fmt: skip
    law = torch.tensor([0.1 / 0.8, 0.2 / 0.8, *(v * (1 - 0.3 / 0.8) / 0.7 for v in (0.3, 0.4))], dtype=torch.float64)
    counts = torch.bincount(out.tokens[:, 0].long(), minlength=4)
    assert chisquare(counts.numpy(), (law * n).numpy()).pvalue > 1e-3


def test_synthetic_accepts_at_its_rates(backend):
    """Each depth's share of those that reach it, greedy requests too, and the mean; then a token of p."""
    n = {"native": 20_000, "eager": 2_000, "triton": 200}[backend]
    rates = torch.tensor([0.9, 0.35, 0.7])
    p = torch.tensor([0.5, 0.2, 0.2, 0.1])
    params = create(1.0, n=n)
    params = replace(params, temperature=torch.where(torch.arange(n) % 4 == 0, 0.0, 1.0))
    out = sk.lossy.synthetic(
        p.log().expand(5 * n, 4), torch.tensor([3, 2, 1, 0] * n), offsets([4] * n), params, rates=rates, max_depth=4,
        backend=backend,
    )  # fmt: skip
    for some in (params.temperature > 0, params.temperature == 0):
        accepted = out.num_accepted[some]
        for depth, rate in enumerate((*rates.tolist(), 0.0)):
            reached, passed = int((accepted >= depth).sum()), int((accepted > depth).sum())
            assert abs(passed - reached * rate) <= 4 * math.sqrt(reached * rate * (1 - rate)), depth
    products = rates.double().cumprod(0)
    reach = torch.arange(1.0, 4.0, dtype=torch.float64)
    variance = float(((2 * reach - 1) * products).sum() - products.sum() ** 2)
    mean = float(out.num_accepted.double().mean())
    assert abs(mean - float(products.sum())) < 4 * math.sqrt(variance / n)
    last = out.tokens.gather(1, out.num_accepted.long()[:, None])[:, 0]
    assert (last[params.temperature == 0] == 0).all()
    counts = torch.bincount(last[params.temperature > 0].long(), minlength=4)
    assert chisquare(counts.numpy(), (p.double() * counts.sum()).numpy()).pvalue > 1e-3


def test_typical_does_not_draw_what_it_accepts(backend):
    """Other seeds and positions: the same path, another token behind it."""
    call = make_tree_call("normal", 200, rule="typical", noise=0.2, filters=[UNFILTERED] * 12)
    want, seen = call.run(backend), set()
    for seed in range(4):
        params = replace(call.params, seed=call.params.seed + 77 * seed)
        got = call.but(params=params, position=call.position + seed).run(backend)
        assert_same_bits([got.path, got.num_accepted], [want.path, want.num_accepted])
        seen.add(tuple(got.tokens.gather(1, got.num_accepted.long()[:, None])[:, 0].tolist()))
    assert len(seen) == 4 and int(want.num_accepted.max()) >= 2


# --- particular answers ---------------------------------------------------------------------------------------------------


def typical_path(p_rows, drafts, parents, backend, **options) -> list[int]:
    out = sk.lossy.typical(
        None, torch.tensor(drafts), offsets([len(drafts)]), create(1.0), parents=torch.tensor(parents),
        target_probs=torch.tensor(p_rows), backend=backend, **options,
    )  # fmt: skip
    return out.path[0, : int(out.num_accepted)].tolist()


def test_which_accepted_node_wins(backend):
    """The deepest, then the likeliest path, then the lowest id."""
    root, even, sharp = [0.4, 0.3, 0.3], [0.5, 0.25, 0.25], [0.9, 0.05, 0.05]
    assert typical_path([root, even, even, even], [1, 0, 0], [0, 0, 1], backend) == [1, 3]
    assert typical_path([root] + [even] * 4, [1, 0, 0, 0], [0, 0, 1, 2], backend) == [2, 4]
    assert typical_path([root, sharp, even, even, even], [1, 0, 0, 0], [0, 0, 1, 2], backend) == [1, 3]
    assert typical_path([root] + [even] * 4, [1, 2, 0, 0], [0, 0, 2, 1], backend) == [2, 3]
    assert typical_path([root] + [even] * 4, [1, 1, 1, 2], [0, 0, 2, 1], backend) == [2, 3]
    # A deep path below a child that is not likely enough does not count.
    assert typical_path([sharp] + [even] * 4, [1, 0, 0, 0], [0, 0, 1, 3], backend) == [2]


def test_bound_of_typical(backend):
    """min(epsilon, delta * exp(-H)): uniform over 4 is delta / 4; the comparison is strict; delta 0 leaves what has p > 0."""
    uniform = [0.25, 0.25, 0.25, 0.25, 0.0]
    for options, accepted in (
        ({"epsilon": 0.2501, "delta": 4.0}, False), ({"epsilon": 0.2499, "delta": 4.0}, True),
        ({"epsilon": 0.25, "delta": 4.0}, False), ({"epsilon": 1.0, "delta": 1.001}, False),
        ({"epsilon": 1.0, "delta": 0.999}, True), ({"epsilon": 1.0, "delta": 0.0}, True),
    ):  # fmt: skip
        assert typical_path([uniform] * 2, [2], [0], backend, **options) == ([1] if accepted else [])
    assert typical_path([uniform] * 2, [4], [0], backend, epsilon=1.0, delta=0.0) == []
    # Rows that do not sum to 1 are taken as they are; their entropy is at least 0.
    assert typical_path([[0.5, 0.3]] * 2, [0], [0], backend, epsilon=1.0, delta=1.0) == [1]
    assert typical_path([[8.0, 0.6]] * 2, [1], [0], backend, epsilon=1.0, delta=0.5) == [1]
    assert typical_path([[0.5, 1e-39]] * 2, [1], [0], backend, epsilon=1.0, delta=0.0) == []


def test_comparison_with_threshold_single(backend):
    """p = 0.7 as float32 reaches a threshold of 0.7, which is a little more as a double."""
    for p, wanted in ((0.7, 1), (0.69999, 0)):
        counts = sk.lossy.threshold(
            None, torch.tensor([1] * 64), offsets([1] * 64), create(1.0, n=64), backend=backend, threshold_single=0.7,
            target_probs=torch.tensor([[1 - p, p]]).expand(128, 2),
        ).num_accepted  # fmt: skip
        assert int(counts.min()) == wanted


def test_rates_out_of_range(backend):
    """Below 0 and NaN are 0, above 1 is 1, what is not given is 0."""
    inf, nan = torch.inf, torch.nan
    for rates, wanted in (
        ([1.0] * 3, 3), ([5.0, inf, 1.0], 3), ([1.0, 1.0], 2), ([], 0), ([1.0, nan, 1.0], 1), ([1.0, -1.0], 1),
        ([1.0, -inf], 1), ([0.0, 1.0], 0),
    ):  # fmt: skip
        for temperature in (0.0, 1.0):
            out = sk.lossy.synthetic(
                torch.zeros(4, 9), torch.tensor([3, 2, 1]), offsets([3]), create(temperature), rates=torch.tensor(rates),
                backend=backend,
            )  # fmt: skip
            assert int(out.num_accepted) == wanted, rates


def test_greedy_requests(backend):
    """Temperature 0: the path of argmaxes, the lowest id among equals; synthetic takes the first that is there, whose log p is
    then -inf unless it is the argmax."""
    target = torch.full((7, 30), -1.0)
    for row, best in enumerate((4, 9, 2, 7, 5, 1, 6)):
        target[row, [best, 29]] = 3.0
    drafts, parents = torch.tensor([8, 4, 4, 2, 29, 9]), torch.tensor([0, 0, 0, 2, 4, 2])
    for rule in RULES:
        more = {"rates": torch.ones(2)} if rule == "synthetic" else {}
        ask = getattr(sk.lossy, rule)
        out = ask(
            target, drafts, offsets([6]), create(0.0), parents=parents, backend=backend, logprobs=1, max_depth=3, **more
        )
        if rule == "synthetic":
            assert out.path[0].tolist() == [1, -1, -1] and out.tokens[0].tolist() == [8, 9, -1, -1]
            assert out.logprobs[0].tolist() == [-torch.inf, 0, 0, 0]
        else:
            assert out.path[0].tolist() == [2, 4, -1] and out.tokens[0].tolist() == [4, 2, 5, -1], rule
            assert out.logprobs[0].tolist() == [0, 0, 0, 0]
    out = sk.lossy.synthetic(
        target, torch.tensor([29, 9]), offsets([2]), create(0.0), rates=torch.ones(2), logprobs=1, backend=backend
    )
    assert out.logprobs[0].tolist() == [-torch.inf, 0, 0]  # 29 is a maximum, but not the one of the lowest id


@pytest.mark.parametrize("rule", RULES)
def test_only_rows_of_accepted_nodes_matter(rule, backend):
    """threshold and synthetic need the path's rows, typical those of accepted nodes as well; the others may hold anything."""
    call = make_tree_call(
        "lm",
        500,
        rule=rule,
        trees=[TREES["unbalanced"], TREES["pairs"], TREES["star"]],
        filters=[(1.0, 0.9, 0, 0.0)] * 3,
    ).but(**SETTINGS[rule][0])
    want = call.run(backend)
    keep = torch.zeros(call.target.shape[0], dtype=torch.bool)
    for b in range(3):
        nodes = {0, *want.path[b, : int(want.num_accepted[b])].tolist()}
        start = int(call.cu[b])
        if rule == "typical":
            for node, parent in enumerate(call.parents[start : int(call.cu[b + 1])].tolist(), 1):
                p = python_ref.filter_probs(call.target[start + b + parent][None], call.params, rows=torch.tensor([b]))[
                    0
                ]
                if parent in nodes and typical_accepts(p)[call.drafts[start + node - 1]]:
                    nodes.add(node)
        keep[start + b + torch.tensor(sorted(nodes))] = True
    assert 3 < int(keep.sum()) < keep.numel()
    assert_same_bits(call.but(target=torch.where(keep[:, None], call.target, torch.nan)).run(backend), want)


# --- contract ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_slot_dependent(rule, backend):
    """Alone, in reverse, doubled, through slots: request b's bits do not change, whatever the thread count."""
    call = make_tree_call("normal", 900, rule=rule, seed=3).but(max_depth=7, **SETTINGS[rule][0])
    whole = call.run(backend)
    B = len(call.cu) - 1

    def take(order):
        starts, lengths = call.cu[:-1].tolist(), call.cu.long().diff().tolist()
        drafts = torch.cat([torch.arange(starts[b], starts[b] + lengths[b]) for b in order])
        rows = torch.cat([torch.arange(starts[b] + b, starts[b] + b + lengths[b] + 1) for b in order])
        params = replace(call.params, slots=torch.tensor(order, dtype=torch.int32))
        return call.but(
            target=call.target[rows], drafts=call.drafts[drafts], parents=call.parents[drafts], params=params,
            cu=offsets([lengths[b] for b in order]), position=call.position[torch.tensor(order)],
        )  # fmt: skip

    for n in (1, 3) if backend == "native" else (1,):
        torch.set_num_threads(n)
        for order in [[b] for b in range(0, B, 3)] + [list(range(B))[::-1], [*range(B), *range(B)]]:
            index, got = torch.tensor(order), take(order).run(backend)
            assert_same_bits([*got[:6], *got.nucleus], [t[index] for t in (*whole[:6], *whole.nucleus)], f"{n} {order}")


def test_out_is_used_and_written_whole(backend):
    for rule in RULES:
        call = make_tree_call("hostile", 90, rule=rule, seed=2).but(max_depth=5, **SETTINGS[rule][0])
        for extra in ({}, {"logprobs": 0, "return_nucleus": False}):
            want, out = call.run(backend, **extra), call.run(backend, **extra)
            for t in tensors_of(out):
                t.fill_(torch.nan if t.is_floating_point() else 777)  # not what fills new memory
            got = call.run(backend, out=out, **extra)
            assert [t.data_ptr() for t in tensors_of(got)] == [t.data_ptr() for t in tensors_of(out)]
            assert_same_bits(got, want)
            assert ((got.tokens >= 0).sum(1) == got.num_emitted).all() and (got.tokens < 90).all()
