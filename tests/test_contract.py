"""What every op promises around its numbers: registration, compilation, outputs, errors, backend choice."""

import logging
import os
import pathlib
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing

import specdec_kernels as sk
from specdec_kernels import _backends, _schemas
from tests.cases import assert_same_bits, make_call, make_params, make_rows, offsets, tensors_of
from tests.kv_states import make_state

ROOT = pathlib.Path(__file__).parents[1]
N = 3
FILTERS = [(0.8, 0.9, 0, 0.0), (0.0, 1.0, 0, 0.0), (1.0, 1.0, 5, 0.1)]


# --- registration -------------------------------------------------------------------------------------------------------


def op_arguments(name: str, full: bool) -> tuple:
    """Arguments of the raw op: every optional one given, or none."""
    p = make_params(FILTERS)
    opt = lambda t: t if full else None  # noqa: E731
    filters = (p.temperature, p.top_p, p.top_k, p.min_p)
    slots = opt(torch.tensor([2, 0, 1], dtype=torch.int32))
    # Outputs start as what no op leaves there: opcheck sees an undeclared write by a changed value only.
    f32 = lambda *shape: torch.full(shape, 0.12345)  # noqa: E731
    i32 = lambda *shape: torch.full(shape, 12345, dtype=torch.int32)  # noqa: E731
    logits = make_rows("normal", N, 40, torch.bfloat16 if full else torch.float32)
    rows = opt(torch.tensor([0, 1, 2]))
    if name == "nucleus":
        return (logits, *filters, slots, rows, 0, f32(N), f32(N), f32(N), i32(N))
    if name == "filter_probs":
        return (logits, *filters, slots, rows, 1, f32(N, 40), i32(N))
    if name == "sample":
        keys = (opt(torch.arange(N)), rows, opt(torch.arange(N)), opt(torch.arange(40)))
        return (logits, *filters, p.seed, slots, *keys, 2, 0, i32(N), i32(N), *(opt(f32(N)) for _ in range(4)))
    if name == "markov_step":
        keys = (opt(torch.arange(N)), rows, opt(torch.arange(N)), opt(torch.arange(40)))
        head = (torch.randn(40, 6), torch.randn(40, 6))
        outputs = (torch.full_like(logits, 0.12345), i32(N), i32(N), *(opt(f32(N)) for _ in range(3)))
        return (logits, torch.tensor([3, -1, 39]), *head, *filters, p.seed, slots, *keys, 0, 0, *outputs)
    if name == "schedule_lengths":
        given = (torch.tensor([2, 9, -1]), torch.rand(12)) if full else (None, None)
        return (torch.rand(N, 4), *given, -1 if full else 3, i32(N))
    if name == "build_tree":
        index = torch.zeros(N, 6, dtype=torch.int32 if full else torch.int64)
        outputs = (i32(N, 4), i32(N, 4), i32(N, 5), i32(N, 4), torch.zeros(N, 5, 5, dtype=torch.bool), i32(N, 5, 1))
        return (torch.randn(N, 6), index + torch.arange(6).to(index), index, *outputs)
    if name in ("kv_rollback", "kv_append_slots", "kv_evict"):
        state = make_state([5, 0, 9], 4, 4, share=0.5)
        given = (state.free_pages, state.num_free, opt(state.ref_counts), slots, 4, 7 if full else -1)
        if name == "kv_evict":
            return (state.seq_lens, 1, state.block_table, *given, 4 if full else 0, i32(N))
        window = (6, 3) if full else (0, 0)
        outputs = (*window, i32(N)) if name == "kv_rollback" else (torch.full((N, 6), 12345), i32(N), i32(N), i32(N))
        return (state.seq_lens, torch.tensor([3, 0, 6], dtype=torch.int32), state.block_table, *given, *outputs)
    if name == "kv_scrub":
        state = make_state([5, 0, 9], 4, 4, share=0.5)
        held = (state.seq_lens, torch.tensor([3, 0, 6], dtype=torch.int32), state.block_table, state.ref_counts)
        pages = (state.free_pages, state.num_free - 3, state.num_free)
        caches = [torch.rand(state.free_pages.shape[0], 4, 2, 4) for _ in range(2)]
        return (caches, *pages, *map(opt, held), slots, 7 if full else -1)
    if name == "kv_copy_pages":
        pages = torch.tensor([2, -1, 0]), torch.tensor([1, 2, 9])
        return ([torch.rand(N, 9, 2, 4) for _ in range(2)], *(t if full else t.int() for t in pages))
    if name == "kv_compact":
        caches = [torch.rand(N, 9, 2, 4) for _ in range(2)]
        table = opt(torch.arange(N, dtype=torch.int32).view(N, 1))
        path = torch.tensor([[2, 4], [1, 3], [-1, -1]], dtype=torch.int32)
        return (
            caches,
            path,
            torch.tensor([0, 3, 5]),
            table,
            None if full else torch.tensor([1, 0, 2]),
            1 if full else -1,
        )
    if name == "state_select":
        states, indices = [torch.rand(N, 4, 5) for _ in range(2)], torch.tensor([2, 0, 3])
        out = [torch.rand(4, 5) for _ in range(2)] if full else []
        return (states, out, torch.tensor([1, 3, 2], dtype=torch.int32), opt(indices))
    B, K, D = N, 2, 4
    target = make_rows("normal", D + B, 40, logits.dtype)
    saved = tuple(opt(t) for t in sk.nucleus(target[:D], make_params([FILTERS[0]] * D)))
    if name == "verify_tree":
        q = (make_rows("normal", D, 40, logits.dtype), False, opt(torch.arange(D)), *saved, *filters, slots)
        q = q if full else (None, False, *(None,) * 9)
        return (
            target, False, torch.tensor([1, 2, 3, 4]), torch.tensor([0, 0, 0, 1]), offsets([2, 0, 2]), *filters, p.seed, slots,
            opt(torch.arange(B)), *q, opt(torch.arange(40)), 2 if full else 0, False, 0.1, 0.3, opt(torch.rand(K)), 0,
            i32(B, K + 1), i32(B), i32(B, K), i32(B), i32(B), *(opt(f32(B, K + 1)) for _ in range(4)),
        )  # fmt: skip
    return (
        target, False, torch.tensor([1, 2, 3, 4]), offsets([2, 0, 2]), *filters, p.seed, slots, opt(torch.arange(B)),
        opt(make_rows("normal", D, 40, logits.dtype)), False, opt(torch.arange(D)), *saved,
        *(opt(t) for t in filters), slots, opt(torch.arange(40)), 0, True, 0,
        i32(B, K + 1), i32(B), i32(B), i32(B), *(opt(f32(B, K + 1)) for _ in range(4)),
    )  # fmt: skip


