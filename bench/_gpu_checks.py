"""What a GPU is needed for, short of timing: each check takes (device, backend, quick) and returns what it compared.

`quick` is for the interpreter: the same code on shapes it can afford.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

import torch
from torch import Tensor

import python_ref
import specdec_kernels as sk
from tests.cases import (
    DTYPES,
    KINDS,
    ORDERS,
    Q_SOURCES,
    Tally,
    assert_same_bits,
    compare,
    generator,
    make_call,
    make_params,
    make_rows,
)
from tests.tree_cases import RULES as TREE_RULES
from tests.tree_cases import make_tree_call

from ._gpu_caches import bookkeeping, cache_moves, cache_pages
from ._gpu_skipped import Skipped


def to(value, device: torch.device):
    """The value with every tensor in it on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, sk.SamplingTensors):
        return replace(value, **{f.name: to(getattr(value, f.name), device) for f in fields(value)})
    if isinstance(value, sk.Nucleus):
        return sk.Nucleus(*(to(t, device) for t in value))
    return value


def on_tree(call, device: torch.device):
    """A test call of `verify_tree` with its tensors on `device` and max_depth given, which CUDA tensors need."""
    fields_ = {
        name: to(getattr(call, name), device) for name in ("target", "drafts", "parents", "cu", "params", "position")
    }
    options = {name: to(value, device) for name, value in call.options.items()}
    return replace(call, **fields_, options={"max_depth": call.oracle().path.shape[1], **options})


def on(call, device: torch.device):
    """A test call with its tensors on `device` and max_draft given, which CUDA tensors need."""
    options = {name: to(value, device) for name, value in call.options.items()}
    return replace(
        call,
        target=call.target.to(device),
        drafts=call.drafts.to(device),
        cu=call.cu.to(device),
        params=to(call.params, device),
        position=to(call.position, device),
        options={"max_draft": max(call.lengths, default=0), **options},
    )


def cpu(out):
    return type(out)(*(cpu(t) if isinstance(t, tuple) else to(t, torch.device("cpu")) for t in out))


def parity(device: torch.device, backend: str, quick: bool) -> dict:
    """Tokens, counts, status, nuclei and log-probabilities against the oracle, on every kind of row."""
    tally = Tally()
    vocabs = (111,) if quick else (1000, 32_001)
    for r, rule in enumerate(("token", "block", "coupled")):
        for k, q in enumerate(Q_SOURCES):
            # One dtype and filter order for each: what changes between calls is data, and few kernels are compiled.
            key = {"q": q, "rule": rule, "dtype": DTYPES[(r + k) % 3], "order": ORDERS[k % 3]}
            for i, kind in enumerate(KINDS[k::4] if quick else KINDS):
                call = make_call(kind=kind, vocab=vocabs[i % len(vocabs)], seed=i, **key)
                compare(cpu(on(call, device).run(backend)), call.oracle(), tally)
    tally.assert_few()
    return {"requests": tally.total, "undecided": tally.undecided, "differ": tally.differ}


def large_rows(device: torch.device, backend: str, quick: bool) -> dict:
    """Real vocabularies. A flat row's tokens lie below float32's resolution of its mass, so more is undecided."""
    tally = Tally()
    filters = [(0.8, 0.9, 0, 0.0), (1.0, 1.0, 50, 0.0), (0.7, 0.95, 20, 0.05), (0.0, 1.0, 0, 0.0)]
    for vocab in (5000,) if quick else (128_256, 151_936):
        for kind in ("lm", "normal", "flat"):
            for dtype in (torch.bfloat16, torch.float32):
                call = make_call(kind=kind, vocab=vocab, dtype=dtype, filters=filters, lengths=(2, 1, 2, 1))
                compare(cpu(on(call, device).run(backend)), call.oracle(), tally)
    tally.assert_few(undecided=0.5, differ=0.05)
    return {"requests": tally.total, "undecided": tally.undecided, "differ": tally.differ}


