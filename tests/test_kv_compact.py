"""`kv_compact`: bit-exact parity on every layout, what may not be touched, and a toy attention that reads what was moved."""

import pytest
import torch
import torch._dynamo.testing

import python_ref
import specdec_kernels as sk
from tests.cache_cases import DTYPES, LAYOUTS, assert_bits, bits, cache_case, make_paths, random_bits, written
from tests.cases import generator, ids


def compact(case, backend):
    """Runs a case on copies of its buffers and returns them."""
    buffers = [t.clone() for t in case.buffers]
    sk.kv_compact(case.views(buffers), case.path, case.seq_lens, backend=backend, **case.options)
    return buffers


def expected(case):
    values = python_ref.kv_compact(case.views(case.buffers), case.path, case.seq_lens, **case.options)
    return written(case.buffers, case.views, values)


def assert_parity(case, backend):
    """Of whole buffers: what lies between and beside the caches too."""
    want = expected(case)
    assert_bits(compact(case, backend), want)
    return sum(int((bits(a) != bits(b)).sum()) for a, b in zip(case.buffers, want, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=ids(DTYPES))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parity(layout, dtype, backend):
    moved = assert_parity(cache_case(layout, dtype, D=72 if layout == "latents" else 64), backend)
    moved += assert_parity(cache_case(layout, dtype, B=2, H=1, D=7, slots=True, layers=1, seed=1), backend)
    assert moved > 0


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_page_sizes(layout, page_size, backend):
    for seed in range(2):
        assert assert_parity(cache_case(layout, page_size=page_size, H=2, seed=seed, layers=1), backend) > 0


@pytest.mark.parametrize(("H", "D"), [(1, 576), (1, 128), (2, 80), (3, 96), (8, 128), (32, 64), (5, 7), (16, 256)])
def test_heads(H, D, backend):
    for layout in ("latents",) if D == 576 else ("nhd", "hnd"):
        assert assert_parity(cache_case(layout, H=H, D=D, B=2, layers=1), backend) > 0


@pytest.mark.parametrize(("B", "nodes", "K"), [(40, 128, 9), (2, 128, 128), (3, 40, 33), (5, 1, 1), (4, 9, 20)])
def test_batches_and_trees(B, nodes, K, backend):
    moved = assert_parity(cache_case("hnd", torch.int8, B=B, nodes=nodes, K=K, H=2, D=16, layers=1), backend)
    assert moved > 0 or nodes == 1  # an only node is in its place


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=ids([torch.int32, torch.int64]))
def test_index_dtypes_and_strides(index, backend):
    for layout in ("nhd", "contiguous_nhd"):
        case = cache_case(layout, B=4, slots=True, H=2, layers=1)
        options = {
            k: torch.nn.functional.pad(t, (0, 3))[:, :-3].to(index) if t.dim() == 2 else t.to(index)
            for k, t in case.options.items()
        }
        path = torch.nn.functional.pad(case.path, (0, 2), value=1)[:, :-2]
        other = case._replace(path=path, seq_lens=case.seq_lens.to(index), options=options)
        assert_bits(compact(other, backend), expected(case))


def test_overlap_move(backend):
    """Destinations that are sources of earlier and of later moves: all are read before any is written."""
    T, root = 150, 3
    for nodes in (
        [2, 3, 4, 5, 6],
        [1, 3, 4, 9],
        [2, 4, 6, 8],
        [*range(2, 130)],
        [1, *range(3, 130)],
        [*range(2, 136, 2)],
    ):
        cache = random_bits((1, T, 2, 8), torch.float16, generator(nodes))
        want = cache.clone()
        for i, node in enumerate(nodes):
            bits(want)[0, root + 1 + i] = bits(cache)[0, root + node]
        sk.kv_compact([cache], torch.tensor([nodes], dtype=torch.int32), torch.tensor([root]), backend=backend)
        assert_bits([cache], [want], nodes)


def moved_to(backend, path, root=4, T=12, **options):
    """Where each token of a cache of one-element tokens 0, 1, 2, ... came from."""
    cache = torch.arange(T, dtype=torch.float32).view(options.pop("shape", (1, T, 1, 1)))
    sk.kv_compact(
        [cache], torch.tensor([path], dtype=torch.int32), torch.tensor([root]), backend=backend, **options
    )  # fmt: skip
    return cache.flatten().int().tolist()


