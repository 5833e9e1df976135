"""Per-request sampling parameters and the status bits that every op reports."""

from typing import NamedTuple

import torch
from torch import Tensor

GREEDY_BELOW = float(torch.tensor(1e-5))
"""A temperature in [0, 1e-5) is greedy: the lowest id among the row's maxima, with probability one. Temperatures are
float32, so the bound is too: float32(1e-5) itself, a little below 1e-5, is not greedy."""

STATUS_EMPTY_ROW = 1
STATUS_NAN = 2
STATUS_ZERO_Q = 4
STATUS_BAD_Q_ROW = 8
STATUS_PLACEHOLDER = 16
STATUS_BAD_OFFSETS = 32


class SamplingParams(NamedTuple):
    """Parameters of B requests, or of S states with `slots` [B] choosing one per request.

    temperature f32 (0 = greedy) · top_p f32 (>= 1 off, <= 0 keeps the maxima) · top_k i32 (<= 0 or >= V off) ·
    min_p f32 (<= 0 off, >= 1 keeps the maxima) · seed i64 · slots i32/i64 [B] or None.
    The ops read attributes of these names, so any object that has them will do.
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    seed: Tensor
    slots: Tensor | None = None


class RowParams(NamedTuple):
    """One request's parameters as Python numbers (the exact values of their tensors' elements)."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int

    @property
    def greedy(self) -> bool:
        return not self.temperature >= GREEDY_BELOW


def request_params(params, b: int) -> RowParams:
    """Parameters of request b, read through `slots` where there are any."""
    s = int(params.slots[b]) if getattr(params, "slots", None) is not None else b
    return RowParams(
        temperature=float(params.temperature[s]),
        top_p=float(params.top_p[s]),
        top_k=int(params.top_k[s]),
        min_p=float(params.min_p[s]),
        seed=int(params.seed[s]),
    )


def clean_logits(row: Tensor) -> tuple[Tensor, bool]:
    """The row in float64 with NaN counted as -inf, and whether a NaN was seen."""
    z = row.detach().to("cpu", torch.float64)
    nan = torch.isnan(z)
    return z.masked_fill(nan, -torch.inf), bool(nan.any())
