"""`verify_chain` on every backend against the oracle on the same seeds, and its determinism."""

import importlib
import os
import pathlib
import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

import python_ref
import specdec_kernels as sk
from tests.cases import (
    DTYPES,
    FILTERS,
    KINDS,
    ORDERS,
    Q_SOURCES,
    Tally,
    assert_same_bits,
    compare,
    generator,
    ids,
    known_call,
    make_call,
    make_params,
    make_rows,
    offsets,
)
from tests.tree_cases import make_tree_call

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")
RULES = ("token", "block", "coupled")


@pytest.mark.parametrize("dtype", DTYPES, ids=ids(DTYPES))
@pytest.mark.parametrize("q", Q_SOURCES)
@pytest.mark.parametrize("rule", RULES)
def test_parity(rule, q, dtype, backend):
    """Requests of every filter and of d = 0..3 in one batch, on all kinds of rows; odd vocabularies and filter orders turn."""
    tally = Tally()
    turn = RULES.index(rule) + Q_SOURCES.index(q) + DTYPES.index(dtype)
    for i, kind in enumerate(KINDS):
        if backend == "triton" and (i + turn) % 2:  # the interpreter: every kind in every other test
            continue
        key = {"vocab": (2, 17, 111, 1000)[(i + turn) % 4], "order": ORDERS[(i + turn) % 3]}
        call, ref = known_call(kind=kind, dtype=dtype, q=q, rule=rule, seed=i, **key)
        compare(call.run(backend), ref, tally)
    tally.assert_few()


@pytest.mark.parametrize("vocab", [4096, 4097, 32001, 151936])
@pytest.mark.parametrize("kind", ["normal", "flat", "lm", "hostile"])
def test_parity_of_large_vocabularies(kind, vocab, compiled):
    """What float32 cannot decide grows with the vocabulary (a flat row's tokens have p = 7e-6 each): it is compared too,
    and what differs must stay rare."""
    if compiled == "triton" and vocab > 32001:
        pytest.skip("the interpreter takes seconds a row; test_triton.py has one of 128,256")
    filters = FILTERS[:8] if vocab < 10000 else FILTERS[:4]
    tally = Tally()
    for dtype, q, rule in (
        (torch.float32, "logits", "token"),
        (torch.bfloat16, "nucleus", "token"),
        (torch.float32, "logits", "block"),
    ):
        lengths = (2, 1, 3, 0, 1, 2, 0, 1)[: len(filters)]
        call, ref = known_call(kind=kind, vocab=vocab, dtype=dtype, q=q, filters=filters, lengths=lengths, rule=rule)
        compare(call.run(compiled), ref, tally)
    tally.assert_few(undecided=0.5, differ=0.05)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=ids(DTYPES))
def test_reduced_draft_vocabulary(dtype, rule, backend):
    """Vd != V with a shuffled map that lacks tokens, with a shorter and a longer draft row without a map."""
    tally = Tally()
    for seed, (vocab, reduced, mapped) in enumerate(
        [(111, 40, True), (1000, 300, True), (111, 80, False), (111, 128, False)]
    ):
        g = generator("map", vocab, seed)
        base = make_call(vocab=vocab, dtype=dtype, q="none", rule=rule, seed=seed)
        D = base.drafts.numel()
        logits = make_rows("normal", D, reduced, dtype, seed)
        mapping = None
        if mapped:
            mapping = torch.full((vocab,), -1, dtype=torch.int32)
            mapping[torch.randperm(vocab, generator=g)[:reduced]] = torch.randperm(reduced, generator=g).int()
        request = base.requests
        drawn = python_ref.sample(logits, base.params, rows=request, stream=0, target_to_draft=mapping)
        drafts = drawn.tokens.long() % vocab
        drafts[::5] = torch.randint(vocab, drafts[::5].shape, generator=g)  # also tokens that q cannot propose
        call = base.but(drafts=drafts, draft_logits=logits, draft_params=base.params, target_to_draft=mapping)
        compare(call.run(backend), call.oracle(), tally)
        probs = call.but(
            draft_logits=None,
            draft_params=None,
            draft_probs=python_ref.filter_probs(logits, base.params, rows=request).float(),
        )
        compare(probs.run(backend), probs.oracle(), tally)
    tally.assert_few()


