"""`kv_rollback` and `kv_append_slots`: a step's bookkeeping of a paged cache, against torch's gather and scatter and
transformers' crop."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import python_ref
import specdec_kernels

from ._gate import GateError
from ._timing import Settings, ms, paired, summary, table, times

NAME = "kv_rollback"
STEP = "kv_append_slots + kv_rollback"
TORCH, CROP = "torch gather, scatter", "transformers' crop"
DRAFTS, PAGE_SIZE = 5, 16
LONGEST = 1 << 17
"""Tokens of a request at first: enough for every call of a run to take some off."""
LAYERS, HEADS, HEAD_SIZE = 32, 8, 128


@dataclass(frozen=True)
class RollbackCase:
    """B requests, each of whose steps appends its drafts and one more and takes `rejected` of them back."""

    seq_lens: Tensor
    block_table: Tensor
    free_pages: Tensor
    num_free: Tensor
    ref_counts: Tensor
    new: Tensor
    rejected: Tensor

    def state(self) -> dict:
        return {
            "seq_lens": self.seq_lens, "block_table": self.block_table, "free_pages": self.free_pages,
            "num_free": self.num_free, "ref_counts": self.ref_counts, "page_size": PAGE_SIZE,
        }  # fmt: skip

    def rollback(self, rejected: Tensor | None = None, backend: str = "auto") -> Tensor:
        rejected = self.rejected if rejected is None else rejected
        return specdec_kernels.kv_rollback(num_rejected=rejected, backend=backend, **self.state())

    def append(self, backend: str = "auto") -> specdec_kernels.AppendOutput:
        return specdec_kernels.kv_append_slots(num_new=self.new, max_new=DRAFTS + 1, backend=backend, **self.state())

    def rollback_by_torch(self) -> None:
        """The same by gather and scatter, for at most a page of rejected tokens and pages that nobody shares."""
        new = self.seq_lens - self.rejected
        last = (self.seq_lens + PAGE_SIZE - 1) // PAGE_SIZE
        gone = last > (new + PAGE_SIZE - 1) // PAGE_SIZE
        column = (last - 1).clamp_min(0).long()[:, None]
        page = self.block_table.gather(1, column)
        self.block_table.scatter_(1, column, torch.where(gone[:, None], -1, page))
        # Pages that stay are written behind the last entry.
        place = torch.where(gone, self.num_free + gone.cumsum(0) - 1, self.free_pages.shape[0] - 1)
        self.free_pages.scatter_(0, place, page[:, 0])
        self.num_free.add_(gone.sum())
        self.seq_lens.copy_(new)

    def step(self, backend: str = "auto") -> None:
        """Takes back all that it appended, so that every step finds the same state."""
        self.append(backend)
        self.rollback(self.new, backend)


def rollback_case(B: int, spare: int, longest: int = LONGEST) -> RollbackCase:
    """Texts of `longest` tokens less up to a page, pages in no order, `spare` of them free."""
    g = torch.Generator().manual_seed(11)
    blocks = longest // PAGE_SIZE + 1
    held, P = B * blocks, B * blocks + spare
    pages = torch.randperm(P, generator=g, dtype=torch.int32)
    lengths = longest - torch.randint(PAGE_SIZE, (B,), generator=g, dtype=torch.int32)
    table = pages[:held].view(B, blocks).clone()
    table[torch.arange(blocks) >= -(-lengths[:, None] // PAGE_SIZE)] = -1
    counts = torch.zeros(P, dtype=torch.int32)
    counts[table[table >= 0].long()] = 1
    free = torch.nonzero(counts == 0).flatten().int()
    stack = torch.full((P,), -1, dtype=torch.int32)
    stack[: len(free)] = free
    return RollbackCase(
        lengths, table, stack, torch.tensor([len(free)], dtype=torch.int32), counts,
        torch.full((B,), DRAFTS + 1, dtype=torch.int32),
        torch.randint(DRAFTS + 1, (B,), generator=g, dtype=torch.int32),
    )  # fmt: skip


def check(B: int) -> dict:
    """A step and a rollback on short texts, state and outputs against the oracle's."""
    case = rollback_case(B, spare=B, longest=4 * PAGE_SIZE)
    lists = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in case.state().items()}
    want = python_ref.kv_append_slots(num_new=case.new.tolist(), max_new=DRAFTS + 1, **lists)
    got = case.append()
    if any(getattr(got, name).tolist() != getattr(want, name) for name in want._fields):
        raise GateError("kv_append_slots: not the oracle's slots")
    by_torch = replace(case, **{name: t.clone() for name, t in case.state().items() if isinstance(t, Tensor)})
    status = python_ref.kv_rollback(num_rejected=case.rejected.tolist(), **lists)
    if case.rollback().tolist() != status:
        raise GateError(f"{NAME}: not the oracle's status")
    by_torch.rollback_by_torch()
    for who, got in ((NAME, case), (TORCH, by_torch)):
        state = {name: t.tolist() for name, t in got.state().items() if isinstance(t, Tensor)}
        state["free_pages"], free = ([*s[: state["num_free"][0]]] for s in (state["free_pages"], lists["free_pages"]))
        if who == TORCH:  # its counts stay: it knows of no sharing
            state["ref_counts"] = lists["ref_counts"]
        for name, value in state.items():
            if value != (free if name == "free_pages" else lists[name]):
                raise GateError(f"{who}: not the oracle's {name}")
    return {"checked": B, "undecided": 0}