@pytest.mark.parametrize("full", [True, False], ids=["all_arguments", "required_only"])
@pytest.mark.parametrize("name", _schemas.SCHEMAS)
def test_opcheck(name, full, backend):
    torch.library.opcheck(_backends.op(name, backend), op_arguments(name, full))


def step(logits, drafts, cu, params, position, q, backend):
    """Both public functions that a decoder calls, as one compiled graph would hold them."""
    n = sk.nucleus(logits, params, rows=torch.zeros(logits.shape[0], dtype=torch.int64), backend=backend)
    drawn = sk.sample(logits[: position.shape[0]], params, position, return_nucleus=True, logprobs=1, backend=backend)
    probs = sk.filter_probs(logits[: position.shape[0]] * 1.0, params, backend=backend)
    out = sk.verify_chain(
        logits,
        drafts,
        cu,
        params,
        position,
        draft_logits=q,
        draft_params=params,
        max_draft=2,
        logprobs=1,
        backend=backend,
    )
    return n.log_mass + 1, drawn, probs.sum(1), out, (out.tokens + 1).sum()


def step_arguments(B: int):
    g = torch.Generator().manual_seed(B)
    logits = torch.randn(3 * B, 64, generator=g)
    drafts = torch.randint(64, (2 * B,), generator=g)
    params = make_params([FILTERS[b % 3] for b in range(B)])
    return logits, drafts, offsets([2] * B), params, torch.arange(B), torch.randn(2 * B, 64, generator=g)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiles_whole_with_dynamic_batches(compiler, backend):
    """fullgraph, equal results, and one recompilation at most however many batch sizes follow."""
    if compiler == "inductor" and backend == "eager":
        pytest.skip("an op is opaque to the compiler: one backend shows it")
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(compiler)
    fn = torch.compile(step, fullgraph=True, backend=counter)
    for B in (4, 7, 5) if backend == "triton" else (4, 7, 5, 16, 9):
        arguments = step_arguments(B)
        # reduction order is the compiler's own business, the ops' outputs are not
        got, want = fn(*arguments, backend), step(*arguments, backend)
        assert_same_bits([*got[:2], *got[3:]], [*want[:2], *want[3:]])
        torch.testing.assert_close(got[2], want[2])
    assert counter.frame_count <= 2


