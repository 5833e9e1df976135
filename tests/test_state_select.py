"""`state_select`: bit-exact parity, what may not be touched, and a recurrence that is rolled back and goes on."""

import pytest
import torch
import torch._dynamo.testing

import python_ref
import specdec_kernels as sk
from tests.cache_cases import DTYPES, assert_bits, bits, random_bits
from tests.cases import generator, ids

SHAPES = ((4, 8, 8), (3, 5), (1,), (), (33, 64), (2, 2048))


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=ids(DTYPES))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parity(shape, dtype, backend):
    """In place, into rows in order, and into the rows of a larger table; every buffer is compared whole."""
    g = generator(shape, dtype)
    B, S = 4, 5
    states = [random_bits((B + 1, S, *shape), dtype, g) for _ in range(3)]
    accepted = i32(3, 0, 9, -2)  # clamped to 4 and 0
    want = python_ref.state_select(states, accepted)
    assert torch.equal(bits(want[0])[0, 0], bits(states[0])[0, 3]) and torch.equal(bits(want[0])[4], bits(states[0])[4])
    got = [t.clone() for t in states]
    sk.state_select(got, accepted, backend=backend)
    assert_bits(got, want, "in place")
    for indices in (None, torch.tensor([5, 2, 0, 4]), i32(1, -1, 7, 3), i32(-1, 0, -1, 9), i32(-1, -1, 8, 2**31 - 1)):
        table = [random_bits((7, *shape), dtype, g) for _ in range(3)]
        before, want = [t.clone() for t in states], python_ref.state_select(states, accepted, table, indices)
        sk.state_select(states, accepted, out=table, indices=indices, backend=backend)
        assert_bits(table, want, f"{indices}")
        assert_bits(states, before)


@pytest.mark.parametrize("shape", [(6, 16), (7,)], ids=str)
def test_strides_of_requests_and_snapshots_are_free(shape, backend):
    """Snapshot-major buffers, parts of a request's record, an engine's table of other strides."""
    g = generator("strides", shape)
    accepted, size = i32(2, 1, 0), torch.Size(shape).numel()
    buffers = [random_bits((4, 3, *shape), torch.bfloat16, g), random_bits((3, 4, 1 + size + 2), torch.bfloat16, g)]
    cuts = [lambda t: t.transpose(0, 1), lambda t: t[..., 1:-2].unflatten(-1, shape)]
    for buffer, cut in zip(buffers, cuts, strict=True):
        want = buffer.clone()
        bits(cut(want)).copy_(bits(python_ref.state_select([cut(buffer)], accepted)[0]))
        got = buffer.clone()
        sk.state_select([cut(got)], accepted, backend=backend)
        assert_bits([got], [want])
        record = random_bits((5, 3 + size), torch.bfloat16, g)
        place = lambda t: t[:, 3:].unflatten(-1, shape)  # noqa: E731
        want = record.clone()
        bits(place(want)).copy_(bits(python_ref.state_select([cut(buffer)], accepted, [place(record)])[0]))
        sk.state_select([cut(buffer)], accepted, out=[place(record)], backend=backend)
        assert_bits([record], [want])


def test_layers_that_differ(backend):
    """Convolution and recurrent states, of one call."""
    g, accepted = generator("differ"), i32(1, 2)
    states = [
        random_bits((2, 3, *shape), dtype, g)
        for shape, dtype in (((8, 3), torch.bfloat16), ((2, 8, 8), torch.float32), ((8, 3), torch.float16), ((9,), torch.int8))
    ]  # fmt: skip
    out = [random_bits((2, *t.shape[2:]), t.dtype, g) for t in states]
    out[2] = random_bits((4, 8, 3), torch.float16, g)
    want = python_ref.state_select(states, accepted, out)
    sk.state_select(tuple(states), accepted, out=tuple(out), backend=backend)
    assert_bits(out, want)
    want = python_ref.state_select(states, accepted)
    sk.state_select(states, accepted, backend=backend)
    assert_bits(states, want)


