"""`kv_copy_pages`: bit-exact parity on every layout, what may not be touched, and copy on write."""

import pytest
import torch
import torch._dynamo.testing

import python_ref
import specdec_kernels as sk
from tests.cache_cases import DTYPES, LAYOUTS, assert_bits, bits, page_case, random_bits, written
from tests.cases import generator, ids
from tests.conftest import available
from tests.interpreter import watching
from tests.kv_states import State, ints

pytestmark = pytest.mark.usefixtures("one_thread")

PAGED = [name for name, layout in LAYOUTS.items() if layout.paged]
PAGES = 9


def entries(N=7, pages=PAGES, index=torch.int64, seed=0):
    """Sources and destinations that have no page between them, a third of the entries without one or the other."""
    g = generator("entries", N, pages, seed)
    order = torch.randperm(pages, generator=g)
    sources, destinations = order[: pages // 2], order[pages // 2 :]
    src = sources[torch.randint(len(sources), (N,), generator=g)]
    dst = torch.full((N,), -1)
    places = torch.randperm(N, generator=g)[: len(destinations)]
    dst[places] = destinations[: len(places)]
    src[torch.rand(N, generator=g) < 0.2] = -1
    return src.to(index), dst.to(index)


def assert_parity(case, src, dst, backend):
    """Of whole buffers: what lies between and beside the caches too."""
    want = written(case.buffers, case.views, python_ref.kv_copy_pages(case.views(case.buffers), src, dst))
    got = case.copies()
    sk.kv_copy_pages(case.views(got), src, dst, backend=backend)
    assert_bits(got, want)
    return sum(int((bits(a) != bits(b)).sum()) for a, b in zip(case.buffers, want, strict=True))


def copied(backend, src, dst, **options):
    """Which page each page of a cache holds afterwards; the backend "oracle" is the oracle."""
    cache = torch.arange(5, dtype=torch.float32).view(5, 1, 1).expand(5, 3, 2).contiguous()
    src, dst = torch.tensor(src, **options), torch.tensor(dst, **options)
    if backend == "oracle":
        (cache,) = python_ref.kv_copy_pages([cache], src, dst)
    else:
        sk.kv_copy_pages([cache], src, dst, backend=backend)
    assert (cache == cache[:, :1, :1]).all()
    return cache[:, 0, 0].int().tolist()


@pytest.mark.parametrize("who", ["oracle", "native", "eager", "triton"])
def test_by_hand(who):
    if who != "oracle":
        available(who)
    assert copied(who, [1], [3]) == [0, 1, 2, 1, 4]
    assert copied(who, [2, 2, 1], [0, 4, 3]) == [2, 1, 2, 1, 2]  # a source of several
    assert copied(who, [-1, 1, 4, -1], [0, -1, 3, -1]) == [0, 1, 2, 4, 4]
    assert copied(who, [-1], [-1]) == [0, 1, 2, 3, 4]


def test_placeholder_read(backend):
    """An entry that is no page is neither read nor written through; the others are copied."""
    bad = [-1, -2, 5, 6, 2**31 - 1, -(2**31)]
    for dtype, values in ((torch.int32, bad), (torch.int64, [*bad, 2**40, -(2**63), 2**32 + 1])):
        for value in values:
            assert copied(backend, [value, 1, 0], [2, 3, value], dtype=dtype) == [0, 1, 2, 1, 4], value
            assert copied(backend, [value, value], [value, 2], dtype=dtype) == [0, 1, 2, 3, 4], value


@pytest.mark.parametrize("dtype", DTYPES, ids=ids(DTYPES))
@pytest.mark.parametrize("layout", PAGED)
def test_parity(layout, dtype, backend):
    assert assert_parity(page_case(layout, PAGES, dtype=dtype), *entries(), backend) > 0
    odd = page_case(layout, PAGES, page_size=5, H=3, D=7, dtype=dtype, layers=1, seed=1)
    assert assert_parity(odd, *entries(index=torch.int32, seed=1), backend) > 0


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize("layout", ["nhd", "hnd", "between"])
def test_page_sizes(layout, page_size, backend):
    assert assert_parity(page_case(layout, PAGES, page_size, H=2, D=64, layers=1), *entries(), backend) > 0


@pytest.mark.parametrize(("H", "D"), [(1, 576), (1, 128), (2, 80), (3, 96), (8, 128), (32, 64), (5, 7), (16, 256)])
def test_heads(H, D, backend):
    """For the Triton kernel 1 to 16 pieces a page, and fewer programs a cache or more."""
    for layout in ("latents",) if D == 576 else ("nhd", "hnd"):
        assert assert_parity(page_case(layout, PAGES, H=H, D=D, layers=1, seed=H), *entries(), backend) > 0
    many = page_case("hnd", PAGES, page_size=4, H=H, D=D, dtype=torch.int8, layers=20)
    assert assert_parity(many, *entries(), backend) > 0


def test_many_entries(backend):
    """More than a program looks at together; most are empty, as most requests share nothing."""
    case = page_case("hnd", 90, page_size=4, H=2, D=8, layers=1)
    assert assert_parity(case, *entries(600, 90), backend) > 0
    src, dst = torch.full((600,), -1), torch.full((600,), -1)
    src[[255, 256, 599]], dst[[255, 256, 599]] = torch.tensor([3, 3, 5]), torch.tensor([0, 89, 7])
    assert assert_parity(case, src, dst, backend) > 0


def test_threads_change_no_bit(native):
    case = page_case("hnd", PAGES, 64, H=4, D=64, layers=4)
    torch.set_num_threads(4)
    assert assert_parity(case, *entries(), native) > 4 * 16384


def test_layers_that_differ(backend):
    """Other heads, latents, scales per token, page sizes and numbers of pages: an entry past the end of one is skipped there."""
    g = generator("differ")
    caches = [
        random_bits((12, 16, 4, 64), torch.bfloat16, g), random_bits((12, 16, 2, 64), torch.bfloat16, g),
        random_bits((12, 32, 72), torch.float8_e4m3fn, g), random_bits((12, 16, 4), torch.float32, g),
        random_bits((7, 16, 4, 64), torch.bfloat16, g), random_bits((12, 16, 4, 64), torch.bfloat16, g),
    ]  # fmt: skip
    src, dst = torch.tensor([11, 0, 6, 9]), torch.tensor([1, 10, 5, 7])
    want = python_ref.kv_copy_pages(caches, src, dst)
    sk.kv_copy_pages(caches, src, dst, backend=backend)
    assert_bits(caches, want)
    assert torch.equal(bits(caches[4][5]), bits(caches[4][6]))


def test_nothing_to_do(backend):
    case, (src, dst) = page_case("nhd", PAGES), entries()
    got = case.copies()
    caches = case.views(got)
    sk.kv_copy_pages(caches, src[:0], dst[:0], backend=backend)
    sk.kv_copy_pages((), src, dst, backend=backend)
    sk.kv_copy_pages([t[:0] for t in caches], src, dst, backend=backend)
    sk.kv_copy_pages([t[..., :0] for t in caches], src, dst, backend=backend)
    sk.kv_copy_pages(caches, torch.full_like(src, -1), dst, backend=backend)
    assert_bits(got, case.buffers)


def test_row_offset_overflow(backend):
    """Offsets of more than 2^31 elements, in a cache whose memory is mostly never touched."""
    pages, page_size, D = (1 << 19) + 8, 64, 130
    cache = torch.empty(pages, page_size, D, dtype=torch.int8)[..., 1:]  # no word is aligned
    assert (pages - 8) * page_size * D > 1 << 32
    cache[[1, 3, pages - 3, pages - 1]] = random_bits((4, page_size, D - 1), torch.int8, generator("large"))
    want = cache[pages - 1].clone(), cache[3].clone()
    sk.kv_copy_pages([cache], torch.tensor([pages - 1, 3]), torch.tensor([1, pages - 3]), backend=backend)
    assert torch.equal(cache[1], want[0]) and torch.equal(cache[pages - 3], want[1])
    assert torch.equal(cache[pages - 1], want[0]) and torch.equal(cache[3], want[1])


@pytest.mark.parametrize("layout", ["nhd", "hnd", "between"])
def test_only_what_is_copied_is_read(layout):
    """Every word of a page that is copied once, and nothing else of the caches."""
    available("triton")
    case = page_case(layout, PAGES, D=64 if layout != "between" else 61, dtype=torch.float32)
    words = [t.view(torch.int32 if layout == "between" else torch.int64) for t in case.buffers]
    with watching(*words) as watch:
        sk.kv_copy_pages(
            case.views(case.buffers), torch.tensor([4, -1, 0, 2]), torch.tensor([5, 3, -1, 6]), backend="triton"
        )
    wanted = [torch.zeros_like(t, dtype=torch.int64) for t in words]
    for view in case.views(wanted):
        view[[4, 2]] = 1
    for i, counts in enumerate(wanted):
        assert torch.equal(torch.from_numpy(watch.reads(i)), counts)


def test_copy_on_write(backend):
    """Three requests with one text share its pages, the last one partly filled. Each appends tokens of its own: two get a copy,
    the third then writes in place, and each reads the common text and its own tokens behind it."""
    page_size = 4
    state = State(
        ints([6] * 3), ints([[2, 5, -1, -1]] * 3), ints([0, 7, 3, 1, 4, 6, -7, -7]), ints([6]), page_size,
        ints([0, 0, 3, 0, 0, 3, 0, 0]),
    )  # fmt: skip
    g = generator("copy on write")
    caches = [random_bits((8, page_size, 2, 8), torch.bfloat16, g), random_bits((8, 2, page_size, 8), torch.int8, g)]
    views = [caches[0], caches[1].transpose(1, 2)]

    def text(b, view):
        return torch.cat([bits(view)[page] for page in state.block_table[b].tolist() if page >= 0])

    common = [text(0, view)[:6].clone() for view in views]
    tokens = [[random_bits((3, 2, 8), view.dtype, g) for _ in range(3)] for view in views]
    out = state.append([3] * 3, 3, backend)
    assert out.copy_src.tolist() == [5, 5, -1] and out.status.tolist() == [0] * 3
    sk.kv_copy_pages(views, out.copy_src, out.copy_dst, backend=backend)
    for view, new in zip(views, tokens, strict=True):
        for b in range(3):
            bits(view)[out.slots[b] // page_size, out.slots[b] % page_size] = bits(new[b])
    assert len({int(state.block_table[b, 1]) for b in range(3)}) == 3 and state.ref_counts[2] == 3
    for view, new, before in zip(views, tokens, common, strict=True):
        for b in range(3):
            assert torch.equal(text(b, view)[:9], torch.cat([before, bits(new[b])]))


@pytest.mark.parametrize("layout", ["nhd", "fused_inside", "hnd"])
def test_compiles_whole(layout, backend):
    def step(buffers, src, dst, scale):
        buffers = [t.mul_(scale) for t in buffers]
        caches = [view for t in buffers for view in LAYOUTS[layout].views(t)]
        sk.kv_copy_pages(caches, src, dst, backend=backend)
        return sum(t.sum() for t in caches)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for N in (2, 4, 3):
        plain = [torch.randn(LAYOUTS[layout].shape(PAGES, 16, 2, 8), generator=generator(N)) for _ in range(2)]
        got, want = [t.clone() for t in plain], [t.clone() for t in plain]
        src, dst = entries(N)
        torch.testing.assert_close(compiled(got, src, dst, 2.0), step(want, src, dst, 2.0))
        assert_bits(got, want)
    assert counter.frame_count <= 2


def test_fake_tensors(backend):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        caches = [torch.empty(9, 16, 4, 64, dtype=torch.bfloat16) for _ in range(4)]
        assert sk.kv_copy_pages(caches, torch.empty(3).int(), torch.empty(3).long(), backend=backend) is None


CACHE = torch.zeros(9, 16, 2, 8)
GOOD = {"caches": [CACHE, torch.zeros(9, 16, 2, 8)], "src": torch.tensor([1, 2, -1]), "dst": torch.tensor([3, -1, -1])}
WRONG = {
    "caches_type": ({"caches": CACHE}, r"caches must be a list or tuple of tensors, got float32 \[9, 16, 2, 8\]"),
    "cache_type": ({"caches": [CACHE, None]}, r"caches\[1\] must be a tensor on cpu .*got NoneType"),
    "cache_size": ({"caches": [CACHE.double()]}, r"caches\[0\] must be .*of 1, 2 or 4 bytes, got float64"),
    "cache_device": ({"caches": [CACHE, CACHE.to("meta")]}, r"caches\[1\] must be a tensor on cpu.*on meta"),
    "cache_rank": ({"caches": [CACHE, CACHE[0, 0]]}, r"caches\[1\] must be \[pages, page_size, H, D\].*float32 \[2, 8\]"),
    "cache_columns": ({"caches": [CACHE.mT]}, r"caches\[0\] must be contiguous in its last .*strides \[256, 16, 1, 8\]"),
    "cache_expanded": ({"caches": [CACHE[:1].expand(9, -1, -1, -1)]}, r"caches\[0\] must be .*do not share memory"),
    "src_type": ({"src": [1, 2, 3]}, r"src must be int32 or int64 \[N\], got list"),
    "src_dtype": ({"src": torch.zeros(3)}, r"src must be int32 or int64 \[N\], got float32"),
    "src_rank": ({"src": torch.zeros(3, 1).int()}, r"src must be int32 or int64 \[N\], got int32 \[3, 1\]"),
    "src_stride": ({"src": torch.zeros(6).int()[::2]}, "src must be contiguous, got stride 2"),
    "dst_size": ({"dst": torch.zeros(2).int()}, r"dst must be int32 or int64 \[N=3\].*got int32 \[2\]"),
    "dst_dtype": ({"dst": torch.zeros(3)}, r"dst must be int32 or int64 \[N=3\].*got float32"),
    "dst_device": ({"dst": torch.zeros(3).int().to("meta")}, r"dst must be .*on cpu, got int32 \[3\] on meta"),
    "backend": ({"backend": "tpu"}, "backend must be one of .*got 'tpu'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name, backend):
    changes, message = WRONG[name]
    CACHE.copy_(torch.rand(CACHE.shape))
    before = CACHE.clone()
    with pytest.raises(ValueError, match="^kv_copy_pages: " + message):
        sk.kv_copy_pages(**{**GOOD, "backend": backend, **changes})
    assert torch.equal(CACHE, before)
    sk.kv_copy_pages(**GOOD, backend=backend)
    assert torch.equal(CACHE[3], before[1])