def test_entries_that_do_not_ascend_are_skipped(backend):
    plain = list(range(12))
    assert moved_to(backend, [2, 3, -1]) == [0, 1, 2, 3, 4, 6, 7, 7, 8, 9, 10, 11]
    for path in ([1, 2, 3], [0, 0, 0], [-1, -1, -1], [-7, 1, 0], [1, 1, 1], [-(2**31)] * 3, [2**31 - 1] * 3):
        assert moved_to(backend, path) == plain, path
    assert moved_to(backend, [3, 3, 5]) == [0, 1, 2, 3, 4, 7, 6, 9, 8, 9, 10, 11]
    assert moved_to(backend, [5, 4, 6]) == [0, 1, 2, 3, 4, 9, 6, 10, 8, 9, 10, 11]
    assert moved_to(backend, [-1, 5, 2**31 - 1]) == [0, 1, 2, 3, 4, 5, 9, 7, 8, 9, 10, 11]


def test_positions_without_a_place_are_skipped(backend):
    """Neither read nor written through; the other moves happen."""
    plain = list(range(12))
    assert moved_to(backend, [2, 8, 9]) == [0, 1, 2, 3, 4, 6, 6, 7, 8, 9, 10, 11]  # 4 + 8 is past the end
    assert moved_to(backend, [2, 4, 6], root=-3) == [3, *range(1, 12)]  # -2 and -1 are before it
    assert moved_to(backend, [2, 4, -1], root=-(2**40)) == plain
    assert moved_to(backend, [2, 4, -1], root=2**62) == plain
    for slot in (-1, 1, 2**40):
        assert moved_to(backend, [2, 4, -1], slots=torch.tensor([slot])) == plain
    table = torch.tensor([[1, 0, 2]])
    want = [0, 1, 2, 3, 7, *range(5, 12)]
    assert moved_to(backend, [2, 4, 6], root=-3, shape=(3, 4, 1, 1), block_table=table) == want
    want = [*range(6), 9, *range(7, 12)]
    assert moved_to(backend, [2, 4, 6], root=-3, shape=(2, 6, 1, 1), slots=torch.tensor([1])) == want
    paged = {"shape": (3, 4, 1, 1), "root": 2}
    for table, want in (
        ([0, 1, 2], [0, 1, 2, 4, 6, 5, 6, 7, 8, 9, 10, 11]),
        ([0, 1], [0, 1, 2, 4, 6, *range(5, 12)]),
        ([2, 0, 1], [2, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0]),
        ([0, -1, 2], plain),
        ([-1, 1, 2], [0, 1, 2, 3, 6, *range(5, 12)]),
        ([0, 1, 3], [0, 1, 2, 4, 6, *range(5, 12)]),
        ([0, 2**31 - 1, -5], plain),
    ):
        table = torch.tensor([table], dtype=torch.int32)
        got = moved_to(backend, [2, 4, 8 if table.shape[1] < 3 else -1], block_table=table, **paged)
        assert got == want, table


def test_the_first_token_of_the_first_page_is_a_place_like_others(backend):
    """What does not move must not be parked there."""
    for path in ([2, -1, -1], [2, 2, 1], [-1, 3, -1], [1, -1, 2**31 - 1]):
        table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
        root = 2 if path[1] == 3 else 3
        want = [1, *range(1, 12)] if path[0] != 1 else list(range(12))
        assert moved_to(backend, path, shape=(3, 4, 1, 1), root=root, block_table=table) == want, path


def test_a_page_of_nobody_is_never_read(backend):
    """What a block of -1 would be in C: the last page, or the memory before the first, which here is the cache's too."""
    for swapped in (False, True):
        buffer = random_bits((4, 6, 2, 8) if swapped else (6, 4, 2, 8), torch.bfloat16, generator("nobody"))
        want = buffer.clone()
        cache = (buffer.transpose(0, 1) if swapped else buffer)[1:5]
        for block in (-1, 4):
            table, path = torch.full((2, 3), block), torch.tensor([[2, 5], [3, 4]], dtype=torch.int32)
            sk.kv_compact([cache], path, torch.tensor([0, 3]), block_table=table, backend=backend)
            assert_bits([buffer], [want])