def test_past_two_to_the_31(backend):
    """Offsets of more than 2^31 elements, in buffers whose memory is mostly never touched."""
    size, S = (1 << 23) + 1, 300
    states, out = torch.empty(2, S, size, dtype=torch.int8), torch.empty(300, size, dtype=torch.int8)
    assert 290 * size > 1 << 31
    states, text = states[..., -9:], random_bits((2, 9), torch.int8, generator("large"))
    states[0, 290], states[1, 290] = text
    sk.state_select([states], i32(290, 290), out=[out[:, :9]], indices=torch.tensor([-1, 290]), backend=backend)
    assert torch.equal(out[290, :9], text[1])
    sk.state_select([states], i32(290, 290), backend=backend)
    assert torch.equal(states[:, 0], text)


@pytest.mark.parametrize("place", ["in_place", "out"])
def test_state_not_rolled_back(place, backend):
    """A recurrence over six steps, some without drafts: the state behind the accepted tokens is that of the text alone."""
    B, S, n = 3, 4, 16
    g = generator("recurrence")
    step = lambda h, x: torch.tanh(0.7 * h.roll(1, -1) + x[..., None] / 9)  # noqa: E731
    text = [torch.zeros(n) for _ in range(B)]  # the state of each request by its text
    states = torch.full((B, S, n), torch.nan)
    states[:, 0] = 0.0
    table = torch.zeros(5, n)
    slots = torch.tensor([4, 0, 2])
    for number in range(6):
        drafts = 0 if number % 3 == 2 else S - 1
        tokens = torch.randint(9, (B, drafts + 1), generator=g).float()
        accepted = (torch.rand(B, generator=g) * (drafts + 1)).int()
        h = states[:, 0].clone() if place == "in_place" else table[slots]
        for j in range(drafts + 1):
            h = step(h, tokens[:, j])
            states[:, j] = h
        if place == "in_place":
            sk.state_select([states], accepted, backend=backend)
        else:
            sk.state_select([states], accepted, out=[table], indices=slots, backend=backend)
        for b in range(B):
            for j in range(int(accepted[b]) + 1):
                text[b] = step(text[b], tokens[b, j])
            assert torch.equal(states[b, 0] if place == "in_place" else table[slots[b]], text[b]), (number, b)


def test_empty(backend):
    none = torch.zeros(0, dtype=torch.int32)
    states = torch.rand(3, 2, 4)
    before = states.clone()
    sk.state_select([states], none, backend=backend)
    sk.state_select([], i32(1, 1), backend=backend)
    sk.state_select([states[..., :0]], i32(1, 1), backend=backend)
    sk.state_select([states], i32(1, 1), out=[torch.empty(0, 4)], indices=i32(0, 0), backend=backend)
    assert torch.equal(states, before)


def test_compiles_whole(backend):
    def step(states, accepted, out, indices):
        states = [t * 2 for t in states]
        sk.state_select(states, accepted, out=out, indices=indices, backend=backend)
        sk.state_select(states, accepted, backend=backend)
        return states, [t + 1 for t in out]

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for B in (2, 5, 3):
        g = generator(B)
        states = [torch.randn(B, 3, 4, generator=g) for _ in range(2)]
        outs = [[torch.zeros(9, 4) for _ in states] for _ in range(2)]
        accepted, indices = torch.randint(3, (B,), generator=g).int(), torch.randperm(9, generator=g)[:B]
        got, want = (f(states, accepted, out, indices) for f, out in zip((compiled, step), outs, strict=True))
        for a, b in zip((*got, outs[0]), (*want, outs[1]), strict=True):
            assert_bits(a, b)
    assert counter.frame_count <= 2


