"""Caches of every layout, filled with random bits, and what the ops that move bits should make of them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.cases import generator

DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32)
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def random_bits(shape: Sequence[int], dtype: torch.dtype, g: torch.Generator) -> Tensor:
    """Any bits: NaNs with payloads, infinities, subnormal numbers."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(256, (*shape, size), dtype=torch.uint8, generator=g).view(dtype).view(*shape)


def bits(t: Tensor) -> Tensor:
    return t.view(INTEGERS[t.element_size()])


class Layout(NamedTuple):
    """`shape` of a buffer for (pages, page_size, H, D); `views` cuts the caches out of it."""

    shape: Callable[[int, int, int, int], tuple[int, ...]]
    views: Callable[[Tensor], list[Tensor]]
    paged: bool = True


LAYOUTS = {
    "nhd": Layout(lambda n, p, h, d: (n, p, h, d), lambda t: [t]),
    "hnd": Layout(lambda n, p, h, d: (n, h, p, d), lambda t: [t.transpose(1, 2)]),
    "fused_inside": Layout(lambda n, p, h, d: (n, 2, p, h, d), lambda t: [t[:, 0], t[:, 1]]),
    "fused_outside": Layout(lambda n, p, h, d: (2, n, p, h, d), lambda t: [t[0], t[1]]),
    "fused_hnd": Layout(lambda n, p, h, d: (n, 2, h, p, d), lambda t: [t[:, i].transpose(1, 2) for i in (0, 1)]),
    "offset_major": Layout(lambda n, p, h, d: (p, n, h, d), lambda t: [t.transpose(0, 1)]),
    "latents": Layout(lambda n, p, h, d: (n, p, d), lambda t: [t]),
    "between": Layout(lambda n, p, h, d: (n, p, h, d + 3), lambda t: [t[..., 1:-2]]),
    "contiguous_nhd": Layout(lambda n, p, h, d: (n, p, h, d), lambda t: [t], False),
    "contiguous_hnd": Layout(lambda n, p, h, d: (n, h, p, d), lambda t: [t.transpose(1, 2)], False),
}


def make_paths(B: int, K: int, nodes: int, g: torch.Generator) -> Tensor:
    """int32 [B, K]: ascending nodes of 1..nodes and -1 behind them, of any length."""
    rows = []
    for _ in range(B):
        length = int(torch.randint(min(K, nodes) + 1, (), generator=g))
        rows.append(sorted((torch.randperm(nodes, generator=g)[:length] + 1).tolist()) + [-1] * (K - length))
    return torch.tensor(rows, dtype=torch.int32).view(B, K)


class CacheCase(NamedTuple):
    buffers: list[Tensor]
    views: Callable[[list[Tensor]], list[Tensor]]
    path: Tensor
    seq_lens: Tensor
    options: dict


def cache_case(
    layout: str, dtype=torch.bfloat16, B=3, page_size=16, H=4, D=64, nodes=12, K=5, layers=2, slots=False, seed=0,
    longest=70,
) -> CacheCase:  # fmt: skip
    """Requests of up to `longest` tokens and a tree. Paged: each page belongs to one request at most, a few blocks are -1."""
    g = generator(layout, dtype, B, page_size, H, D, nodes, K, seed)
    made = LAYOUTS[layout]
    seq_lens = torch.randint(longest, (B,), generator=g)
    options: dict = {}
    if made.paged:
        blocks = -(-(longest + nodes + 1) // page_size)
        rows, tokens = B * blocks + 3, page_size
        table = torch.randperm(rows, generator=g)[: B * blocks].view(B, blocks)
        options["block_table"] = torch.where(torch.rand(B, blocks, generator=g) < 0.05, -1, table).int()
    else:
        rows, tokens = B + 2, longest + nodes - 8  # too short for the longest
        if slots:
            options["slots"] = torch.randperm(rows, generator=g)[:B]
    buffers = [random_bits(made.shape(rows, tokens, H, D), dtype, g) for _ in range(layers)]
    views = lambda buffers: [view for t in buffers for view in made.views(t)]  # noqa: E731
    return CacheCase(buffers, views, make_paths(B, K, nodes, g), seq_lens, options)


class PageCase(NamedTuple):
    buffers: list[Tensor]
    views: Callable[[list[Tensor]], list[Tensor]]

    def copies(self) -> list[Tensor]:
        return [t.clone() for t in self.buffers]


def page_case(layout: str, pages: int, page_size=16, H=4, D=24, dtype=torch.bfloat16, layers=2, seed=0) -> PageCase:
    """Paged caches between pages that are not theirs; the layouts that hold two in one buffer give the first one alone under an
    odd seed, so that the other is a guard."""
    g = generator("pages", layout, dtype, pages, page_size, H, D, seed)
    made = LAYOUTS[layout]
    buffers = [random_bits(made.shape(pages + 3, page_size, H, D), dtype, g) for _ in range(layers)]
    few = slice(1 if seed % 2 else None)
    return PageCase(buffers, lambda buffers: [view[1:-2] for t in buffers for view in made.views(t)[few]])


def written(buffers: list[Tensor], views: Callable[[list[Tensor]], list[Tensor]], values: list[Tensor]) -> list[Tensor]:
    """Copies of `buffers` whose views hold `values`."""
    copies = [t.clone() for t in buffers]
    for view, value in zip(views(copies), values, strict=True):
        bits(view).copy_(bits(value))
    return copies


def assert_bits(got: list[Tensor], want: list[Tensor], what="") -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(bits(a), bits(b)), f"{what} buffer {i}: {int((bits(a) != bits(b)).sum())} elements differ"
