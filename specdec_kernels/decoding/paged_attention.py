"""Attention that reads a `PagedCache`'s pages where they lie, by FlashInfer, through transformers' attention interface.

    specdec_kernels.decoding.paged_attention.register()
    model.set_attn_implementation("specdec_paged")
    SpeculativeDecoder(model, drafter, cache="paged")

Without it the cache is gathered for the model's own attention. FlashInfer wants a GPU and float16 or bfloat16.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

NAME = "specdec_paged"
_WORKSPACE = 128 << 20
_active = threading.local()
_workspaces: dict[torch.device, Tensor] = {}


def register() -> None:
    """Makes "specdec_paged" known to transformers. Raises ImportError where FlashInfer is not importable."""
    import flashinfer  # noqa: F401
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    # Causal order and windows are the kernel's own.
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


class PagedForward:
    """What one forward's attention needs to know of its rows: which tokens are real, which pages each row has. Layers of the
    same shape share a plan.

    counts: tokens of each row in this forward, of `width`; lengths: tokens before it; block_table: int32 [B, M]; budget: most
    tokens that a query reads, its own included, or None.
    """

    def __init__(
        self, counts: list[int], width: int, lengths: list[int], block_table: Tensor, page_size: int,
        budget: int | None = None,
    ):  # fmt: skip
        self.page_size, self.budget = page_size, budget
        self.device = block_table.device
        after = [n + c for n, c in zip(lengths, counts, strict=True)]
        blocks = [-(-n // page_size) for n in after]
        self.query_ends, self.block_ends = _ends(counts), _ends(blocks)
        self.last_page = torch.tensor([(n - 1) % page_size + 1 for n in after], dtype=torch.int32)
        columns = block_table.shape[1]
        held = [row * columns + m for row, count in enumerate(blocks) for m in range(count)]
        self.pages = block_table.flatten()[torch.tensor(held, dtype=torch.int64, device=self.device)]
        self.tokens: Tensor | None = None
        if any(n != width for n in counts):
            real = [row * width + i for row, n in enumerate(counts) for i in range(n)]
            self.tokens = torch.tensor(real, dtype=torch.int64, device=self.device)
        self._plans: dict[tuple, Any] = {}

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int, cap: float) -> Tensor:
        """query [B * width, Hq, D] over pages of keys and values [P, page_size, Hk, D]; window: tokens that are read, the query's
        own included, or 0 for all. Padding gives zeros."""
        if self.budget is not None:
            window = min(window or self.budget, self.budget)
        rows = query if self.tokens is None else query.index_select(0, self.tokens)
        key = (query.shape[1:], keys.shape[2:], values.shape[3], query.dtype, keys.dtype, scale, window, cap)
        if key not in self._plans:
            self._plans[key] = self._plan(query, keys, values, scale, window, cap)
        mixed = self._plans[key].run(rows, (keys, values))
        if self.tokens is None:
            return mixed
        return mixed.new_zeros(query.shape[0], *mixed.shape[1:]).index_copy_(0, self.tokens, mixed)

    def _plan(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int, cap: float):
        import flashinfer

        if self.device not in _workspaces:
            _workspaces[self.device] = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=self.device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspaces[self.device], "NHD")
        wrapper.plan(
            self.query_ends, self.block_ends, self.pages, self.last_page, query.shape[1], keys.shape[2], query.shape[2],
            self.page_size, head_dim_vo=values.shape[3], causal=True, sm_scale=scale, window_left=window - 1,
            logits_soft_cap=cap, q_data_type=query.dtype, kv_data_type=keys.dtype,
        )  # fmt: skip
        return wrapper


class serving:
    """While it is entered, attention in this thread reads the pages of this forward."""

    def __init__(self, forward: PagedForward | None):
        self.forward = forward

    def __enter__(self) -> None:
        _active.forward = self.forward

    def __exit__(self, *exception) -> None:
        _active.forward = None


def _attention(
    module, query: Tensor, key: Tensor, value: Tensor, attention_mask, scaling=None, sliding_window=None, softcap=None,
    **kwargs,
):  # fmt: skip
    """transformers' attention interface: query [B, Hq, q, D]; key and value are the pages that the cache gave."""
    forward: PagedForward | None = getattr(_active, "forward", None)
    if forward is None:
        raise RuntimeError(f'{NAME}: this attention works inside a decoder with cache="paged" alone')
    if kwargs.get("s_aux") is not None:
        raise RuntimeError(f"{NAME}: {type(module).__name__} has learned sinks, which this attention does not read")
    batch, heads, width, dim = query.shape
    rows = query.transpose(1, 2).reshape(batch * width, heads, dim)
    scale = dim**-0.5 if scaling is None else float(scaling)
    mixed = forward.attend(rows, key, value, scale, sliding_window or 0, softcap or 0.0)
    return mixed.view(batch, width, heads, -1), None


def _ends(sizes: list[int]) -> Tensor:
    """[0, s0, s0 + s1, ..], int32 on the host, where the plan is made."""
    return torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
