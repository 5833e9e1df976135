"""`PagedKVCache` against a list of tokens per request, and the faults that its check finds."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec_kernels import CacheStatus, PagedKVCache
from tests.cases import generator

R, MAX_NEW, HEADS, DIM = 3, 5, 2, 4


def entries(tokens: list[int], layer: int, heads: int = HEADS, dim: int = DIM) -> torch.Tensor:
    """What a layer's keys hold of tokens, [n, heads, dim]: different for every token, head and element."""
    element = torch.arange(heads * dim, dtype=torch.float32).view(heads, dim)
    return torch.tensor(tokens, dtype=torch.float32)[:, None, None] * 64 + element + layer / 2


def make(pages=12, page_size=4, max_tokens=24, layers=2, **options) -> PagedKVCache:
    cache = PagedKVCache(pages, page_size, num_requests=R, max_tokens=max_tokens, **options)
    for _ in range(layers):
        cache.add_layer(HEADS, DIM, dtype=torch.float32, value_heads=1, value_dim=3)
    return cache


def feed(cache: PagedKVCache, new: list[list[int]]) -> list[int]:
    """Appends and writes these tokens; returns the status."""
    placed = cache.append([len(t) for t in new], MAX_NEW)
    padded = [t + [-1] * (MAX_NEW - len(t)) for t in new]
    flat = [token for row in padded for token in row]
    for layer in range(len(cache.layers)):
        cache.write(layer, entries(flat, layer), -entries(flat, layer, 1, 3), placed.slots)
    return placed.status.tolist()