def test_fake_tensors(backend):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        states, out = [torch.empty(3, 4, 8, dtype=torch.bfloat16)], [torch.empty(7, 8, dtype=torch.bfloat16)]
        accepted = torch.empty(3, dtype=torch.int32)
        assert sk.state_select(states, accepted, backend=backend) is None
        assert sk.state_select(states, accepted, out=out, indices=torch.empty(3).long(), backend=backend) is None


STATES = [torch.zeros(3, 4, 2, 8) for _ in range(2)]
OUT = [torch.zeros(5, 2, 8) for _ in range(2)]
GOOD = {"states": STATES, "num_accepted": i32(1, 0, 3), "out": OUT, "indices": i32(4, 2, 0)}
WRONG = {
    "states_type": ({"states": STATES[0]}, r"states must be a list or tuple of tensors, got float32 \[3, 4, 2, 8\]"),
    "state_size": ({"states": [STATES[0], STATES[1].double()]}, r"states\[1\] must be .*1, 2 or 4 bytes, got float64"),
    "state_rank": ({"states": [STATES[0], STATES[1][:, 0, 0, 0]]}, r"states\[1\] must be \[>= B=3, S >= 1, ...\], got .*\[3\]"),
    "few_states": ({"states": [STATES[0][:2], STATES[1]]}, r"states\[0\] must be \[>= B=3, S >= 1, .*got float32 \[2, 4"),
    "no_snapshots": ({"states": [t[:, :0] for t in STATES]}, r"states\[0\] must be .*S >= 1.*got float32 \[3, 0"),
    "state_strided": ({"states": [STATES[0], STATES[1].mT]}, r"states\[1\] must be contiguous from dimension 2, got strides"),
    "state_expanded": ({"states": [t[:1].expand(3, -1, -1, -1) for t in STATES]}, r"states\[0\] must be .*share memory"),
    "accepted_dtype": ({"num_accepted": torch.tensor([1, 0, 3])}, r"num_accepted must be int32 \[B=3\].*got int64 \[3\]"),
    "accepted_rank": ({"num_accepted": i32(1)[None]}, r"num_accepted must be int32 \[B\], got int32 \[1, 1\]"),
    "out_type": ({"out": OUT[0]}, "out must be a list or tuple of tensors, got float32"),
    "out_number": ({"out": OUT[:1]}, "out must be a tensor for each of 2 states, got 1"),
    "out_dtype": ({"out": [OUT[0], OUT[1].half()]}, r"out\[1\] must be float32 \[>= 0, 2, 8\], got float16 \[5, 2, 8\]"),
    "out_shape": ({"out": [OUT[0], OUT[1][:, 0]]}, r"out\[1\] must be float32 \[>= 0, 2, 8\], got float32 \[5, 8\]"),
    "out_rows": ({"out": [t[:2] for t in OUT], "indices": None}, r"out\[0\] must be float32 \[>= 3, 2, 8\], got .*\[2, "),
    "out_strided": ({"out": [OUT[0].view(5, 8, 2).mT, OUT[1]]}, r"out\[0\] must be contiguous from dimension 1, got strides"),
    "out_device": ({"out": [OUT[0], OUT[1].to("meta")]}, r"out\[1\] must be a tensor on cpu"),
    "indices_alone": ({"out": None}, "indices must be None without out, got int32"),
    "indices_size": ({"indices": i32(0, 1)}, r"indices must be int32 or int64 \[B=3\].*got int32 \[2\]"),
    "indices_dtype": ({"indices": torch.zeros(3)}, r"indices must be int32 or int64 \[B=3\].*got float32"),
    "backend": ({"backend": "tpu"}, "backend must be one of .*got 'tpu'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name, backend):
    changes, message = WRONG[name]
    for t in (*STATES, *OUT):
        t.copy_(torch.rand(t.shape))
    before = [t.clone() for t in (*STATES, *OUT)]
    with pytest.raises(ValueError, match="^state_select: " + message):
        sk.state_select(**{**GOOD, "backend": backend, **changes})
    assert_bits([*STATES, *OUT], before)
    sk.state_select(**GOOD, backend=backend)