@pytest.mark.parametrize("q", ["logits", "nucleus", "probs"])
def test_engine_layout(q, backend):
    """draft_rows into a [max_requests, K, Vd] buffer, parameters through slots, int32 ids: the plain layout's results."""
    call, _ = known_call(q=q, seed=4)
    want = call.run(backend)
    B, D, K = len(call.lengths), call.drafts.numel(), 5
    name = "draft_probs" if q == "probs" else "draft_logits"
    plain = call.options[name]
    states = torch.randperm(B + 9, generator=generator("slots"))[:B]
    offset = torch.arange(D) - call.cu[:-1].long()[call.requests]
    rows = states[call.requests] * K + offset
    buffer = torch.full((B + 9, K, plain.shape[1]), torch.nan, dtype=plain.dtype)
    buffer.view(-1, plain.shape[1])[rows] = plain

    def in_table(p):
        table = make_params([FILTERS[0]] * (B + 9), seed=99)
        for f in ("temperature", "top_p", "top_k", "min_p", "seed"):
            getattr(table, f)[states] = getattr(p, f)
        return replace(table, slots=states.int())

    params = in_table(call.params)
    changes = {name: buffer, "draft_rows": rows.int(), "params": params, "drafts": call.drafts.int()}
    if q != "probs":
        changes["draft_params"] = params
    assert_same_bits(call.but(**changes).run(backend), want)
    assert_same_bits(call.but(**changes, max_draft=max(call.lengths)).run(backend), want)


def test_target_probs(backend):
    """p taken as it is: no temperature, no filter, and temperature 0 means nothing."""
    tally = Tally()
    for vocab in (2, 300):
        for rule in RULES:
            for q in ("none", "probs", "logits"):
                call = make_call(vocab=vocab, q=q, rule=rule, seed=7)
                probs = make_rows("normal", call.target.shape[0], vocab, seed=9).softmax(1)
                probs[0], probs[3] = 0.0, torch.nan
                call = call.but(target_probs=probs)
                compare(call.run(backend), call.oracle(), tally)
    tally.assert_few()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "options", [{"emit_bonus": False}, {"max_draft": 1}, {"max_draft": 0}, {"max_draft": 9}], ids=str
)
def test_output_options(options, rule, backend):
    if rule == "block" and "emit_bonus" in options:
        pytest.skip("refused: test_contract.py")
    tally = Tally()
    for q in Q_SOURCES:
        call = make_call(vocab=111, q=q, rule=rule, seed=11).but(**options)
        out, ref = call.run(backend), call.oracle()
        assert out.tokens.shape == ref.tokens.shape
        compare(out, ref, tally)
    tally.assert_few()


def test_block_weighs_the_residual(backend):
    """Rejections behind accepted drafts whose running weight is below 1, chosen so that a residual without the weight emits
    another token in five of them."""
    oracle, tally, others = importlib.import_module("python_ref.verify_chain"), Tally(), 0
    unweighted = lambda p, q, noise, *_: python_ref.rows.race_residual(p, q, noise)  # noqa: E731
    for seed in (0, 2, 3, 5):
        call, ref = known_call(
            vocab=300, rule="block", lengths=(4,) * 16, filters=((1.0, 1.0, 0, 0.0),) * 16, seed=seed
        )
        with patch.object(oracle, "race_residual", unweighted):
            others += int((call.oracle().tokens != ref.tokens).any(1).sum())
        compare(call.run(backend), ref, tally)
    tally.assert_few()
    assert others == 5


BAD_OFFSETS = {
    "negative": [0, -3, 2, 4, 6],
    "decreasing": [0, 4, 2, 5, 6],
    "past_the_end": [0, 2, 4, 6, 99],
    "not_from_zero": [2, 3, 4, 5, 6],
    "all_large": [2**31 - 1] * 5,
    "int_min": [0, -(2**31), 2**31 - 1, 3, 6],
}


