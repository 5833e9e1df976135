"""One test per kind of fault, named after the kind: distribution, reproducibility, and what is around the kernel. See
test_faults.py."""

import pathlib
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import python_ref
import specdec_kernels as sk
from specdec_kernels.eager import _rows
from tests.cases import (
    DTYPES,
    FILTERS,
    Tally,
    assert_same_bits,
    chain,
    compare,
    create,
    ids,
    known_call,
    make_call,
    make_params,
    make_rows,
    offsets,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")
ROOT = pathlib.Path(__file__).parents[1]
INF = float("inf")

# --- distribution -------------------------------------------------------------------------------------------------------


def test_wrong_q(backend):
    """draft_params decide what q is: filtered, plain, or one-hot at temperature 0. Each against the oracle, all different."""
    call, _ = known_call(vocab=300, seed=3, lengths=(3,) * len(FILTERS))
    n = len(FILTERS)
    results = []
    for draft in (call.params, create(1.0, n=n), create(0.0, n=n)):
        changed = call.but(draft_params=draft)
        compare(changed.run(backend), changed.oracle(), Tally())
        results.append(changed.run(backend).tokens)
    assert not torch.equal(results[0], results[1])
    one_hot = call.but(draft_logits=None, draft_params=None).run(backend)
    assert_same_bits(call.but(draft_params=create(0.0, n=n)).run(backend), one_hot)


def test_row_off_by_one(backend):
    """Row i is what draft i guesses: a chain that only its own row supports is accepted, its neighbours' is not."""
    V, d = 20, 4
    path = torch.tensor([3, 9, 1, 14, 7])
    target = torch.full((2 * (d + 1), V), -INF)
    target[torch.arange(5), path] = target[torch.arange(5, 10), path.flip(0)] = 0.0
    drafts = torch.cat([path[:d], path.flip(0)[:d]])
    for params in (create(0.0, n=2), create(1.0, n=2)):
        for rule in ("token", "block", "coupled"):
            out = chain(target, drafts, backend, params=params, lengths=[d, d], rule=rule)
            assert out.tokens.tolist() == [path.tolist(), path.flip(0).tolist()]
            out = chain(target, drafts.roll(1), backend, params=params, lengths=[d, d], rule=rule)
            assert out.num_accepted.tolist() == [0, 0] and out.tokens[:, 0].tolist() == [3, 7]


@pytest.mark.parametrize("emit_bonus", [True, False])
def test_bonus_missing(emit_bonus, backend):
    target = torch.eye(10)[[4, 5, 6, 2]] * 50
    out = chain(target, [4, 5], backend, params=create(1.0, n=2), lengths=[2, 0], emit_bonus=emit_bonus)
    assert out.num_accepted.tolist() == [2, 0]
    assert out.num_emitted.tolist() == ([3, 1] if emit_bonus else [2, 0])
    assert out.tokens.tolist() == ([[4, 5, 6], [2, -1, -1]] if emit_bonus else [[4, 5, -1], [-1, -1, -1]])
    if not emit_bonus:
        out = chain(target, [4, 0], backend, params=create(1.0), emit_bonus=False)  # a rejection emits all the same
        assert out.tokens.tolist() == [[4, 5, -1]] and out.num_emitted.tolist() == [2]


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_mask_not_prefix(temperature, rule, backend):
    target = torch.eye(10)[[1, 2, 3, 4, 5]] * 60
    out = chain(target, [1, 9, 3, 4], backend, params=create(temperature), rule=rule)
    assert out.tokens.tolist() == [[1, 2, -1, -1, -1]] and out.num_accepted.tolist() == [1]


# A seed one of whose first four words on stream 2 at position 0 is tiny: TAIL_TOKEN's.
TAIL_SEED, TAIL_TOKEN, TAIL_WORDS = 256705560, 3, [1806791600, 623050260, 434658046, 0]


def tail_row(factor: float) -> torch.Tensor:
    """Four tokens: TAIL_TOKEN loses the race to the others at factor 0.5 and wins it at 2, by its noise of 2^-33."""
    noise = python_ref.race_noise(TAIL_SEED, 0, 2, 0, 4)
    others = torch.cat([noise[:TAIL_TOKEN], noise[TAIL_TOKEN + 1 :]]).min()
    row = torch.zeros(4, dtype=torch.float64)
    row[TAIL_TOKEN] = (factor * noise[TAIL_TOKEN] / others).log()
    return row.float()[None]


def test_tail_lost(backend):
    """A token of p = 1e-9 is sampled where its uniform says so: noise with a floor of 2^-24 or 2^-31 would never do it."""
    assert python_ref.rng.words(TAIL_SEED, 0, 2, 0, torch.zeros(1, dtype=torch.int64))[0].tolist() == TAIL_WORDS
    params = replace(create(1.0), seed=torch.tensor([TAIL_SEED]))
    assert sk.sample(tail_row(2.0), params, backend=backend).tokens.item() == TAIL_TOKEN


def test_cancellation(backend):
    """log(1 - u) is 0 in float32 for that uniform, and the token would win whatever its probability."""
    params = replace(create(1.0), seed=torch.tensor([TAIL_SEED]))
    assert sk.sample(tail_row(0.5), params, backend=backend).tokens.item() != TAIL_TOKEN


# --- reproducibility ----------------------------------------------------------------------------------------------------


def test_seed_ignored(backend):
    """Another seed, high word only too, another token somewhere; the same seed, the same tokens."""
    rows = make_rows("flat", 1, 100).expand(32, 100)
    base = create(1.0, n=32)
    draw = lambda p, pos=None: sk.sample(rows, p, pos, backend=backend).tokens  # noqa: E731
    first = draw(base)
    assert torch.equal(draw(base), first)
    for seed in (base.seed + 100, base.seed + 2**32, base.seed - 2**63):
        assert (draw(replace(base, seed=seed)) != first).sum() > 20
    for position in (1, 2**32, 2**62):
        assert (draw(base, torch.full((32,), position)) != first).sum() > 20


def test_first_seed_for_all(backend):
    """Equal rows with different seeds differ, in sampling, in coins and in residuals; each is what it is alone."""
    n = 40
    target, q = make_rows("flat", 2, 50), make_rows("flat", 1, 50, seed=1)
    params = create(1.0, n=n)
    options = {"draft_logits": q, "draft_rows": torch.zeros(n, dtype=torch.int64), "draft_params": params}
    x = int((q.softmax(1) - target[:1].softmax(1)).argmax())
    out = chain(target.repeat(n, 1), [x] * n, backend, params=params, lengths=[1] * n, **options)
    assert 0 < out.num_accepted.sum() < n
    assert out.tokens[out.num_accepted == 0, 0].unique().numel() > 5
    for b in (1, 17, n - 1):
        one = create(1.0, n=1, seed=b)
        alone = chain(target, [x], backend, params=one, draft_logits=q, draft_params=one)
        assert out.tokens[b].tolist() == alone.tokens[0].tolist()


def test_zero_draft_advances(backend):
    """A step without drafts draws what its position says, and leaves nothing behind for the next step."""
    target = make_rows("flat", 3, 80)
    params, none = create(1.0), torch.zeros(0, dtype=torch.int32)

    def step(position, drafts):
        drafts = none if drafts is None else torch.tensor(drafts)
        return sk.verify_chain(
            target[: len(drafts) + 1], drafts, offsets([len(drafts)]), params, torch.tensor([position]), backend=backend
        ).tokens

    later = step(8, [5, 6])
    plain = sk.sample(target[:1], params, torch.tensor([7]), backend=backend).tokens
    for _ in range(3):
        assert step(7, None)[0, 0] == plain[0]
    assert torch.equal(step(8, [5, 6]), later)


# --- around the kernel --------------------------------------------------------------------------------------------------

MEMORY_PROGRAM = """
import resource, sys, torch, specdec_kernels as sk
backend, B, K, V = sys.argv[1], int(sys.argv[2]), 3, int(sys.argv[3])
target = torch.empty(B * (K + 1), V, dtype=torch.bfloat16)
for row in target: row.normal_()
params = sk.SamplingTensors.create(1.0, 0.9, batch_size=B, seed=0)
cu = torch.arange(B + 1, dtype=torch.int32) * K
def run(n):
    sk.verify_chain(target, target[: n * K].argmax(1), cu[: n + 1], sk.SamplingTensors(*(getattr(params, f)[:n] for f in
        ("temperature", "top_p", "top_k", "min_p", "seed"))), draft_logits=target, draft_params=sk.SamplingTensors.create(
        1.0, batch_size=n, seed=0), max_draft=K, logprobs=1, return_nucleus=True, backend=backend)
run(2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(B)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / (target.numel() * 4))
"""


def test_fp32_copy_oom(native):
    """The memory that a call adds is a small part of what a float32 copy of its logits would be."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_PROGRAM, native, "96", "100000"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.05


def test_fp32_copy_oom_of_plain_torch(monkeypatch):
    """Plain torch works on a chunk of rows at a time; where the chunks end changes no bit."""
    call = make_call(kind="lm", vocab=50, seed=3)
    slots = replace(call.params, slots=torch.arange(len(FILTERS)).flip(0))

    def run(params):
        chain = call.but(params=params, draft_params=params).run("eager")
        return chain, sk.sample(call.target[:12], params, backend="eager")

    for params in (call.params, slots):
        whole = run(params)
        with monkeypatch.context() as m:
            m.setattr(_rows, "CHUNK_ELEMENTS", 5 * 50)
            assert_same_bits(run(params), whole)


@pytest.mark.parametrize("q", ["logits", "nucleus", "probs"])
def test_in_place_surprise(q, backend):
    """Nothing the caller handed over is changed, hostile values included."""
    call = make_call(kind="hostile", vocab=200, q=q, seed=1)
    options = [
        t
        for v in call.options.values()
        if not isinstance(v, str)
        for t in ([v] if isinstance(v, torch.Tensor) else v if isinstance(v, tuple) else [])
    ]
    given = [call.target, call.drafts, call.cu, call.position, *options]
    given += [getattr(call.params, f) for f in ("temperature", "top_p", "top_k", "min_p", "seed")]
    copies = [t.clone() for t in given]
    call.run(backend)
    rows = torch.arange(call.target.shape[0]) % len(call.lengths)
    for op in (sk.nucleus, sk.sample, sk.filter_probs):
        op(call.target, call.params, rows=rows, backend=backend)
    for a, b in zip(given, copies, strict=True):
        assert_same_bits([a], [b])


@pytest.mark.parametrize("dtype", DTYPES, ids=ids(DTYPES))
def test_parameter_uninitialised(dtype, backend):
    """Each row is processed by its own request's parameters in every dtype: batched as alone, in poisoned memory."""
    call = make_call(kind="lm", vocab=150, dtype=dtype, q="none", lengths=[2] * len(FILTERS), seed=2)
    out = call.run(backend)
    for b, filters in enumerate(FILTERS):
        one = make_params([filters], seed=2)
        one = replace(one, seed=call.params.seed[b : b + 1])
        alone = sk.verify_chain(
            call.target[3 * b : 3 * b + 3], call.drafts[2 * b : 2 * b + 2], offsets([2]), one, call.position[b : b + 1],
            logprobs=1, return_nucleus=True, backend=backend,
        )  # fmt: skip
        assert_same_bits(
            [*(t[0] for t in alone[:5]), *(f[0] for f in alone.nucleus)],
            [*(t[b] for t in out[:5]), *(f[b] for f in out.nucleus)],
        )


@pytest.mark.parametrize(
    "change",
    [{"temperature": 0.3}, {"top_p": 0.3}, {"top_k": 3}, {"min_p": 0.3}, {"seed": 900}, {"temperature": 0.0}],
    ids=str,
)
@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_parameter_ignored(rule, change, backend):
    """Each parameter acts on every row of a chain: the nucleus of rows 0, 1, 2 is that of the changed parameters."""
    n = 16
    target = make_rows("normal", 3, 100).repeat(n, 1)
    drafts = target[:2].argmax(1).repeat(n)
    base = {"temperature": 1.0, "n": n}
    changed = create(**{**base, **change})
    outs = [
        chain(target, drafts, backend, params=p, lengths=[2] * n, rule=rule, return_nucleus=True)
        for p in (create(**base), changed)
    ]
    assert not torch.equal(outs[0].tokens, outs[1].tokens)
    rows = sk.nucleus(target[:3], replace(changed, slots=torch.zeros(3, dtype=torch.int32)), backend=backend)
    for b in range(n):
        for i in range(int(outs[1].num_emitted[b])):
            assert [float(f[b, i]) for f in outs[1].nucleus] == [float(f[i]) for f in rows]