def test_empty(backend):
    case = cache_case("nhd", B=2, layers=1)
    path, table = case.path, case.options["block_table"]
    for changed in (
        case._replace(path=path[:, :0]),
        case._replace(path=path[:0], seq_lens=case.seq_lens[:0], options={"block_table": table[:0]}),
        case._replace(options={"block_table": table[:, :0]}),
        case._replace(views=lambda buffers: []),
        case._replace(views=lambda buffers: [t[:0] for t in buffers]),
        case._replace(views=lambda buffers: [t[..., :0] for t in buffers]),
    ):
        assert_bits(compact(changed, backend), case.buffers)


def test_layers_that_differ(backend):
    """Sliding layers with fewer heads, latents, scales per token: each kind in a launch of its own, one call."""
    g, case = generator("differ"), cache_case("nhd", B=3, layers=1)
    n = case.buffers[0].shape[0]
    others = [
        random_bits((n, 16, 2, 64), torch.bfloat16, g), random_bits((n, 16, 72), torch.float8_e4m3fn, g),
        random_bits((n, 16, 4), torch.float32, g), random_bits((n, 16, 4, 64), torch.bfloat16, g),
        random_bits((n + 1, 16, 4, 64), torch.bfloat16, g),
    ]  # fmt: skip
    assert assert_parity(case._replace(buffers=case.buffers + others), backend) > 0


def test_past_two_to_the_31(backend):
    """Offsets of more than 2^31 elements, in a cache whose memory is mostly never touched."""
    pages, page_size, D = (1 << 19) + 8, 64, 130
    cache = torch.empty(pages, page_size, D, dtype=torch.int8)[..., 1:]  # no word is aligned
    assert (pages - 8) * page_size * D > 1 << 32
    table = torch.tensor([[pages - 1, 2, pages - 3]], dtype=torch.int32)
    text = random_bits((192, D - 1), torch.int8, generator("large"))
    cache[table[0].long()] = text.view(3, 64, -1)
    sk.kv_compact(
        [cache], torch.tensor([[3, 70, 130]], dtype=torch.int32), torch.tensor([50]), block_table=table, backend=backend
    )  # fmt: skip
    want = text.clone()
    want[51:54] = text[[53, 120, 180]]
    assert torch.equal(cache[table[0].long()].view(192, -1), want)


# --- what the cache is for ----------------------------------------------------------------------------------------------


class ToyAttention:
    """Two heads that attend what a cache holds; keys and values of a token depend on it and its position alone."""

    def __init__(self, vocab=23, H=2, D=8):
        g = torch.Generator().manual_seed(3)
        self.key, self.value, self.query = (torch.randn(vocab, H, D, generator=g) for _ in range(3))
        self.place, self.head = torch.randn(200, H, D, generator=g), 4 * torch.randn(H * D, vocab, generator=g)

    def write(self, caches, where, tokens, positions):
        caches[0][where] = self.key[tokens] + self.place[positions]
        caches[1][where] = self.value[tokens]

    def logits(self, token, position, keys, values):
        query = self.query[token] + self.place[position]
        weights = torch.einsum("hd,thd->ht", query, keys).softmax(1)
        return torch.einsum("ht,thd->hd", weights, values).flatten() @ self.head