@pytest.mark.parametrize("name", BAD_OFFSETS)
@pytest.mark.parametrize("missing_rows", [0, 3, 10])
def test_bad_offsets(name, missing_rows, backend):
    """Clamped in the kernel, reported in status, never read out of bounds; the other requests are right."""
    rule = RULES[list(BAD_OFFSETS).index(name) % 3]
    call = make_call(vocab=17, filters=FILTERS[:4], lengths=(2, 1, 1, 2), seed=3, rule=rule)
    target = call.target[: call.target.shape[0] - missing_rows]
    call = call.but(target=target, cu=torch.tensor(BAD_OFFSETS[name], dtype=torch.int32), max_draft=2)
    ref = call.oracle()
    assert (ref.status & 32).any() or (name == "not_from_zero" and missing_rows == 0)  # a window of a longer batch
    compare(call.run(backend), ref, Tally())


def test_coupled_text_is_the_plain_text(backend):
    """Under `coupled` a request's tokens are those of `sample` at the same positions, whatever was drafted."""
    call = make_call(vocab=111, q="none", rule="coupled", lengths=[3] * len(FILTERS), seed=5)
    B = len(FILTERS)
    position = (call.position[:, None] + torch.arange(4)).flatten()
    plain = sk.sample(call.target, call.params, position, rows=torch.arange(B).repeat_interleave(4), backend=backend)
    plain = plain.tokens.view(B, 4)
    right = plain[:, :3].clone()
    right[torch.arange(B), torch.arange(B) % 4 % 3] += (torch.arange(B) % 4 < 3).int()  # one wrong draft, or none
    out = call.but(drafts=right.flatten() % 111).run(backend)
    assert out.num_accepted.tolist() == [b % 4 for b in range(B)]
    for b in range(B):
        n = int(out.num_emitted[b])
        assert out.tokens[b, :n].tolist() == plain[b, :n].tolist()


def test_invariants(backend):
    """Emitted tokens have p > 0, accepted ones are the drafts, p = q accepts everything."""
    for seed in range(3):
        call = make_call(vocab=300, kind="lm", q="logits", lengths=[3] * len(FILTERS), seed=seed)
        out = call.run(backend)
        row = torch.arange(len(FILTERS)).repeat_interleave(4)
        p = sk.filter_probs(call.target, call.params, rows=row, backend=backend).view(len(FILTERS), 4, 300)
        for b in range(len(FILTERS)):
            n, a = int(out.num_emitted[b]), int(out.num_accepted[b])
            assert out.tokens[b, :a].tolist() == call.drafts[3 * b : 3 * b + a].tolist()
            assert (p[b, torch.arange(n), out.tokens[b, :n].long()] > 0).all()
            assert n == a + 1 and (out.tokens[b, n:] == -1).all()
        same = call.target.view(len(FILTERS), 4, 300)[:, :3].reshape(-1, 300)
        offset = torch.arange(3).repeat(len(FILTERS))
        drafts = sk.sample(
            same, call.params, call.position[call.requests], rows=call.requests, stream=0, ids=offset, backend=backend
        ).tokens
        assert (call.but(draft_logits=same, drafts=drafts).run(backend).num_accepted == 3).all()


# --- the same bits, however the work is laid out ------------------------------------------------------------------------


def determinism_calls():
    """Large enough for several threads; more and fewer requests than threads."""
    for q in ("logits", "nucleus"):
        yield make_call(kind="lm", vocab=20011, q=q, dtype=torch.bfloat16, lengths=[3] * 3, filters=FILTERS[:3], seed=1)
    yield make_call(kind="normal", vocab=9001, q="logits", lengths=[2] * len(FILTERS), seed=2)
    yield make_call(kind="flat", vocab=9001, q="none", rule="coupled", lengths=[2] * len(FILTERS), seed=3)
    yield make_call(kind="normal", vocab=9001, rule="block", lengths=[3] * len(FILTERS), seed=6)
    # Top-p alone: its threshold is bracketed, before the scan in flat rows, after it in normal ones.
    for kind, dtype in (("flat", torch.bfloat16), ("flat", torch.float32), ("normal", torch.float32)):
        yield make_call(
            kind=kind, vocab=131072, q="logits", dtype=dtype, lengths=[1] * 2, filters=FILTERS[:1] * 2, seed=4
        )


def all_outputs(backend):
    """Outputs of every op on rows that take every path."""
    outputs = []
    for call in determinism_calls():
        outputs.append(call.run(backend))
        rows = torch.arange(call.target.shape[0]) % len(call.lengths)
        outputs.append(sk.sample(call.target, call.params, rows=rows, logprobs=1, return_nucleus=True, backend=backend))
        outputs.append(sk.filter_probs(call.target, call.params, rows=rows, backend=backend))
    # Entropies, with the bound among the probabilities of a near-flat row.
    outputs.append(make_tree_call("flat", 9001, rule="typical", noise=0.7).but(epsilon=1.0, delta=1.0).run(backend))
    return outputs


