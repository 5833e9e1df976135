"""`kv_compact`: the accepted paths of a batch of trees in every layer's paged cache, against index_select and index_copy_."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import python_ref
import specdec_kernels

from ._gate import GateError
from ._timing import Settings, bandwidth, ms, paired, summary, table, times

NAME = "kv_compact"
PEER = "index_select, index_copy_"
NODES, DEPTH, PAGE_SIZE = 32, 5, 16
LAYOUTS = ("NHD", "HND")


@dataclass(frozen=True)
class CompactCase:
    """K and V of `layers` layers, [pages, page_size, H, D]; every node of every path moves."""

    layout: str
    caches: list[Tensor]
    path: Tensor
    seq_lens: Tensor
    block_table: Tensor

    def __call__(self, backend: str = "auto") -> None:
        specdec_kernels.kv_compact(self.caches, self.path, self.seq_lens, block_table=self.block_table, backend=backend)

    def rows(self) -> tuple[list[Tensor], Tensor, Tensor]:
        """(each cache as rows that are moved whole, sources, destinations): tokens, or under HND a token's heads."""
        heads = torch.arange(self.caches[0].shape[2])

        def index(node: Tensor) -> Tensor:
            position = self.seq_lens[:, None] + node
            page, offset = self.block_table.long().gather(1, position // PAGE_SIZE), position % PAGE_SIZE
            if self.layout == "NHD":
                return (page * PAGE_SIZE + offset).flatten()
            return ((page[..., None] * len(heads) + heads) * PAGE_SIZE + offset[..., None]).flatten()

        first = 2 if self.layout == "NHD" else 3
        stored = self.caches if self.layout == "NHD" else [t.transpose(1, 2) for t in self.caches]
        flat = [t.view(-1, *t.shape[first:]) for t in stored]
        return flat, index(self.path), index(torch.arange(1, self.path.shape[1] + 1).expand_as(self.path))

    def moved_bytes(self) -> int:
        cache = self.caches[0]
        return len(self.caches) * self.path.numel() * cache.shape[2] * cache.shape[3] * cache.element_size()


def compact_case(layout: str, quick: bool, B: int = 8) -> CompactCase:
    """The shape of Llama 3.1 8B's cache, behind texts of 256 to 512 tokens."""
    layers, H, D, longest = (2, 2, 16, 64) if quick else (32, 8, 128, 512)
    g = torch.Generator().manual_seed(5)
    blocks = -(-(longest + NODES + 1) // PAGE_SIZE)
    pages = torch.randperm(B * blocks, generator=g).view(B, blocks).int()
    shape = (B * blocks, PAGE_SIZE, H, D) if layout == "NHD" else (B * blocks, H, PAGE_SIZE, D)
    caches = [torch.randn(shape, generator=g).bfloat16() for _ in range(2)]
    caches = [caches[i % 2].clone() for i in range(2 * layers)]
    path = torch.rand(B, NODES - 1, generator=g).topk(DEPTH, dim=1).indices.sort(dim=1).values + 2
    return CompactCase(
        layout, [t if layout == "NHD" else t.transpose(1, 2) for t in caches], path.int(),
        torch.randint(longest // 2, longest, (B,), generator=g), pages,
    )  # fmt: skip


def check(case: CompactCase, name: str, call: Callable[[], None]) -> dict:
    """One call against the oracle, on the first and the last cache whole."""
    chosen = [case.caches[0], case.caches[-1]]
    expected = python_ref.kv_compact(chosen, case.path, case.seq_lens, case.block_table)
    call()
    for got, want in zip(chosen, expected, strict=True):
        if not torch.equal(got.view(torch.int16), want.view(torch.int16)):
            raise GateError(f"{name} {case.layout}: not the oracle's cache")
    return {"checked": len(chosen), "undecided": 0}


def indexed(case: CompactCase) -> Callable[[], None]:
    """The same moves by torch, with indices ready made."""
    rows, source, destination = case.rows()

    def call() -> None:
        for flat in rows:
            flat.index_copy_(0, destination, flat.index_select(0, source))

    return call


def run(settings: Settings) -> list[dict]:
    results = []
    for layout in LAYOUTS:
        case = compact_case(layout, settings.quick)
        gate = check(case, NAME, case)
        peer = indexed(case)
        check(case, PEER, peer)
        moved = case.moved_bytes()
        source, copy = torch.zeros(moved, dtype=torch.uint8), torch.zeros(moved, dtype=torch.uint8)
        calls = {NAME: case, PEER: peer, "copy": lambda source=source, copy=copy: copy.copy_(source)}
        measured = summary(paired(calls, settings.rounds, settings), NAME)
        results.append({
            "kind": "moving", "layout": layout, "dtype": "bfloat16", "batch": case.path.shape[0],
            "caches": len(case.caches), "page_size": PAGE_SIZE, "heads": case.caches[0].shape[2],
            "head_size": case.caches[0].shape[3], "nodes": NODES, "moves": case.path.shape[1], "gate": gate, **measured,
            **bandwidth(measured, NAME, 2 * moved, moved),
        })  # fmt: skip
    return results


def report(results: list[dict]) -> str:
    head = results[0]
    title = (
        f"\n{NAME} · {head['caches']} caches in {head['dtype']}, H={head['heads']}, D={head['head_size']}, pages of "
        f"{head['page_size']} · B={head['batch']}, {head['moves']} of {head['nodes']} nodes move"
    )
    lines = [
        [r["layout"], ms(r["ms"][NAME]), ms(r["ms"][PEER]), times(r["ratio"][PEER]), times(r["ratio"]["copy"]),
         f"{r['gb_per_s']:.1f}"]
        for r in results
    ]  # fmt: skip
    headers = ["layout", "median (p25-p75)", PEER, "/ index_copy_", "/ copy", "GB/s"]
    return f"{title}\n{table(headers, lines)}"
