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

from .support import UnsupportedModel
from .transfers import on_device

NAME = "specdec_paged"
DEVICES, DTYPES = ("cuda",), (torch.float16, torch.bfloat16)
_WORKSPACE = 128 << 20
_active = threading.local()
_workspaces: dict[tuple, Tensor] = {}


def register() -> None:
    """Makes "specdec_paged" known to transformers. Raises ImportError where FlashInfer is not importable."""
    import flashinfer  # noqa: F401
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    # Causal order and windows are the kernel's own.
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


def check_model(model) -> None:
    """Raises UnsupportedModel for a model that FlashInfer cannot serve."""
    if model.device.type not in DEVICES or model.dtype not in DTYPES:
        dtypes = " or ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise UnsupportedModel(
            f'{type(model).__name__}: attention implementation "{NAME}" needs a model in {dtypes} on {" or ".join(DEVICES)}, '
            f"got {str(model.dtype).removeprefix('torch.')} on {model.device}"
        )


class Wrappers:
    """FlashInfer's wrappers of one cache, by the shape of a layer, each planned anew for a forward."""

    def __init__(self) -> None:
        self._made: dict[tuple, tuple[Any, Any]] = {}

    def planned(self, key: tuple, device: torch.device, *arguments, **options):
        import flashinfer

        wrapper, copied = self._made.get(key, (None, None))
        if wrapper is None:
            # One workspace for each stream, whose kernels follow one another.
            place = device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
            if place not in _workspaces:
                _workspaces[place] = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspaces[place], "NHD")
        if copied is not None:
            copied.synchronize()  # a plan is copied from pinned memory that the next one writes
        wrapper.plan(*arguments, **options)
        if device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(device))
        self._made[key] = wrapper, copied
        return wrapper


class PagedForward:
    """What one forward's attention needs to know of its rows: which tokens are real, which pages each row has. Layers of the
    same shape and window share a plan.

    counts: tokens of each row in this forward, of `width`; lengths: tokens before it; block_table: int32 [B, M]; windows: most
    tokens that a query of each layer reads, its own included, 0 for all; budget: the same of all layers, or None.
    """

    def __init__(
        self, counts: list[int], width: int, lengths: list[int], block_table: Tensor, page_size: int, windows: list[int],
        budget: int | None, wrappers: Wrappers,
    ):  # fmt: skip
        self.page_size, self.device, self.wrappers = page_size, block_table.device, wrappers
        self.windows = windows if budget is None else [min(w or budget, budget) for w in windows]
        after = [n + c for n, c in zip(lengths, counts, strict=True)]
        blocks = [-(-n // page_size) for n in after]
        self.query_ends, self.block_ends = _ends(counts), _ends(blocks)
        self.last_page = torch.tensor([(n - 1) % page_size + 1 for n in after], dtype=torch.int32)
        held, total = on_device(blocks, torch.int64, self.device), sum(blocks)
        row = torch.repeat_interleave(torch.arange(len(blocks), device=self.device), held, output_size=total)
        block = torch.arange(total, device=self.device) - (held.cumsum(0) - held)[row]
        # Blocks that were evicted lie outside of the window; a kernel may touch them all the same.
        self.pages = block_table[row, block].clamp_min(0)
        self.tokens: Tensor | None = None
        if any(n != width for n in counts):
            real = [row * width + i for row, n in enumerate(counts) for i in range(n)]
            self.tokens = on_device(real, torch.int64, self.device)
        self._plans: dict[tuple, Any] = {}

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int, cap: float) -> Tensor:
        """query [B * width, Hq, D] over pages of keys and values [P, page_size, Hk, D]. Padding gives zeros."""
        rows = query if self.tokens is None else query.index_select(0, self.tokens)
        key = (query.shape[1:], keys.shape[2:], values.shape[3], query.dtype, keys.dtype, scale, window, cap)
        if key not in self._plans:
            self._plans[key] = self.wrappers.planned(
                key, self.device, self.query_ends, self.block_ends, self.pages, self.last_page, query.shape[1],
                keys.shape[2], query.shape[2], self.page_size, head_dim_vo=values.shape[3], causal=True, sm_scale=scale,
                window_left=window - 1, logits_soft_cap=cap, q_data_type=query.dtype, kv_data_type=keys.dtype,
            )  # fmt: skip
        mixed = self._plans[key].run(rows, (keys, values))
        if self.tokens is None:
            return mixed
        return mixed.new_zeros(query.shape[0], *mixed.shape[1:]).index_copy_(0, self.tokens, mixed)


class Serving:
    """While it is entered, attention in this thread reads the pages of this forward."""

    def __init__(self, forward: PagedForward | None):
        self.forward = forward

    def __enter__(self) -> None:
        self.before = getattr(_active, "forward", None)
        _active.forward = self.forward

    def __exit__(self, *exception) -> None:
        _active.forward = self.before


def _attention(
    module, query: Tensor, key: Tensor, value: Tensor, attention_mask, scaling=None, sliding_window=None, softcap=None,
    **kwargs,
):  # fmt: skip
    """transformers' attention interface: query [B, Hq, q, D]; key and value are the pages that the cache gave."""
    forward: PagedForward | None = getattr(_active, "forward", None)
    if forward is None:
        raise RuntimeError(f'{NAME}: this attention works inside a decoder with cache="paged" alone')
    name, index = type(module).__name__, getattr(module, "layer_idx", None)
    if index is None:
        raise RuntimeError(f"{NAME}: {name} has no layer_idx, so that its window is not known")
    # Many models leave their windows to the mask and pass none here.
    window = forward.windows[index]
    if sliding_window and min(sliding_window, window or sliding_window) != window:
        raise RuntimeError(
            f"{NAME}: layer {index} has a window of {sliding_window}, its config says {window or 'none'}"
        )
    if attention_mask is not None:
        raise RuntimeError(f"{NAME}: {name} masks on its own, which this attention does not read")
    if kwargs.get("s_aux") is not None:
        raise RuntimeError(f"{NAME}: {name} has learned sinks, which this attention does not read")
    if kwargs.get("is_causal") is False:
        raise RuntimeError(f"{NAME}: {name} is not causal")
    batch, heads, width, dim = query.shape
    rows = query.transpose(1, 2).reshape(batch * width, heads, dim)
    scale = dim**-0.5 if scaling is None else float(scaling)
    mixed = forward.attend(rows, key, value, scale, window, softcap or 0.0)
    return mixed.view(batch, width, heads, -1), None


def _ends(sizes: list[int]) -> Tensor:
    """[0, s0, s0 + s1, ..], int32 on the host, where the plan is made."""
    return torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