@contextmanager
def forced_splits(scan: int, race: int) -> Iterator[None]:
    """The Triton kernels with these numbers of programs per row, as far as a row has parts for them."""
    from specdec_kernels.triton import _launch

    real = _launch._splits
    forced = {4: scan, 2: race}
    _launch._splits = lambda per, rows, vocab, device: min(forced[per], _launch.most_splits(vocab))
    try:
        yield
    finally:
        _launch._splits = real


def splits(device: torch.device, backend: str, quick: bool) -> dict:
    """The same bits for every number of programs, and on a second call (counters are back at zero)."""
    compared = 0
    for kind, rule in (("lm", "token"), ("flat", "token"), ("normal", "block"), ("hostile", "coupled")):
        call = on(
            make_call(kind=kind, vocab=5000 if quick else 128_256, rule=rule, lengths=[2, 0, 1], filters=_SOME), device
        )
        want = call.run(backend)
        assert_same_bits(call.run(backend), want, "a second call")
        for scan, race in ((1, 1), (4, 2)) if quick else ((1, 1), (2, 4), (8, 8), (32, 32)):
            with forced_splits(scan, race):
                assert_same_bits(call.run(backend), want, f"{scan} and {race} programs a row")
            compared += 1
    return {"compared": compared}


_SOME = [(0.8, 0.9, 0, 0.0), (1.0, 0.95, 50, 0.0), (0.9, 1.0, 0, 0.02)]