def assert_holds(cache: PagedKVCache, texts: list[list[int]]) -> None:
    cache.check()
    assert cache.seq_lens.tolist() == [len(t) for t in texts]
    blocks = cache.blocks(max(-(-len(t) // cache.page_size) for t in texts))
    for layer in range(len(cache.layers)):
        keys, values = cache.read(layer, blocks)
        for r, text in enumerate(texts):
            assert torch.equal(keys[r, :, : len(text)].transpose(0, 1), entries(text, layer))
            assert torch.equal(values[r, :, : len(text)].transpose(0, 1), -entries(text, layer, 1, 3))


OPERATION = st.tuples(
    st.sampled_from(["step", "step", "step", "fork", "prefix", "free", "grow"]), *[st.integers(0, MAX_NEW)] * (2 * R)
)


@settings(max_examples=150, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from([1, 3, 4]), st.lists(OPERATION, min_size=30, max_size=30))
def test_agrees_with_lists_of_tokens(page_size, operations):
    """Contents and bookkeeping after each step that verifies, fork, and free; a request that found no room is as it was."""
    cache = make(pages=20, page_size=page_size, max_tokens=30)
    texts: list[list[int]] = [[] for _ in range(R)]
    token = 0
    for name, *amounts in operations:
        who, other = amounts[0] % R, amounts[1] % R
        if name == "step":
            new = [[token + MAX_NEW * r + i for i in range(n)] for r, n in enumerate(amounts[:R])]
            token += MAX_NEW * R
            status = feed(cache, new)
            for text, more, bits in zip(texts, new, status, strict=True):
                assert bits in (0, CacheStatus.OUT_OF_PAGES, CacheStatus.TABLE_FULL)
                text += more if bits == 0 else []
            assert cache.rollback(amounts[R:]).tolist() == [0] * R
            texts = [text[: max(len(text) - n, 0)] for text, n in zip(texts, amounts[R:], strict=True)]
        elif name == "free":
            cache.free([who])
            texts[who] = []
        elif name == "grow":
            cache.grow(cache.num_pages + amounts[2], 30 + amounts[3])
        else:
            length = None if name == "fork" else len(texts[who]) * amounts[2] // MAX_NEW
            cache.fork(who, other, length)
            texts[other] = texts[who][:length]
        assert_holds(cache, texts)


def test_fork_shares_until_somebody_writes():
    cache = make()
    feed(cache, [[1, 2, 3, 4, 5], [], []])
    feed(cache, [[6], [], []])
    cache.fork(0, 1)
    cache.fork(0, 2, 5)
    free = int(cache.num_free)
    assert torch.equal(cache.block_table[0], cache.block_table[1]), "a fork takes no page"
    feed(cache, [[], [7], [8]])
    assert int(cache.num_free) == free - 2, "the full page is still shared, the other one copied twice"
    assert_holds(cache, [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 8]])
    cache.free([0, 1, 2])
    assert_holds(cache, [[], [], []])
    assert int(cache.num_free) == cache.num_pages


def test_tree_is_compacted():
    """The path's entries follow the root, and the rejected nodes leave."""
    cache = make(page_size=3)
    texts = [[1, 2, 3, 4], [5], [6, 7]]
    feed(cache, texts)
    starts = cache.append([5, 3, 1], MAX_NEW).starts
    cache.rollback([5, 3, 1])
    assert starts.tolist() == [4, 1, 2]
    feed(cache, [[10, 11, 12, 13, 14], [20, 21, 22], [30]])  # a root and its nodes
    path = torch.tensor([[2, 4], [1, -1], [-1, -1]], dtype=torch.int32)
    cache.compact(path, starts)
    cache.rollback([2, 1, 0])
    assert_holds(cache, [[1, 2, 3, 4, 10, 12, 14], [5, 20, 21], [6, 7, 30]])


def test_window():
    """Pages that a window has left come back, a rollback that needs them is refused, sinks stay."""
    cache = make(window=6, sinks=3)
    for start in range(0, 20, 4):
        feed(cache, [list(range(start, start + 4)), [], []])
    assert cache.evict(8).tolist() == [0] * R
    cache.check()
    first = cache.block_table[0].tolist()
    assert [page >= 0 for page in first] == [True, False, False, True, True, False] and int(cache.num_free) == 9
    assert cache.rollback([4, 0, 0]).tolist() == [CacheStatus.EVICTED, 0, 0]
    assert cache.block_table[0].tolist() == first and cache.seq_lens.tolist() == [20, 0, 0]
    assert cache.rollback([3, 0, 0]).tolist() == [0] * R
    cache.check()
    assert cache.fork(0, 1, 14).tolist() == [0, CacheStatus.EVICTED, 0]
    cache.free([0, 1])
    assert_holds(cache, [[], [], []])
    assert int(cache.num_free) == cache.num_pages


def test_scrubbed_cache_keeps_nothing():
    cache = make(scrub=True, window=4)
    feed(cache, [[1, 2, 3, 4, 5], [6, 7, 8], []])
    feed(cache, [[9, 10, 11, 12, 13], [], []])
    cache.rollback([1, 2, 0])
    cache.evict(5)
    table = cache.block_table.tolist()
    slots = [4 * table[0][1] + i for i in range(4)] + [4 * table[0][2], 4 * table[1][0]]
    for t in cache.caches:
        assert t.flatten(2).any(-1).flatten().nonzero().flatten().tolist() == sorted(slots)
    cache.free([0, 1])
    assert not any(t.any() for t in cache.caches)


def test_select_frees_the_others():
    cache = make()
    feed(cache, [[1, 2, 3, 4, 5], [6], [7, 8, 9]])
    cache.select([2, 0])
    assert_holds(cache, [[7, 8, 9], [1, 2, 3, 4, 5]])
    assert cache.num_requests == 2 and int(cache.num_free) == cache.num_pages - 3
    cache.select([])
    assert int(cache.num_free) == cache.num_pages


def test_nan_row_stays_with_its_request():
    """Attention masks what is behind a length, and 0 * NaN would be NaN: no other request reads it, neither from a page that came
    back nor where there is no page, though tokens without a slot were NaN too."""
    cache = make(scrub=True)
    placed = cache.append([5, 1, 0], 5)
    for layer in range(2):
        nan = entries([0] * 15, layer) * torch.nan
        cache.write(layer, nan, nan[:, :1, :3], placed.slots)
    cache.free([0])
    for new in ([], [1, 2]):
        if new:
            feed(cache, [[], [], new])
        keys, values = cache.read(0, cache.blocks(8))  # more blocks than the table has
        assert keys.shape == (R, HEADS, 32, DIM)
        for t in (keys, values):
            assert t[[0, 2]].isfinite().all() and not t[1].isfinite().all()


def test_grow_is_all_or_nothing(monkeypatch):
    cache = make(pages=2)
    feed(cache, [[1, 2, 3], [], []])
    real, calls = torch.Tensor.new_zeros, []

    def out_of_memory(*args, **options):
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError
        return real(*args, **options)

    monkeypatch.setattr(torch.Tensor, "new_zeros", out_of_memory)
    with pytest.raises(MemoryError):
        cache.grow(4, 100)
    assert_holds(cache, [[1, 2, 3], [], []])
    assert cache.num_pages == 2
    with pytest.raises(ValueError, match="num_pages must be an int in"):
        cache.grow(100.0, 3)
    monkeypatch.setattr(torch.Tensor, "new_zeros", real)
    cache.grow(4, 100)
    assert feed(cache, [[4, 5], [6], [7]]) == [0] * R
    assert_holds(cache, [[1, 2, 3, 4, 5], [6], [7]])


def test_layers_are_what_kernels_take():
    cache = PagedKVCache(6, 16, num_requests=1, max_tokens=20)
    cache.add_layer(4, 64, dtype=torch.bfloat16)
    keys, values = cache.layers[0]
    assert keys.shape == (6, 16, 4, 64) and keys.is_contiguous() and keys.dtype == torch.bfloat16
    cache.append([3], 3)
    new = torch.randn(3, 4, 64, generator=generator("layers")).bfloat16()
    cache.write(0, new, new + 1, torch.arange(3))
    page = int(cache.block_table[0, 0])
    assert torch.equal(keys[page, :3], new) and torch.equal(values[page, :3], new + 1)


def plant(cache: PagedKVCache, problem: str) -> None:
    first = cache.block_table[0, :1]
    if problem == "is on the free list 2 times":
        cache.free_pages[0] = cache.free_pages[1]
    elif problem == "is free and held":
        cache.free_pages[:1] = first
    elif problem == "leaked":
        cache.num_free -= 1
    elif problem == "has 1 holders and counts 2":
        cache.ref_counts[first.long()] = 2
    elif problem == "12 is no page":
        cache.free_pages[0] = 12
    elif problem == "-7 is no page":
        cache.block_table[2, 0] = -7
    elif problem == "holds pages behind them":
        cache.seq_lens[0] = 4
    else:
        cache.seq_lens[0] = 9


PROBLEMS = (
    "is on the free list 2 times", "is free and held", "leaked", "has 1 holders and counts 2", "lacks a page", "12 is no page", "-7 is no page", "holds pages behind them",
)  # fmt: skip


@pytest.mark.parametrize("problem", PROBLEMS)
def test_check_finds(problem):
    cache = make()
    feed(cache, [[1, 2, 3, 4, 5], [6], []])
    cache.check()
    plant(cache, problem)
    with pytest.raises(RuntimeError, match=f"PagedKVCache.check: .*{problem}"):
        cache.check()


def test_check_of_windows():
    """A page may be missing before the window, not in it, among the sinks, or behind one that is there."""
    for length, missing, sound in ((20, 1, True), (20, 0, False), (20, 3, False), (20, 2, False), (8, 1, False)):
        cache = make(window=6, sinks=3)
        for start in range(0, length, 4):
            feed(cache, [list(range(start, start + 4)), [], []])
        page = int(cache.block_table[0, missing])
        cache.block_table[0, missing] = -1
        cache.ref_counts[page] = 0
        cache.free_pages[int(cache.num_free)] = page
        cache.num_free += 1
        if sound:
            cache.check()
        else:
            with pytest.raises(RuntimeError, match=f"request 0 of {length} tokens lacks a page"):
                cache.check()


def test_errors():
    with pytest.raises(ValueError, match=r"PagedKVCache: sinks must be 0 without a window, got int 2"):
        make(sinks=2)
    for name, bad in (("num_pages", 0), ("page_size", 2.0), ("num_requests", -1), ("max_tokens", True)):
        sizes = {"num_pages": 4, "page_size": 4, "num_requests": 1, "max_tokens": 8, name: bad}
        with pytest.raises(ValueError, match=f"PagedKVCache: {name} must be an int in"):
            PagedKVCache(**sizes)
    with pytest.raises(ValueError, match="dtype must be of 1, 2 or 4 bytes"):
        PagedKVCache(4, 4, num_requests=1, max_tokens=4).add_layer(1, 1, dtype=torch.float64)
    cache = make()
    feed(cache, [[1, 2, 3], [4], []])
    slots = torch.arange(3)
    keys, values = entries([1, 2, 3], 0), entries([1, 2, 3], 0, 1, 3)
    for name, parts in (
        ("keys", (keys.bfloat16(), values)),
        ("keys", (keys[:2], values)),
        ("values", (keys, keys)),
    ):
        with pytest.raises(ValueError, match=rf"PagedKVCache.write: {name} must be float32 \[3 tokens, "):
            cache.write(0, *(-t for t in parts), slots)
    with pytest.raises(ValueError, match=r"destination must be an int in 0..2, got int 3"):
        cache.fork(0, 3)
    with pytest.raises(ValueError, match="requests must be different"):
        cache.select([0, 0])
    for call, message in (
        (lambda: cache.free([0, 7]), r"PagedKVCache.free: requests must be of 0\.\.2, got int 7"),
        (lambda: cache.free(0), "PagedKVCache.free: requests must be a list or tuple, got int 0"),
        (lambda: cache.select([-1]), r"PagedKVCache.select: requests must be of 0\.\.2, got int -1"),
        (lambda: cache.append([1, 2], 2), "num_new must be a number for each of 3 requests"),
        (lambda: cache.append([1, 2, 3], 2), r"num_new\[2\] must be an int in 0\.\.2, got int 3"),
        (lambda: cache.append(slots, 2), r"num_new must be int32 \[B=3\]"),
        (lambda: cache.rollback([0, -1, 0]), r"num_rejected\[1\] must be an int in 0"),
        (lambda: cache.rollback(1), "num_rejected must be a number for each of 3 requests, got int 1"),
        (
            lambda: cache.write(2, keys, values, slots),
            "PagedKVCache.write: layer must be one of the 2 that add_layer made",
        ),
        (lambda: cache.read(-1, 1), "PagedKVCache.read: layer must be one of the 2"),
        (lambda: cache.evict(8), "PagedKVCache.evict: window must be given to the cache"),
        (lambda: make(window=6).evict(5), r"keep_last must be an int in 6\.\."),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert_holds(cache, [[1, 2, 3], [4], []])


def test_refused_append_takes_nothing_back():
    """The step's rollback counts drafts that a refused request never got: its committed tokens stay."""
    cache = make(pages=4)
    feed(cache, [[1, 2, 3, 4, 5], [6, 7, 8, 9], []])
    assert feed(cache, [[10], [11, 12], [13]]) == [0, 0, CacheStatus.OUT_OF_PAGES]
    assert feed(cache, [[14, 15], [16, 17, 18], [19]]) == [0, CacheStatus.OUT_OF_PAGES, CacheStatus.OUT_OF_PAGES]
    cache.rollback([2, 3, 1])
    assert_holds(cache, [[1, 2, 3, 4, 5, 10], [6, 7, 8, 9, 11, 12], []])
    cache.rollback([1, 1, 0])  # the next one is no step's
    assert_holds(cache, [[1, 2, 3, 4, 5], [6, 7, 8, 9, 11], []])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bfloat16])
def test_dtypes(dtype):
    cache = PagedKVCache(3, 4, num_requests=1, max_tokens=8)
    cache.add_layer(1, 2, dtype=dtype)
    new = torch.arange(10).view(5, 1, 2).to(dtype)
    cache.write(0, new, new, cache.append([5], 5).slots)
    keys, values = cache.read(0, 2)
    assert keys.dtype == dtype and torch.equal(keys[0, 0, :5].float(), new[:, 0].float())
    assert torch.equal(values.float(), keys.float())
