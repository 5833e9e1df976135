"""A filtered distribution as three numbers per row.

    p(x) = exp((z_x - row_max) / T - log_mass)   if z_x >= cutoff   else 0

Temperature, top-k, top-p and min-p each keep the tokens whose logit is at least some value (ties are all kept), so any
composition of them is one cutoff.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .params import STATUS_EMPTY_ROW, STATUS_NAN, RowParams, clean_logits, request_params

FILTER_ORDERS = ("hf", "vllm", "joint")


class Nucleus(NamedTuple):
    """`cutoff`: smallest kept logit (-inf where no filter is on) · `row_max`: largest logit · `log_mass`: log of the sum
    of exp((z - row_max) / T) over the kept tokens. A row with nothing to keep is (+inf, -inf, -inf): p = 0 everywhere.
    A greedy row is (row_max, row_max, 0), and stands for one-hot at the lowest id of the maximum."""

    cutoff: Tensor
    row_max: Tensor
    log_mass: Tensor


class NucleusResult(NamedTuple):
    """`nucleus`: float64 [N] each · `status` int32 [N] · `margin` float64 [N]: the smallest relative change of any mass or
    threshold that would move the cutoff (inf where no filter compares masses)."""

    nucleus: Nucleus
    status: Tensor
    margin: Tensor


class RowNucleus(NamedTuple):
    cutoff: float
    row_max: float
    log_mass: float
    status: int
    margin: float


def scaled(z: Tensor, row_max: float, temperature: float) -> Tensor:
    """(z - row_max) / T in float64, exactly 0 at the maximum (+inf included)."""
    x = z - row_max
    x = torch.where(x == -math.inf, x, x / temperature)  # an infinite temperature does not bring back masked tokens
    return torch.where(z == row_max, torch.zeros_like(x), x)


def row_nucleus(row: Tensor, params: RowParams, filter_order: str = "hf") -> RowNucleus:
    """Nucleus of one row of raw logits [V].

    "hf": top-k, then top-p over the mass that top-k left, then min-p. "vllm": min-p, top-k, then top-p over what both
    left. "joint": top-k, top-p and min-p all on the unfiltered distribution.
    """
    if filter_order not in FILTER_ORDERS:
        raise ValueError(f"filter_order must be one of {FILTER_ORDERS}, got {filter_order!r}")
    z, nan_seen = clean_logits(row)
    status = STATUS_NAN if nan_seen else 0
    row_max = float(z.max()) if z.numel() else -math.inf
    if row_max == -math.inf:
        return RowNucleus(math.inf, -math.inf, -math.inf, status | STATUS_EMPTY_ROW, math.inf)
    if params.greedy:
        return RowNucleus(row_max, row_max, 0.0, status, math.inf)

    if row_max == math.inf:  # the mass is on the +inf tokens, and any filter ends there
        count = float((z == row_max).sum())
        filtered = 0 < params.top_k < z.numel() or params.min_p > 0 or params.top_p < 1
        return RowNucleus(math.inf if filtered else -math.inf, row_max, math.log(count), status, math.inf)

    w = torch.exp(scaled(z, row_max, params.temperature))
    # Distinct values in descending order: filters decide between values, never between equal logits.
    values, group = torch.unique(-z, return_inverse=True)
    values = -values
    group_mass = torch.zeros(values.numel(), dtype=torch.float64).scatter_add_(0, group, w)
    count = torch.bincount(group, minlength=values.numel()).cumsum(0)
    mass = group_mass.cumsum(0)
    last = values.numel() - 1
    total = float(mass[last])

    def first(condition: Tensor) -> int:
        hits = condition.nonzero()
        return int(hits[0]) if hits.numel() else last

    margins = []  # (group the filter ends at, its margin)
    k = m = t = last
    filtered = False
    if 0 < params.top_k < z.numel():
        filtered = True
        k = first(count >= params.top_k)
    if params.min_p > 0:
        filtered = True
        distance = scaled(values, row_max, params.temperature) - math.log(min(params.min_p, 1.0))
        m = int((distance >= 0).nonzero()[-1])
        near = distance.abs()[m + 1 : m + 2] if params.min_p >= 1 else distance.abs()[m : m + 2]
        margins.append((m, float(near.min()) if near.numel() else math.inf))
    if params.top_p < 1:
        filtered = True
        base = {"hf": k, "vllm": min(k, m), "joint": last}[filter_order]
        goal = max(params.top_p, 0.0) * float(mass[base])
        t = first(mass >= goal)
        gaps = [abs(float(mass[g]) - goal) / total for g in (t, t - 1) if g >= 0 and params.top_p > 0]
        if t == base and gaps:
            gaps = gaps[1:]  # the last group of the base cannot be exceeded, whatever its mass rounds to
        margins.append((t, min(gaps, default=math.inf)))
    end = min(k, m, t)
    relevant = [gap for g, gap in margins if g <= end + 1 or filter_order == "vllm"]
    cutoff = float(values[end]) if filtered else -math.inf
    return RowNucleus(cutoff, row_max, math.log(float(mass[end])), status, min(relevant, default=math.inf))


def row_probs(row: Tensor, nucleus: RowNucleus, params: RowParams) -> Tensor:
    """The row's distribution, float64 [V]; all zero for an empty row, one-hot at the lowest maximum for a greedy one."""
    z, _ = clean_logits(row)
    if nucleus.row_max == -math.inf:
        return torch.zeros_like(z)
    if params.greedy:
        p = torch.zeros_like(z)
        p[int((z == nucleus.row_max).nonzero()[0])] = 1.0
        return p
    p = torch.exp(scaled(z, nucleus.row_max, params.temperature) - nucleus.log_mass)
    return torch.where(z >= nucleus.cutoff, p, torch.zeros_like(p))


def nucleus(logits: Tensor, params, *, rows: Tensor | None = None, filter_order: str = "hf") -> NucleusResult:
    """Nucleus of each row of `logits` [N, V]; `rows` [N] maps a row to its request (default: row n is request n)."""
    out = []
    for n in range(logits.shape[0]):
        out.append(
            row_nucleus(logits[n], request_params(params, int(rows[n]) if rows is not None else n), filter_order)
        )
    columns = list(zip(*out, strict=True)) if out else [[], [], [], [], []]
    cutoff, row_max, log_mass, status, margin = columns
    as_f64 = lambda v: torch.tensor(v, dtype=torch.float64)  # noqa: E731
    return NucleusResult(
        Nucleus(as_f64(cutoff), as_f64(row_max), as_f64(log_mass)),
        torch.tensor(status, dtype=torch.int32),
        as_f64(margin),
    )