def graphs(device: torch.device, backend: str, quick: bool) -> dict:
    """Captured once, replayed with other seeds, positions, drafts and lengths: what an eager call gives for them."""
    if device.type != "cuda":
        raise Skipped("CUDA graphs need a CUDA device")
    first = on(make_call(kind="lm", vocab=32_000, lengths=[3, 2, 0], filters=_SOME, seed=0), device)
    other = on(make_call(kind="lm", vocab=32_000, lengths=[1, 3, 1], filters=_SOME, seed=1), device)
    # The same q for both: what changes between replays is what changes between steps.
    other = other.but(draft_logits=first.options["draft_logits"], draft_params=first.params, max_draft=3)
    first = first.but(draft_params=first.params)
    want = [call.run(backend) for call in (first, other)]
    out = first.run(backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first.run(backend, out=out)
    inputs = [[t.clone() for t in _inputs(call)] for call in (first, other)]
    for _ in range(2):
        for values, expected in zip(inputs, want, strict=True):
            for held, value in zip(_inputs(first), values, strict=True):
                held.copy_(value)
            for t in out[:4]:
                t.fill_(12345)
            graph.replay()
            assert_same_bits(out, expected, "replay")
    return {"replays": 4}


def _inputs(call) -> list[Tensor]:
    return [call.target, call.drafts, call.cu, call.position, call.params.seed]


def compiled(device: torch.device, backend: str, quick: bool) -> dict:
    """torch.compile(fullgraph=True, mode="reduce-overhead") equals eager, call after call."""
    if device.type != "cuda":
        raise Skipped("mode='reduce-overhead' means CUDA graphs")
    call = on(make_call(kind="lm", vocab=32_000, lengths=[2, 1, 0], filters=_SOME), device)

    def step(target, drafts, cu, position, q):
        out = sk.verify_chain(
            target * 1.0, drafts, cu, call.params, position, draft_logits=q, draft_params=call.params, max_draft=2,
            backend=backend,
        )  # fmt: skip
        return out.tokens + 0, out.num_emitted + position.to(torch.int32)

    fast = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    for shift in range(4):
        arguments = (call.target, call.drafts, call.cu, call.position + shift, call.options["draft_logits"])
        want = step(*arguments)
        got = fast(*arguments)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    return {"calls": 4}


def nan_and_ties(device: torch.device, backend: str, quick: bool) -> dict:
    """NaN counts as -inf wherever it stands; greedy takes the lowest id of equal maxima, across tiles and programs."""
    vocab = 9000 if quick else 128_256
    places = [(0, vocab - 1), (4095, 4096), (127, 128), (vocab // 2, vocab - 1)]
    rows = make_rows("normal", len(places), vocab).clamp(-3, 3).to(device)
    for n, pair in enumerate(places):
        rows[n, list(pair)] = 5.0
        rows[n, 1::1000] = torch.nan
    params = to(sk.SamplingTensors.create(0.0, batch_size=len(places)), device)
    for dtype in DTYPES:
        out = sk.sample(rows.to(dtype), params, logprobs=1, backend=backend)
        assert out.tokens.tolist() == [a for a, _ in places], out.tokens
        assert out.status.tolist() == [2] * len(places)
    return {"rows": 3 * len(places)}


def past_two_to_the_31(device: torch.device, backend: str, quick: bool) -> dict:
    """More than 2^31 elements: the last requests of a large batch equal the same requests alone."""
    if device.type != "cuda":
        raise Skipped("needs a CUDA device")
    vocab, batch, d = 128_256, 4300, 3
    needed = 2 * (batch * (d + 1) + batch * d) * vocab
    free, _ = torch.cuda.mem_get_info(device)
    if free < needed + (4 << 30):
        raise Skipped(f"{needed >> 30} GiB of device memory, {free >> 30} are free")
    generator = torch.Generator(device).manual_seed(0)
    target = torch.empty(batch * (d + 1), vocab, dtype=torch.bfloat16, device=device).normal_(0, 3, generator=generator)
    draft = torch.empty(batch * d, vocab, dtype=torch.bfloat16, device=device).normal_(0, 3, generator=generator)
    assert target.numel() > 2**31
    params = to(sk.SamplingTensors.create(0.8, 0.9, seed=list(range(batch))), device)
    drafts = torch.randint(vocab, (batch * d,), generator=generator, device=device)
    cu = torch.arange(batch + 1, dtype=torch.int32, device=device) * d
    whole = sk.verify_chain(
        target, drafts, cu, params, draft_logits=draft, draft_params=params, max_draft=d, backend=backend
    )
    last = batch - 8
    few = to(sk.SamplingTensors.create(0.8, 0.9, seed=list(range(last, batch))), device)
    alone = sk.verify_chain(
        target[last * (d + 1) :].clone(), drafts[last * d :], cu[:9], few,
        draft_logits=draft[last * d :].clone(), draft_params=few, max_draft=d, backend=backend,
    )  # fmt: skip
    for a, b in zip(whole[:4], alone[:4], strict=True):
        assert torch.equal(a[last:], b)
    return {"elements": target.numel()}


def row_ops(device: torch.device, backend: str, quick: bool) -> dict:
    """`sample`, `nucleus`, `filter_probs` and `markov_step` against the oracle."""
    tally = Tally()
    for i, kind in enumerate(KINDS[:: 3 if quick else 1]):
        rows, params = make_rows(kind, 12, 1000, DTYPES[i % 3]), make_params()
        out = sk.sample(to(rows, device), to(params, device), logprobs=1, return_nucleus=True, backend=backend)
        compare(cpu(out), python_ref.sample(rows, params), tally)
        probs = sk.filter_probs(to(rows, device), to(params, device), backend=backend).cpu()
        decided = python_ref.nucleus(rows, params).margin > 1e-5
        difference = (probs - python_ref.filter_probs(rows, params)).abs()[decided]
        assert not difference.numel() or difference.max() < 1e-6
        # Eighths and multiples of 2^-8, whose sums float32 holds: the row is the oracle's, bit for bit.
        rows = ((rows.float() * 256).round() / 256).clamp(-64, 64).to(rows.dtype)
        head = [torch.randint(-6, 7, (1000, 64), generator=generator("head", s)).div(8).to(rows.dtype) for s in "12"]
        before = torch.arange(12) * 90 - 1
        step = sk.markov_step(
            to(rows, device), before.to(device), *(to(w, device) for w in head), to(params, device),
            return_nucleus=True, backend=backend,
        )  # fmt: skip
        want = python_ref.markov_step(rows, before, *head, params)
        assert torch.equal(step.logits.cpu().nan_to_num(7.0), want.logits.nan_to_num(7.0))
        compare(cpu(sk.SampleOutput(step.tokens, step.status, None, step.nucleus)), want, tally)
    tally.assert_few()
    return {"rows": tally.total, "undecided": tally.undecided}


def trees(device: torch.device, backend: str, quick: bool) -> dict:
    """`verify_tree` by every rule against the oracle, and twice the same bits; `build_tree` and `schedule_lengths` as on the CPU."""
    tally = Tally()
    given = {"typical": {}, "threshold": {"threshold_acc": 0.7}, "synthetic": {"rates": torch.tensor([0.9, 0.5])}}
    for i, (rule, replacement) in enumerate([*TREE_RULES, *((rule, None) for rule in given)]):
        for kind in KINDS[i % 6 :: 6 if quick else 2]:
            key = {"vocab": 111 if quick else (1000, 32_001)[i % 2], "dtype": DTYPES[i % 3], "seed": i}
            call = make_tree_call(kind, rule=rule, replacement=replacement, **key).but(**given.get(rule, {}))
            moved = on_tree(call, device)
            out = moved.run(backend)
            compare(cpu(out), call.oracle(), tally)
            assert_same_bits(moved.run(backend), out, rule)
    tally.assert_few()
    g = torch.Generator().manual_seed(0)
    scores, tokens = torch.rand(5, 60, generator=g).log(), torch.randint(99, (5, 60), generator=g)
    parents = (torch.rand(5, 60, generator=g) * torch.arange(1, 61)).long()
    built = sk.build_tree(*(t.to(device) for t in (scores, tokens, parents)), 24, backend=backend)
    assert_same_bits(cpu(built), sk.build_tree(scores, tokens, parents, 24, backend="eager"))
    curve = 1 / (1 + 0.01 * torch.arange(400).float())
    lengths = sk.schedule_lengths(scores.exp().to(device), steps_per_second=curve.to(device), backend=backend)
    assert torch.equal(lengths.cpu(), sk.schedule_lengths(scores.exp(), steps_per_second=curve, backend="eager"))
    return {"requests": tally.total, "undecided": tally.undecided, "differ": tally.differ}


def tree_graph(device: torch.device, backend: str, quick: bool) -> dict:
    """A graph that builds a tree and verifies it, replayed with other scores, tokens and logits."""
    if device.type != "cuda":
        raise Skipped("CUDA graphs need a CUDA device")
    B, C, n, vocab = 3, 60, 24, 32_000
    g = torch.Generator(device).manual_seed(0)
    params = to(sk.SamplingTensors.create(1.0, 0.9, seed=list(range(B))), device)
    cu = torch.arange(B + 1, dtype=torch.int32, device=device) * n
    parents = (torch.rand(B, C, generator=g, device=device) * torch.arange(1, C + 1, device=device)).long()

    def inputs():
        return (
            torch.rand(B, C, generator=g, device=device).log(), torch.randint(50, (B, C), generator=g, device=device),
            4 * torch.randn(B * (n + 1), vocab, generator=g, device=device).index_add_(
                1, torch.arange(50, device=device), torch.full((B * (n + 1), 50), 2.0, device=device)
            ),
        )  # fmt: skip

    def step(scores, tokens, target):
        tree = sk.build_tree(scores, tokens, parents, n, backend=backend)
        return sk.verify_tree(
            target, tree.tokens.flatten(), tree.parents.flatten(), cu, params, max_depth=8, backend=backend
        )

    first, other = inputs(), inputs()
    want = [step(*values) for values in (first, other)]
    held = [t.clone() for t in first]
    step(*held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(*held)
    for _ in range(2):
        for values, expected in zip((first, other), want, strict=True):
            for into, value in zip(held, values, strict=True):
                into.copy_(value)
            graph.replay()
            assert_same_bits(out[:5], expected[:5], "replay")
    assert max(int(w.num_accepted.max()) for w in want) > 0
    return {"replays": 4}


CHECKS: tuple[Callable, ...] = (
    parity, large_rows, row_ops, trees, cache_moves, cache_pages, bookkeeping, splits, nan_and_ties, graphs, tree_graph, compiled, past_two_to_the_31,
)  # fmt: skip