def test_fake_tensors_give_shapes(backend):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        p = sk.SamplingTensors(
            *(torch.empty(4) for _ in range(2)),
            torch.empty(4, dtype=torch.int32),
            torch.empty(4),
            torch.empty(4, dtype=torch.int64),
        )
        out = sk.verify_chain(
            torch.empty(12, 50),
            torch.empty(8, dtype=torch.int64),
            torch.empty(5, dtype=torch.int32),
            p,
            max_draft=2,
            backend=backend,
        )
        assert out.tokens.shape == (4, 3) and out.tokens.dtype == torch.int32


# --- outputs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wanted", [{"logprobs": 0, "return_nucleus": False}, {"logprobs": 1, "return_nucleus": True}], ids=str
)
def test_out_is_used_and_written_whole(wanted, backend):
    """out= gives the tensors themselves, poisoned ones come back like new ones; hostile rows and bad offsets included."""
    call = make_call(kind="hostile", vocab=90, seed=4, lengths=[0, 3, 1, 2, 0, 1, 3, 3, 2, 1, 0, 2])
    for change in ({}, {"cu": call.cu.roll(3)}, {"emit_bonus": False}, {"rule": "block"}, {"rule": "coupled"}):
        changed = call.but(**change, max_draft=3)
        want = changed.run(backend, **wanted)
        assert (want.logprobs is None) == (wanted["logprobs"] == 0) and (want.nucleus is None) == (
            not wanted["return_nucleus"]
        )
        out = changed.run(backend, **wanted)
        for t in tensors_of(out):
            t.fill_(torch.nan if t.is_floating_point() else 12345)
        got = changed.run(backend, out=out, **wanted)
        assert [t.data_ptr() for t in tensors_of(got)] == [t.data_ptr() for t in tensors_of(out)]
        assert_same_bits(got, want)
        # what is past num_emitted is padding
        past = torch.arange(4) >= got.num_emitted[:, None]
        assert (got.tokens[past] == -1).all() and (got.tokens[~past] >= 0).all() and (got.tokens < 90).all()
        if wanted["logprobs"]:
            assert all((t[past] == 0).all() for t in (got.logprobs, *got.nucleus))


def test_out_of_the_row_ops(backend):
    rows, params = make_rows("hostile", 12, 70), make_params()
    nan, big = (lambda: torch.full((12,), torch.nan)), (lambda: torch.full((12,), 12345, dtype=torch.int32))
    nucleus = sk.Nucleus(nan(), nan(), nan())
    assert sk.nucleus(rows, params, out=nucleus, status=big(), backend=backend) is nucleus
    assert_same_bits(nucleus, sk.nucleus(rows, params, backend=backend))
    out = sk.SampleOutput(big(), big(), nan(), sk.Nucleus(nan(), nan(), nan()))
    assert sk.sample(rows, params, out=out, logprobs=1, return_nucleus=True, backend=backend) is out
    assert_same_bits(out, sk.sample(rows, params, logprobs=1, return_nucleus=True, backend=backend))
    probs, status = torch.full((12, 70), torch.nan), big()
    sk.filter_probs(rows, params, out=probs, status=status, backend=backend)
    assert_same_bits(probs, sk.filter_probs(rows, params, backend=backend))
    assert not probs.isnan().any() and status.max() <= 3