def test_rank_divergence(native):
    """Two ranks with the same logits accept the same drafts, whatever their thread counts."""
    torch.set_num_threads(1)
    want = all_outputs(native)
    for n in (2, 3, 4):
        torch.set_num_threads(n)
        for a, b in zip(all_outputs(native), want, strict=True):
            assert_same_bits(a, b, f"{n} threads")


def take(call, order):
    """The call with only the requests `order`, in that order."""
    starts, lengths = call.cu[:-1].tolist(), call.lengths
    drafts = torch.cat([torch.arange(starts[b], starts[b] + lengths[b]) for b in order])
    rows = torch.cat([torch.arange(starts[b] + b, starts[b] + b + lengths[b] + 1) for b in order])
    index = torch.tensor(order)

    def pick(p):
        return sk.SamplingTensors(*(getattr(p, f)[index] for f in ("temperature", "top_p", "top_k", "min_p", "seed")))

    options = {"max_draft": max(lengths)}
    for name in ("draft_logits", "draft_probs"):
        if name in call.options:
            options[name] = call.options[name][drafts]
    if "draft_params" in call.options:
        options["draft_params"] = pick(call.options["draft_params"])
    if "draft_nucleus" in call.options:
        options["draft_nucleus"] = sk.Nucleus(*(f[drafts] for f in call.options["draft_nucleus"]))
    return call.but(
        target=call.target[rows], drafts=call.drafts[drafts], cu=offsets([lengths[b] for b in order]),
        params=pick(call.params), position=call.position[index], **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("q", "rule"), [*((q, "token") for q in Q_SOURCES), ("logits", "block"), ("probs", "block")], ids=str
)
def test_slot_dependent(q, rule, backend):
    """Alone, in reverse, doubled: request b's bits do not change. One thread runs requests, four run rows in parallel."""
    call, _ = known_call(vocab=4097, kind="lm", q=q, rule=rule, seed=6)
    if backend == "triton":  # twelve requests, one by one and twice over, take the interpreter a minute
        call = take(call, range(4))
    B = len(call.lengths)
    torch.set_num_threads(1)
    whole = take(call, range(B)).run(backend)
    orders = [[b] for b in range(B)] + [list(range(B))[::-1], [*range(B), *range(B)], [B - 1, 1]]
    for n in (1, 4) if backend == "native" else (1,):
        torch.set_num_threads(n)
        for order in orders:
            index = torch.tensor(order)
            want = [t[index] for t in (*whole[:5], *whole.nucleus)]
            got = take(call, order).run(backend)
            assert_same_bits([*got[:5], *got.nucleus], want, f"{n} threads, requests {order}")


def test_instruction_sets(native, tmp_path):
    """SPECDEC_CPU_ISA caps the instruction set; all of them give the same bits."""
    root = pathlib.Path(__file__).parents[1]
    dumps = {}
    for isa in ("baseline", "avx2", "avx512"):
        path = tmp_path / f"{isa}.pt"
        code = (
            "import sys, torch, specdec_kernels as sk; from tests.test_verify_chain import all_outputs; from tests.cases import "
            "tensors_of; torch.save([t for o in all_outputs('native') for t in tensors_of(o)], sys.argv[1]); "
            "print(sk.info()['backends']['native (CPU)']['isa'])"
        )
        env = {**os.environ, "SPECDEC_CPU_ISA": isa}
        done = subprocess.run(
            [sys.executable, "-c", code, path],
            cwd=root,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        dumps[done.stdout.split()[-1]] = torch.load(path)
    assert "baseline" in dumps
    want = dumps.pop("baseline")
    for isa, got in dumps.items():
        assert_same_bits(got, want, isa)


def test_reference_and_package_take_the_same_parameters():
    """One object serves both, so that a test cannot hand them different ones."""
    params = make_params(FILTERS[:2])
    rows = make_rows("normal", 2, 9)
    assert torch.equal(python_ref.sample(rows, params).tokens, sk.sample(rows, params, backend="eager").tokens)
