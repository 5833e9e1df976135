"""Checks of what the ops over a paged cache's bookkeeping take alike."""

import torch
from torch import Tensor

from . import _checks

I32 = (torch.int32,)


def check(
    op: str, seq_lens, block_table, free_pages, num_free, ref_counts, page_size, slots, null_page
) -> tuple[int, torch.device]:
    """Returns (number of requests, device)."""
    if not isinstance(block_table, Tensor) or block_table.dim() != 2 or block_table.dtype != torch.int32:
        _checks.fail(op, "block_table", "int32 [B, M]", block_table)
    (rows, M), device = block_table.shape, block_table.device
    if M < 1:
        _checks.fail(op, "block_table", "of at least one column", block_table)
    # Two rows that share memory would be two requests in one.
    if (M > 1 and block_table.stride(1) != 1) or (rows > 1 and block_table.stride(0) < M):
        must = "contiguous in its last dimension, rows apart"
        _checks.fail(op, "block_table", must, f"strides {list(block_table.stride())}")
    B = rows
    if slots is not None:
        _checks.vector(op, "slots", slots, _checks.INDEX_DTYPES, 0, "B", device, at_least=True)
        B = slots.shape[0]
        if B and not rows:
            _checks.fail(op, "block_table", "of at least one row where there are slots", block_table)
    _checks.vector(op, "seq_lens", seq_lens, I32, rows, "B" if slots is None else "R", device)
    _checks.vector(op, "free_pages", free_pages, I32, 1, "P", device, at_least=True)
    _checks.vector(op, "num_free", num_free, I32, 1, "", device)
    if ref_counts is not None:
        _checks.vector(op, "ref_counts", ref_counts, I32, free_pages.shape[0], "P", device)
    whole_number(op, "page_size", page_size, 2**31)
    if null_page != -1 or not isinstance(null_page, int):
        check_null_page(op, null_page, free_pages.shape[0], "P")
    return B, device


def check_null_page(op: str, null_page, pages: int, what: str) -> None:
    if not isinstance(null_page, (int, torch.SymInt)) or isinstance(null_page, bool) or not -1 <= null_page < pages:
        _checks.fail(op, "null_page", f"-1 or a page, an int below {what}={pages}", null_page)


def status_of(op: str, out, B: int, device: torch.device) -> Tensor:
    """Where a function that returns a status alone writes it."""
    if out is None:
        return torch.empty(B, dtype=torch.int32, device=device)
    _checks.output(op, "out", out, torch.int32, (B,), device)
    return out


def check_window(op: str, window, sinks) -> None:
    if window is not None:
        whole_number(op, "window", window, 2**31)
    whole_number(op, "sinks", sinks, 2**31, start=0)
    if window is None and sinks != 0:
        _checks.fail(op, "sinks", "0 without a window", sinks)


def whole_number(op: str, name: str, value, end: int, start: int = 1) -> None:
    if type(value) is int and start <= value < end:  # what it nearly always is, for the price of a comparison
        return
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool) or not start <= value < end:
        _checks.fail(op, name, f"an int in {start}..{end - 1}", value)