def cropped(B: int) -> Callable[[], None]:
    """transformers' own cache of as many tokens: every row loses the same number, by slicing each layer's tensors."""
    from transformers.cache_utils import DynamicCache

    cache, entry = DynamicCache(), torch.zeros(1, dtype=torch.bfloat16).expand(B, HEADS, LONGEST, HEAD_SIZE)
    for layer in range(LAYERS):
        cache.update(entry[:, :, :1], entry[:, :, :1], layer)
        # Slicing reads no entry, so that one element can stand for all of them.
        cache.layers[layer].keys = cache.layers[layer].values = entry
    return lambda: cache.crop(-1)


def run(settings: Settings) -> list[dict]:
    results = []
    sizes = ((2, 0),) if settings.quick else ((8, 0), (64, 0), (8, 1 << 22))
    for B, spare in sizes:
        gate = check(B)
        ours, theirs = rollback_case(B, spare + 4 * B), rollback_case(B, spare + 4 * B)
        steps = rollback_case(B, spare + 4 * B)
        calls: dict[str, Callable] = {
            NAME: ours.rollback, STEP: steps.step, TORCH: theirs.rollback_by_torch
        }  # fmt: skip
        missing = {}
        if not settings.peers:
            pass
        elif importlib.util.find_spec("transformers") is None:
            missing[CROP] = "transformers is not installed"
        else:
            calls[CROP] = cropped(B)
        measured = summary(paired(calls, settings.rounds, settings), NAME)
        if min(int(case.seq_lens.min()) for case in (ours, theirs)) <= PAGE_SIZE:
            raise GateError(f"{NAME}: the texts ran out, so that nothing was timed in the end; fewer rounds, please")
        results.append({
            "kind": "bookkeeping", "batch": B, "pages": ours.free_pages.shape[0], "page_size": PAGE_SIZE, "drafts": DRAFTS,
            "rejected_mean": round(float(ours.rejected.float().mean()), 2), "layers_of_crop": LAYERS, "gate": gate,
            "missing": missing, **measured,
        })  # fmt: skip
    return results


def report(results: list[dict]) -> str:
    head = results[0]
    title = f"\n{NAME} · pages of {head['page_size']}, {head['drafts']} drafts a request, native on the host"
    lines = [
        [f"B={r['batch']}, {r['pages']:,} pages", ms(r["ms"][NAME]), ms(r["ms"][STEP]), ms(r["ms"][TORCH]),
         times(r["ratio"][TORCH]), ms(r["ms"][CROP]) if CROP in r["ms"] else "-", times(r["ratio"].get(CROP))]
        for r in results
    ]  # fmt: skip
    headers = ["", "median (p25-p75)", STEP, TORCH, "/ torch", f"{CROP}, {head['layers_of_crop']} layers", "/ crop"]
    return f"{title}\n{table(headers, lines)}"