def test_empty_batches(backend):
    params = sk.SamplingTensors.create(batch_size=0)
    out = sk.verify_chain(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), offsets([]), params, backend=backend)
    assert out.tokens.shape == (0, 1)


# --- errors -------------------------------------------------------------------------------------------------------------


def arguments(**changes) -> dict:
    """A right call of verify_chain with B = 3, D = 4, K = 2, V = 40, and `changes`."""
    params = make_params(FILTERS)
    base = {
        "target_logits": make_rows("normal", 7, 40),
        "draft_tokens": torch.tensor([1, 2, 3, 4]),
        "cu_num_draft": offsets([2, 0, 2]),
        "params": params,
        "position": torch.arange(3),
        "draft_logits": make_rows("normal", 4, 40),
        "draft_params": params,
        "max_draft": 2,
    }
    return {**base, **changes}


def cut(**fields):
    return replace(make_params(FILTERS), **fields)


def out_with(**fields):
    i32 = lambda *s: torch.full(s, 5, dtype=torch.int32)  # noqa: E731
    return sk.VerifyOutput(i32(3, 3), i32(3), i32(3), i32(3))._replace(**fields)


ROWS40 = make_rows("normal", 7, 40)
LONG4 = torch.tensor([1, 2, 3, 4])
WRONG = {
    "target_dtype": (
        {"target_logits": ROWS40.double()},
        r"target_logits must be a \[rows, vocab\] tensor of float32 or bfloat16 or float16, got float64 \[7, 40\]",
    ),
    "target_rank": ({"target_logits": ROWS40[0]}, r"target_logits must be a \[rows, vocab\].*got float32 \[40\]"),
    "target_type": ({"target_logits": [[0.0]]}, "target_logits must be .* got list"),
    "target_missing": (
        {"target_logits": None},
        "target_logits must be given, or target_probs instead of it, got neither",
    ),
    "target_both": ({"target_probs": ROWS40}, "target_logits must be given, or target_probs instead of it, got both"),
    "target_no_vocab": ({"target_logits": ROWS40[:, :0]}, r"target_logits must be .*vocabulary.*got float32 \[7, 0\]"),
    "target_columns": (
        {"target_logits": make_rows("flat", 40, 7).t()},
        r"target_logits must be contiguous in its last dimension, got strides \[1, 7\]",
    ),
    "probs_dtype": (
        {"target_logits": None, "target_probs": ROWS40.half()},
        r"target_probs must be .*float32, got float16",
    ),
    "tokens_dtype": ({"draft_tokens": torch.ones(4)}, r"draft_tokens must be int32 or int64 \[D.*got float32 \[4\]"),
    "tokens_strided": ({"draft_tokens": torch.arange(8)[::2]}, r"draft_tokens must be .*contiguous"),
    "tokens_rank": ({"draft_tokens": LONG4[None]}, r"draft_tokens must be .*got int64 \[1, 4\]"),
    "offsets_dtype": (
        {"cu_num_draft": offsets([2, 0, 2]).long()},
        r"cu_num_draft must be int32 \[B \+ 1=4\].*got int64 \[4\]",
    ),
    "offsets_empty": ({"cu_num_draft": offsets([])[:0]}, r"cu_num_draft must be int32 \[B \+ 1\], got int32 \[0\]"),
    "params_none": ({"params": None}, "params must be a SamplingTensors, got NoneType None"),
    "params_size": (
        {"params": make_params(FILTERS[:2])},
        r"params.temperature must be float32 \[B=3\].*got float32 \[2\]",
    ),
    "params_dtype": ({"params": cut(top_k=LONG4[:3])}, r"params.top_k must be int32 \[B=3\].*got int64 \[3\]"),
    "params_seed": ({"params": cut(seed=torch.zeros(3))}, r"params.seed must be int64"),
    "params_slots": (
        {"params": cut(slots=torch.arange(2))},
        r"params.slots must be int32 or int64 \[B=3\].*got int64 \[2\]",
    ),
    "params_partial": ({"params": cut(min_p=torch.zeros(2))}, r"params.min_p must be float32 \[B=3\]"),
    "position_dtype": ({"position": torch.arange(3).int()}, r"position must be int64 \[B=3\].*got int32 \[3\]"),
    "position_size": ({"position": torch.arange(4)}, r"position must be int64 \[B=3\].*got int64 \[4\]"),
    "offsets_without_their_0": (
        {"cu_num_draft": offsets([2, 0, 2])[1:]},
        r"cu_num_draft must be int32 \[B \+ 1=4\], a prefix sum that starts at 0, .*got int32 \[3\]",
    ),
    "draft_tokens_padded": (
        {"draft_tokens": torch.zeros(3, 2, dtype=torch.int32)},
        r"draft_tokens must be \[D\], request-major \(ragged_from_padded .*got int32 \[3, 2\]",
    ),
    "max_draft_float": ({"max_draft": 2.0}, "max_draft must be an int >= 0, got float 2.0"),
    "max_draft_negative": ({"max_draft": -1}, "max_draft must be an int >= 0, got int -1"),
    "draft_rows_few": (
        {"draft_logits": make_rows("flat", 3, 40)},
        r"draft_logits must be \[>= D=4, Vd\].*got float32 \[3, 40\]",
    ),
    "draft_rank": (
        {"draft_logits": make_rows("flat", 4, 40)[None]},
        r"draft_logits must be \[>= D, Vd\], or \[..., Vd\] with draft_rows",
    ),
    "draft_dtype": ({"draft_logits": make_rows("flat", 4, 40).double()}, "draft_logits must be .*got float64"),
    "draft_view": (
        {"draft_logits": torch.zeros(4, 3, 40)[:, :2], "draft_rows": LONG4},
        r"draft_logits must be viewable as \[rows, Vd\] without a copy",
    ),
    "draft_params_missing": ({"draft_params": None}, "draft_params must be given with draft_logits .*got None"),
    "draft_params_size": (
        {"draft_params": make_params(FILTERS[:2])},
        r"draft_params.temperature must be float32 \[B=3\]",
    ),
    "draft_params_alone": ({"draft_logits": None}, "draft_params must be None where there are no draft_logits"),
    "out_type": ({"out": torch.zeros(3)}, "out must be a VerifyOutput, got float32"),
    "draft_both": ({"draft_probs": make_rows("flat", 4, 40)}, "draft_probs must be None where draft_logits is given"),
    "draft_probs_dtype": (
        {"draft_logits": None, "draft_probs": make_rows("flat", 4, 40).half()},
        "draft_probs must be .*float32, got float16",
    ),
    "draft_rows_dtype": (
        {"draft_rows": torch.zeros(4)},
        r"draft_rows must be int32 or int64 \[D>=4\].*got float32 \[4\]",
    ),
    "draft_rows_short": ({"draft_rows": LONG4[:3]}, r"draft_rows must be .*D>=4.*got int64 \[3\]"),
    "draft_rows_alone": (
        {"draft_logits": None, "draft_params": None, "draft_rows": LONG4},
        "draft_rows must be None where there are no draft",
    ),
    "nucleus_alone": (
        {"draft_logits": None, "draft_params": None, "draft_nucleus": sk.Nucleus(*torch.zeros(3, 4))},
        "draft_nucleus must be None where there are no draft_logits",
    ),
    "nucleus_ragged": (
        {"draft_nucleus": sk.Nucleus(torch.zeros(9), torch.zeros(5), torch.zeros(9))},
        r"draft_nucleus.row_max must be as long as draft_nucleus.cutoff \[9\], got float32 \[5\]",
    ),
    "nucleus_short": (
        {"draft_nucleus": sk.Nucleus(*torch.zeros(3, 3))},
        r"draft_nucleus.cutoff must be float32 \[D>=4\]",
    ),
    "map_size": (
        {"target_to_draft": torch.arange(39)},
        r"target_to_draft must be int32 or int64 \[V=40\].*got int64 \[39\]",
    ),
    "emit_bonus under block": ({"rule": "block", "emit_bonus": False}, "emit_bonus must be True for rule 'block'"),
    "rule": ({"rule": "Token"}, r"rule must be one of \('token', 'block', 'coupled'\), got 'Token'"),
    "order": ({"filter_order": "sglang"}, "filter_order must be one of .*got 'sglang'"),
    "logprobs": ({"logprobs": 5}, "logprobs must be 0 or 1, got int 5"),
    "backend": ({"backend": "tpu"}, "backend must be one of .*got 'tpu'"),
    "out_shape": (
        {"out": out_with(tokens=torch.zeros(3, 4, dtype=torch.int32))},
        r"out.tokens must be int32 \[3, 3\].*got int32 \[3, 4\]",
    ),
    "out_dtype": ({"out": out_with(status=torch.zeros(3))}, r"out.status must be int32 \[3\].*got float32 \[3\]"),
    "out_strided": (
        {"out": out_with(tokens=torch.zeros(3, 3, dtype=torch.int32).t())},
        "out.tokens must be contiguous",
    ),
    "out_fields": ({"out": out_with(), "logprobs": 1}, "out must be a VerifyOutput made with the same logprobs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name, backend):
    """verify_chain: <argument> must be <requirement>, got <what it got>; nothing is written."""
    changes, message = WRONG[name]
    sk.verify_chain(**arguments(backend=backend))  # right without the change
    call = {"out": out_with(), "backend": backend, **arguments(**changes)}
    before = [t.clone() for t in tensors_of(call["out"])]
    with pytest.raises(ValueError, match="^verify_chain: " + message):
        sk.verify_chain(**call)
    for a, b in zip(tensors_of(call["out"]), before, strict=True):
        assert torch.equal(a, b)


META = {
    "target_logits": lambda a: {"draft_tokens": a["draft_tokens"].to("meta")},
    "cu_num_draft": lambda a: {"cu_num_draft": a["cu_num_draft"].to("meta")},
    "draft_logits": lambda a: {"draft_logits": a["draft_logits"].to("meta")},
    "position": lambda a: {"position": a["position"].to("meta")},
    "params": lambda a: {"params": replace(a["params"], seed=a["params"].seed.to("meta"))},
}


@pytest.mark.parametrize("name", META)
def test_errors_on_mixed_devices(name, backend):
    with pytest.raises(ValueError, match=r"must be .* on cpu.*on meta"):
        sk.verify_chain(**arguments(backend=backend, **META[name](arguments())))


ROW_OP_ERRORS = {
    "logits": ({"logits": torch.zeros(3, 5, dtype=torch.int64)}, "logits must be .*got int64"),
    "rows": ({"rows": torch.zeros(2, dtype=torch.int64)}, r"rows must be int32 or int64 \[N=3\]"),
    "params": ({"params": make_params(FILTERS[:2])}, r"params.temperature must be float32 \[B=3\]"),
    "no_params": ({"params": {"temperature": 1.0}}, "params must be a SamplingTensors, got dict"),
    "order": ({"filter_order": "x"}, "filter_order must be one of"),
    "backend": ({"backend": "x"}, "backend must be one of"),
}
SAMPLE_ERRORS = {
    "position": ({"position": torch.zeros(3)}, r"position must be int64 \[N=3\]"),
    "ids": ({"ids": torch.zeros(4, dtype=torch.int64)}, r"ids must be int32 or int64 \[N=3\]"),
    "stream": ({"stream": 1}, "stream must be 0 .* or 2 .*got int 1"),
    "logprobs": ({"logprobs": 2}, "logprobs must be 0 or 1"),
    "map": ({"target_to_draft": torch.zeros(5)}, "target_to_draft must be int32 or int64"),
    "out": ({"out": sk.SampleOutput(torch.zeros(3), torch.zeros(3))}, r"out.tokens must be int32 \[3\]"),
}


@pytest.mark.parametrize(
    "op, name",
    [(op, n) for op in ("nucleus", "sample", "filter_probs") for n in ROW_OP_ERRORS]
    + [("sample", n) for n in SAMPLE_ERRORS],
)
def test_errors_of_row_ops(op, name, backend):
    changes, message = {**ROW_OP_ERRORS, **SAMPLE_ERRORS}[name]
    right = {"logits": torch.zeros(3, 5), "params": make_params(FILTERS), "backend": backend}
    getattr(sk, op)(**right)
    with pytest.raises(ValueError, match=f"^{op}: " + message):
        getattr(sk, op)(**{**right, **changes})


nan_row, empty_row = ROWS40.clone(), ROWS40.clone()
nan_row[2, 5] = torch.nan
empty_row[3] = -torch.inf
INVALID = {
    "placeholder": ({"draft_tokens": torch.tensor([1, 2, -1, 4])}, r"draft_tokens must be in \[0, 40\), got -1 at 2"),
    "beyond": ({"draft_tokens": torch.tensor([1, 40, 1, 4])}, r"draft_tokens must be in \[0, 40\), got 40 at 1"),
    "decreasing": (
        {"cu_num_draft": torch.tensor([0, 2, 1, 4], dtype=torch.int32)},
        "cu_num_draft must be a non-decreasing",
    ),
    "not_from_zero": (
        {"cu_num_draft": torch.tensor([1, 2, 3, 4], dtype=torch.int32)},
        "cu_num_draft must be .*starts at 0",
    ),
    "too_long": ({"max_draft": 1}, "cu_num_draft must be of at most max_draft=1"),
    "few_tokens": ({"cu_num_draft": torch.tensor([0, 2, 4, 6], dtype=torch.int32)}, r"draft_tokens must be \[>= D=6\]"),
    "few_rows": ({"target_logits": ROWS40[:6]}, r"target_logits must be \[>= D \+ B=7, V\]"),
    "nan": ({"target_logits": nan_row}, "target_logits must be free of NaN, got NaN in row 2"),
    "empty": ({"target_logits": empty_row}, "target_logits must be of rows with something to keep, got none in row 3"),
    "rows_range": ({"draft_rows": torch.tensor([0, 1, 2, 4])}, r"draft_rows must be in \[0, 4\), got 0..4"),
    "q_nan": ({"draft_logits": nan_row[:4]}, "draft_logits must be free of NaN"),
    "map_range": ({"target_to_draft": torch.arange(40) + 1}, r"target_to_draft must be in \[-1, Vd=40\)"),
}


@pytest.mark.parametrize("name", INVALID)
def test_validate_reads_values(name, backend):
    """What a kernel clamps and reports in status is an error under validate=True, and only there."""
    changes, message = INVALID[name]
    sk.verify_chain(**arguments(backend=backend, validate=True))
    sk.verify_chain(**arguments(backend=backend, **changes))
    out = out_with(tokens=torch.full((3, changes.get("max_draft", 2) + 1), 5, dtype=torch.int32))
    with pytest.raises(ValueError, match="^verify_chain: " + message):
        sk.verify_chain(**arguments(backend=backend, validate=True, out=out, **changes))
    assert all((t == 5).all() for t in tensors_of(out))


# --- which backend runs -------------------------------------------------------------------------------------------------


def python(code: str, **env) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


SAMPLE_TWICE = (
    "import torch, specdec_kernels as sk\n"
    "p = sk.SamplingTensors.create(seed=[1])\n"
    "for _ in range(3): print(sk.sample(torch.zeros(1, 9), p{}).tokens.tolist())\n"
)


def test_missing_backend_by_name():
    done = python(SAMPLE_TWICE.format(", backend='native'"), SPECDEC_SKIP_NATIVE="1")
    assert done.returncode != 0
    assert "BackendUnavailable: sample: backend 'native' is not available: SPECDEC_SKIP_NATIVE=1" in done.stderr


def test_missing_backend_by_environment():
    done = python(SAMPLE_TWICE.format(""), SPECDEC_SKIP_NATIVE="1", SPECDEC_BACKEND="native")
    assert "BackendUnavailable" in done.stderr


def test_automatic_fallback_is_logged_once():
    done = python(SAMPLE_TWICE.format(""), SPECDEC_SKIP_NATIVE="1")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "specdec_kernels" in line]
    assert len(lines) == 1 and "SPECDEC_SKIP_NATIVE=1" in lines[0] and "plain torch" in lines[0]
    assert (
        done.stdout.splitlines()
        == [str(sk.sample(torch.zeros(1, 9), sk.SamplingTensors.create(seed=[1])).tokens.tolist())] * 3
    )


def test_environment_chooses(native):
    code = "import torch, specdec_kernels as sk; from specdec_kernels import _backends as b; print(b.resolve('x', 'auto', torch.device('cpu')))"
    assert python(code, SPECDEC_BACKEND="eager").stdout.strip() == "eager"
    assert "SPECDEC_BACKEND must be one of" in python(code, SPECDEC_BACKEND="cuda").stderr.splitlines()[-1]
    info = "import specdec_kernels as sk; print(sk.info()['default_backend'])"
    assert "must be one of" in python(info, SPECDEC_BACKEND="cuda").stdout
    assert python(info, SPECDEC_BACKEND="").stdout.strip() == "auto"
    env = {k: v for k, v in os.environ.items() if k != "SPECDEC_BACKEND"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "native"


def test_interpreter_asked_for_too_late():
    """TRITON_INTERPRET=1 set after triton's own functions were decorated: refused by name, not by an error inside a kernel."""
    code = (
        "import os; os.environ.pop('TRITON_INTERPRET', None); import triton, torch; os.environ['TRITON_INTERPRET'] = '1'\n"
        "import specdec_kernels as sk\n"
        "sk.nucleus(torch.zeros(1, 9), sk.SamplingTensors.create(batch_size=1), backend='triton')"
    )
    assert "BackendUnavailable: nucleus: backend 'triton'" in python(code).stderr
    assert "before anything imports triton" in python(code).stderr


def test_native_on_another_device(caplog):
    with pytest.raises(sk.BackendUnavailable, match="there are no native kernels for device 'meta'"):
        _backends.resolve("sample", "native", torch.device("meta"))
    _backends._log_fallback.cache_clear()
    with caplog.at_level(logging.WARNING, logger="specdec_kernels"):
        assert _backends.resolve("sample", "auto", torch.device("meta")) == "eager"
        _backends.resolve("sample", "auto", torch.device("meta"))
    assert len(caplog.records) == (1 if _backends.DEFAULT == "auto" else 0)


def test_no_parameters_for_rows(backend):
    """A table without states, or without slots, has nothing that an index could be clamped to."""
    rows, index = torch.randn(2, 10), torch.tensor([0, 0])
    some = sk.SamplingTensors.create(1.0, batch_size=2)
    empty = sk.SamplingTensors(*(getattr(some, f)[:0] for f in ("temperature", "top_p", "top_k", "min_p", "seed")))
    no_slots = replace(some, slots=index[:0])
    for params in (empty, replace(empty, slots=index), no_slots):
        for op in (sk.nucleus, sk.sample, sk.filter_probs):
            with pytest.raises(ValueError, match="params"):
                op(rows, params, rows=index, backend=backend)
    with pytest.raises(ValueError, match="params"):
        sk.verify_chain(rows, index, offsets([0, 0]), replace(empty, slots=index), backend=backend)