@pytest.mark.parametrize("page_size", [4, 16])
def test_a_toy_attention_decodes_on(page_size, backend):
    """Trees over three steps, verified by `verify_tree`: after each the logits are those of a fresh cache of the accepted
    text."""
    toy, B, d = ToyAttention(), 3, 9
    g = generator("toy")
    parents = [0, 0, 1, 2, 2, 5, 5, 7, 7]
    depth = [0]
    for parent in parents:
        depth.append(depth[parent] + 1)
    texts = [torch.randint(23, (n,), generator=g).tolist() for n in (5, 12, 3)]
    caches = [torch.full((40, page_size, 2, 8), torch.nan) for _ in range(2)]
    table = torch.randperm(40, generator=g)[: B * 8].view(B, 8).int()

    def where(b, positions):
        return table[b, torch.as_tensor(positions) // page_size].long(), torch.as_tensor(positions) % page_size

    def fresh(text):
        keys = toy.key[text] + toy.place[torch.arange(len(text))]
        return toy.logits(text[-1], len(text) - 1, keys, toy.value[text])

    for b, text in enumerate(texts):  # all but the last token, which is the first tree's root
        toy.write(caches, where(b, range(len(text) - 1)), torch.tensor(text[:-1]), torch.arange(len(text) - 1))
    moved = 0
    for _ in range(3):
        seq_lens = torch.tensor([len(text) - 1 for text in texts])
        drafts = torch.randint(23, (B, d), generator=g)
        for b, text in enumerate(texts):  # the right tokens at nodes 2, 5, 7: not where they will have to lie
            right = list(text)
            for node in (2, 5, 7)[: 1 + b]:
                right.append(int(fresh(right).argmax()))
                drafts[b, node - 1] = right[-1]
        rows = []
        for b, text in enumerate(texts):
            L = len(text) - 1
            tokens = torch.tensor([text[-1], *drafts[b].tolist()])
            toy.write(caches, where(b, range(L, L + d + 1)), tokens, L + torch.tensor(depth))
            for node in range(d + 1):
                above = [node]
                while above[0]:
                    above.insert(0, parents[above[0] - 1])
                seen = where(b, [*range(L), *(L + n for n in above)])
                rows.append(toy.logits(int(tokens[node]), L + depth[node], caches[0][seen], caches[1][seen]))
        cu = torch.arange(B + 1, dtype=torch.int32) * d
        params = sk.SamplingTensors.create(0.0, batch_size=B)
        out = sk.verify_tree(torch.stack(rows), drafts.flatten(), torch.tensor(parents * B), cu, params, max_depth=5)
        sk.kv_compact(caches, out.path, seq_lens, block_table=table, backend=backend)
        moved += int((out.path > torch.arange(1, 6)).sum())
        for b, text in enumerate(texts):
            text.extend(out.tokens[b, : int(out.num_emitted[b])].tolist())
            L = len(text) - 1
            assert int(seq_lens[b]) + 1 + int(out.num_accepted[b]) == L
            seen = where(b, range(L))
            keys = toy.key[text[:-1]] + toy.place[torch.arange(L)]
            assert torch.equal(caches[0][seen], keys) and torch.equal(caches[1][seen], toy.value[text[:-1]])
            toy.write(caches, where(b, [L]), torch.tensor(text[-1:]), torch.tensor([L]))
            seen = where(b, range(L + 1))
            assert torch.equal(toy.logits(text[-1], L, caches[0][seen], caches[1][seen]), fresh(text))
    assert moved > 5


# --- contract -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nhd", "fused_inside", "hnd"])
def test_compiles_whole(layout, backend):
    def step(buffers, path, seq_lens, table, scale):
        buffers = [t.mul_(scale) for t in buffers]
        caches = [view for t in buffers for view in LAYOUTS[layout].views(t)]
        sk.kv_compact(caches, path, seq_lens, block_table=table, backend=backend)
        return sum(t.sum() for t in caches)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for B in (2, 4, 3):
        case = cache_case(layout, torch.float32, B=B, H=2, D=8)
        plain = [torch.randn(t.shape, generator=generator(B)) for t in case.buffers]
        got, want = [t.clone() for t in plain], [t.clone() for t in plain]
        arguments = (case.path, case.seq_lens, case.options["block_table"], 2.0)
        torch.testing.assert_close(compiled(got, *arguments), step(want, *arguments))
        assert_bits(got, want)
    assert counter.frame_count <= 2


def test_fake_tensors(backend):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        caches = [torch.empty(9, 16, 4, 64, dtype=torch.bfloat16) for _ in range(4)]
        path, table = torch.empty(3, 5, dtype=torch.int32), torch.empty(3, 4, dtype=torch.int32)
        assert sk.kv_compact(caches, path, torch.empty(3).long(), block_table=table, backend=backend) is None


CACHE = torch.zeros(9, 16, 2, 8)
GOOD = {
    "caches": [CACHE, torch.zeros(9, 16, 2, 8)],
    "path": make_paths(3, 4, 9, generator("good")),
    "seq_lens": torch.tensor([3, 0, 40]),
    "block_table": torch.arange(9, dtype=torch.int32).view(3, 3),
}
CONTIGUOUS = {"block_table": None}
WRONG = {
    "caches_type": ({"caches": CACHE}, r"caches must be a list or tuple of tensors, got float32 \[9, 16, 2, 8\]"),
    "cache_type": ({"caches": [CACHE, None]}, r"caches\[1\] must be a tensor on cpu .*got NoneType"),
    "cache_size": ({"caches": [CACHE.double()]}, r"caches\[0\] must be .*of 1, 2 or 4 bytes, got float64"),
    "cache_device": ({"caches": [CACHE, CACHE.to("meta")]}, r"caches\[1\] must be a tensor on cpu.*on meta"),
    "cache_rank": (
        {"caches": [CACHE, CACHE[0, 0]]},
        r"caches\[1\] must be \[pages, page_size, H, D\].*got float32 \[2, 8\]",
    ),
    "cache_columns": (
        {"caches": [CACHE.mT]},
        r"caches\[0\] must be contiguous in its last .*strides \[256, 16, 1, 8\]",
    ),
    "cache_expanded": ({"caches": [CACHE[:1].expand(9, -1, -1, -1)]}, r"caches\[0\] must be .*do not share memory"),
    "cache_layout": (
        {"caches": [CACHE, CACHE.transpose(1, 2)]},
        r"caches\[1\] must be of page_size=16 tokens .*\[9, 2, 16, 8\]",
    ),
    "page_size": (
        {"page_size": 2},
        r"caches\[0\] must be of page_size=2 tokens a page in dimension 1, got .*\[9, 16, 2, 8\]",
    ),
    "page_size_alone": ({**CONTIGUOUS, "page_size": 16}, "page_size must be None without a block_table, got int 16"),
    "few_rows": ({**CONTIGUOUS, "caches": [CACHE[:2]]}, r"caches\[0\] must be of at least B=3 rows.*got float32 \[2, "),
    "path_dtype": ({"path": GOOD["path"].long()}, r"path must be int32 \[B, K\], got int64 \[3, 4\]"),
    "path_rank": ({"path": GOOD["path"][0]}, r"path must be int32 \[B, K\], got int32 \[4\]"),
    "seq_lens_size": ({"seq_lens": torch.zeros(2).int()}, r"seq_lens must be int32 or int64 \[B=3\].*got int32 \[2\]"),
    "seq_lens_dtype": ({"seq_lens": torch.zeros(3)}, r"seq_lens must be int32 or int64 \[B=3\].*got float32"),
    "table_dtype": (
        {"block_table": torch.zeros(3, 3)},
        r"block_table must be int32 or int64 \[B=3, W\] on cpu, got float32",
    ),
    "table_rows": ({"block_table": GOOD["block_table"][:2]}, r"block_table must be .*\[B=3, W\].*got int32 \[2, 3\]"),
    "table_columns": (
        {"block_table": GOOD["block_table"].t()},
        r"block_table must be contiguous in its last dimension",
    ),
    "slots_and_table": ({"slots": torch.arange(3)}, "slots must be None with a block_table, got int64"),
    "slots_dtype": ({**CONTIGUOUS, "slots": torch.zeros(3)}, r"slots must be int32 or int64 \[B=3\].*got float32"),
    "backend": ({"backend": "tpu"}, "backend must be one of .*got 'tpu'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name, backend):
    changes, message = WRONG[name]
    CACHE.copy_(torch.rand(CACHE.shape))
    before = CACHE.clone()
    with pytest.raises(ValueError, match="^kv_compact: " + message):
        sk.kv_compact(**{**GOOD, "backend": backend, **changes})
    assert torch.equal(CACHE, before)
    sk.kv_compact(**GOOD, page_size=16, backend=backend)
