"""Host side that the Triton ops share: heuristics, workspace, compile options."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from .._checks import fail
from ._row import CANDIDATES

WARPS = 8
TILE = 4096
"""Tokens that are worth a program of their own."""
OPTIONS = {
    "num_warps": WARPS,
    "num_stages": 1,
    # Two blocks of eight warps on a multiprocessor, a tile each in flight and one ahead. Left alone, the assembler takes
    # 128 registers and spills.
    "maxnreg": 112,
    # Multiplications stay apart from additions: the bits of the shared formulas do not depend on the backend.
    "enable_fp_fusion": False,
}
MAX_VOCAB = 1 << 24  # a race key holds 24 bits of token
MAX_SPLITS = 32


# Triton's own cdiv and next_power_of_2 cost microseconds a call on the host.
def power_of_2(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


@functools.cache
def subtile_of(vocab: int) -> int:
    """Tokens of a subtile: 128, which a warp reduces alone, more where a row would have over 1,024 of them."""
    return min(max(128, power_of_2(-(-vocab // 1024))), TILE)


def scan_tile(rows: Tensor, sub: int) -> int:
    """Tokens that a scan takes at once: 8 KB where 16-byte loads are possible, fewer where each token needs an address.
    Triton knows of a stride whether 16 divides it, in elements."""
    aligned = rows.data_ptr() % 16 == 0 and rows.stride(0) % 16 == 0
    return max(8192 // rows.element_size() if aligned else 1024, sub)


@functools.cache
def maxima_of(vocab: int) -> int:
    """Subtiles of a row, to a power of two, of whole tiles."""
    return power_of_2(-(-vocab // TILE)) * (TILE // subtile_of(vocab))


@functools.cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def most_splits(vocab: int) -> int:
    """Programs that a row has work for, a power of two: a tile each."""
    return min(power_of_2(-(-vocab // TILE)), MAX_SPLITS)


def scan_splits(rows: int, vocab: int, device: torch.device) -> int:
    """Programs per row of a scan: until there are four for every multiprocessor."""
    return _splits(4, rows, vocab, device)


def race_splits(rows: int, vocab: int, device: torch.device) -> int:
    """Programs per row of a race: until there are two for every multiprocessor. Only a flat row keeps them busy."""
    return min(_splits(2, rows, vocab, device), maxima_of(vocab) // race_share_of(vocab))


def race_share_of(vocab: int) -> int:
    """Subtiles that a program lists at once; it goes through its part of the row by so many."""
    return min(128, maxima_of(vocab))


def _splits(per_processor: int, rows: int, vocab: int, device: torch.device) -> int:
    wanted = -(-per_processor * processors(device) // max(rows, 1))
    return min(power_of_2(wanted), most_splits(vocab))


def check_vocab(op: str, name: str, vocab: int) -> None:
    if vocab > MAX_VOCAB:
        fail(op, name, f"over at most {MAX_VOCAB} ids for backend 'triton'", str(vocab))


def check_width(op: str, name: str, width: int) -> None:
    """Of an output row, which one block holds."""
    if width >= 1 << 20:
        fail(op, name, f"below {1 << 20} for backend 'triton'", str(width))


class Workspace:
    """What the programs of a call leave for each other: `space`, per scanned row its subtiles' maxima and masses, a list of
    subtiles and candidates, 4 * (3 * subtiles + 1,024) bytes; results of 32 bits; 64-bit counters, zero between calls."""

    def __init__(self, device: torch.device, kept: bool = False):
        self.device = device
        self.kept = kept
        self.lock = threading.Lock()
        self.scratch = torch.empty(0)
        self.counters = torch.empty(0)
        self.taken: dict[tuple, dict[str, Tensor]] = {}  # by the sizes: a step's are those of the step before

    @contextlib.contextmanager
    def held(self, *sizes):
        """`take`, for one call at a time: two threads on one stream must not come between each other's launches. A call
        that fails between its launches leaves counters behind, so they are given up."""
        with self.lock:
            try:
                yield self.take(*sizes)
            except BaseException:
                self.taken.clear()
                self.counters = torch.empty(0)
                raise

    def take(self, rows: int, maxima: int, counters: dict[str, int], found: dict[str, int]) -> dict[str, Tensor]:
        key = (rows, maxima, *counters.items(), *found.items())
        if key not in self.taken:
            if len(self.taken) >= 256:
                self.taken.clear()
            self.taken[key] = self._take(rows, maxima, counters, found)
        return self.taken[key]

    def _take(self, rows: int, maxima: int, counters: dict[str, int], found: dict[str, int]) -> dict[str, Tensor]:
        sizes = {"space": rows * (3 * maxima + CANDIDATES.value), **found}
        if self.scratch.numel() < (needed := _padded(sizes)):
            self.taken.clear()
            self.scratch = self._new(torch.empty, power_of_2(needed), torch.float32)
        if self.counters.numel() < (needed := _padded(counters)):
            self.taken.clear()
            self.counters = self._new(torch.zeros, power_of_2(needed), torch.int64)
        taken = _cut(self.scratch, sizes) | _cut(self.counters, counters)
        return {name: t.view(torch.int32) if name in INTEGERS else t for name, t in taken.items()}

    def _new(self, create: Callable, size: int, dtype: torch.dtype) -> Tensor:
        make = functools.partial(create, size, dtype=dtype, device=self.device)
        return kept_tensor(make, self.device) if self.kept else make()


def kept_tensor(make: Callable[[], Tensor], device: torch.device) -> Tensor:
    """What is kept comes from no pool of the moment (a graph's, while inductor warms it up; `torch.cuda.use_mem_pool`)
    and is no inference tensor. Both are matters of a thread, so another thread makes it, on the caller's stream."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run() -> Tensor:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


INTEGERS = (
    "row_status",
    "row_token",
    "peak",
    "path_node",
    "path_status",
    "path_argmax",
    "walked",
    "taken",
    "ends",
    "tops",
    "queue",
)


def _room(size: int) -> int:
    """Parts begin at multiples of 32 elements: Triton compiles anew where the alignment of a pointer changes."""
    return -(-size // 32) * 32


def _padded(sizes: dict[str, int]) -> int:
    return sum(map(_room, sizes.values()))


def _cut(buffer: Tensor, sizes: dict[str, int]) -> dict[str, Tensor]:
    parts = buffer[: _padded(sizes)].split([_room(size) for size in sizes.values()])
    return {name: part[:size] for (name, size), part in zip(sizes.items(), parts, strict=True)}


_workspaces: dict[tuple[torch.device, int], Workspace] = {}


@contextlib.contextmanager
def workspace(rows: int, maxima: int, counters: dict[str, int], device: torch.device, **found: int):
    """The scratch of a call by name, for as long as its launches are being queued.

    One workspace per device and stream, kept and grown. Inside a CUDA graph capture a call has its own, from the graph's
    memory: graphs may be replayed on any stream, and its counters are zeroed in the graph.
    """
    if device.type != "cuda":
        yield Workspace(device).take(rows, maxima, counters, found)
        return
    if torch.cuda.is_current_stream_capturing():
        yield Workspace(device).take(rows, maxima, counters, found)
        return
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    kept = _workspaces.get(key) or _workspaces.setdefault(key, Workspace(device, kept=True))
    with kept.held(rows, maxima, counters, found) as scratch:
        yield scratch
