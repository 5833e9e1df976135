"""Rows to distributions, and Philox noise, in float64 tensors."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..params import GREEDY_BELOW
from ..status import Status

EMPTY_ROW, NAN, ZERO_Q, BAD_Q_ROW, PLACEHOLDER, BAD_OFFSETS = (int(bit) for bit in Status)
CHUNK_ELEMENTS = 1 << 20
"""Rows are processed in chunks of about this many elements, so that a float64 temporary stays at eight megabytes."""


class Params(NamedTuple):
    """Per-row parameters, float64/int64 [n]."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor

    @property
    def greedy(self) -> Tensor:
        return ~(self.temperature >= GREEDY_BELOW)

    def __getitem__(self, index):  # rows, not fields
        return Params(*(field[index] for field in tuple(self)))


def gather_params(temperature, top_p, top_k, min_p, slots: Tensor | None, rows: Tensor | None) -> Params:
    index = rows
    if slots is not None:
        slots = slots.long()
        index = slots if rows is None else slots[rows.long().clamp(0, slots.shape[0] - 1)]
    if index is not None:
        index = index.long().clamp(0, temperature.shape[0] - 1)
        temperature, top_p, top_k, min_p = (t[index] for t in (temperature, top_p, top_k, min_p))
    return Params(temperature.double().clamp(max=1e30), top_p.double(), top_k.long(), min_p.double())


class Rows(NamedTuple):
    """`z` float64 [n, V] with NaN as -inf · nucleus fields float64 [n] · `empty`, `nan` bool [n]."""

    z: Tensor
    cutoff: Tensor
    row_max: Tensor
    log_mass: Tensor
    empty: Tensor
    nan: Tensor

    @property
    def status(self) -> Tensor:
        return (self.empty.int() * EMPTY_ROW + self.nan.int() * NAN).to(torch.int32)


def scaled(z: Tensor, row_max: Tensor, temperature: Tensor) -> Tensor:
    x = (z - row_max[:, None]) / temperature.clamp_min(GREEDY_BELOW)[:, None]
    x = torch.where(z == row_max[:, None], torch.zeros_like(x), x)
    return torch.where(z == -torch.inf, torch.full_like(x, -torch.inf), x)


def filter_rows(logits: Tensor, p: Params, filter_order: int) -> Rows:
    """Nucleus of each row by one descending sort; filter_order 0 "hf", 1 "vllm", 2 "joint"."""
    z = logits.double()
    nan = z.isnan()
    z = torch.where(nan, torch.full_like(z, -torch.inf), z)
    V = z.shape[1]
    ordered = z.sort(dim=1, descending=True).values
    row_max = ordered[:, 0]
    empty = row_max == -torch.inf
    x = scaled(ordered, row_max, p.temperature)
    mass = x.exp().cumsum(1)

    top_k_on = (p.top_k > 0) & (p.top_k < V)
    last_k = torch.where(top_k_on, p.top_k, V) - 1
    cut_k = ordered.gather(1, last_k[:, None])[:, 0]
    min_p_on = p.min_p > 0
    above = x >= p.min_p.clamp(1e-300, 1.0).log()[:, None]
    cut_m = ordered.gather(1, (above.sum(1).clamp_min(1) - 1)[:, None])[:, 0]
    cut_k = torch.where(top_k_on, cut_k, -torch.inf)
    cut_m = torch.where(min_p_on, cut_m, -torch.inf)

    base = (cut_k, torch.maximum(cut_k, cut_m), torch.full_like(cut_k, -torch.inf))[filter_order]
    base_count = (ordered >= base[:, None]).sum(1)
    base_mass = mass.gather(1, (base_count - 1)[:, None])[:, 0]
    goal = p.top_p.clamp_min(0.0) * base_mass
    reach = (mass < goal[:, None]).sum(1).clamp_max(V - 1)  # first index whose mass reaches the goal
    cut_p = torch.where(p.top_p < 1, ordered.gather(1, reach[:, None])[:, 0], -torch.inf)
    cut_p = torch.where(p.top_p < 1, torch.maximum(cut_p, base), cut_p)

    cutoff = torch.maximum(torch.maximum(cut_k, cut_m), cut_p)
    kept = (ordered >= cutoff[:, None]).sum(1).clamp_min(1)
    log_mass = mass.gather(1, (kept - 1)[:, None])[:, 0].log()
    filtered = top_k_on | min_p_on | (p.top_p < 1)
    cutoff = torch.where(filtered & (row_max == torch.inf), torch.full_like(cutoff, torch.inf), cutoff)
    cutoff = torch.where(p.greedy, row_max, cutoff)
    log_mass = torch.where(p.greedy, torch.zeros_like(log_mass), log_mass)
    inf = torch.full_like(row_max, torch.inf)
    return Rows(
        z,
        torch.where(empty, inf, cutoff),
        row_max,
        torch.where(empty, -inf, log_mass),
        empty,
        nan.any(1),
    )


def probs(rows: Rows, p: Params) -> Tensor:
    """float64 [n, V]; one-hot at the lowest maximum for greedy rows, 0 for empty ones."""
    x = scaled(rows.z, rows.row_max, p.temperature)
    out = torch.where(rows.z >= rows.cutoff[:, None], (x - rows.log_mass[:, None]).exp(), 0.0)
    peak = torch.zeros_like(out).scatter_(1, rows.z.argmax(1, keepdim=True), 1.0)
    out = torch.where(p.greedy[:, None], peak, out)
    return torch.where(rows.empty[:, None], 0.0, out)


def to_target_vocab(q: Tensor, target_to_draft: Tensor | None, vocab: int) -> Tensor:
    """[n, Vd] over draft columns -> [n, V] over target ids, 0 where there is no column."""
    if target_to_draft is None:
        if q.shape[1] >= vocab:
            return q[:, :vocab]
        return torch.nn.functional.pad(q, (0, vocab - q.shape[1]))
    index = target_to_draft.long()
    inside = (index >= 0) & (index < q.shape[1])
    return torch.where(inside[None], q[:, index.clamp(0, q.shape[1] - 1)], 0.0)


_MASK = 0xFFFFFFFF


def _mul(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high << 16) | (low & 0xFFFF)) & _MASK


def _philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor) -> list[Tensor]:
    for _ in range(10):
        hi0, lo0 = _mul(0xD2511F53, c0)
        hi1, lo1 = _mul(0xCD9E8D57, c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return [c0, c1, c2, c3]


def uniforms(seed: Tensor, position: Tensor, stream: int, ids: Tensor, count: int) -> Tensor:
    """float64 [n, count]: the float32 uniforms of tokens 0..count-1 under each row's key."""
    index = torch.arange((count + 3) // 4, device=seed.device)[None]
    c = torch.broadcast_tensors(
        index, (position & _MASK)[:, None], ((position >> 32) & _MASK)[:, None], (stream | (ids << 8))[:, None] & _MASK
    )
    words = torch.stack(_philox(*c, (seed & _MASK)[:, None], ((seed >> 32) & _MASK)[:, None]), dim=-1)
    u = (words.flatten(1)[:, :count].double().float() + 0.5) * 2.0**-32
    return u.clamp_max(1.0 - 2.0**-24).double()


def ranks(z: Tensor) -> Tensor:
    """float64 [n, V]: order of the values of each row from 1 up, equal ones alike; 0 for -inf."""
    ordered = z.sort(1).values
    return torch.where(z > -torch.inf, torch.searchsorted(ordered, z).double() + 1, 0.0)


def race_scores(weights: Tensor, seed: Tensor, position: Tensor, stream: int, ids: Tensor) -> Tensor:
    """float64 [n, V]: log w - log e of the positive weights, -inf for the others."""
    noise = -torch.log1p(-uniforms(seed, position, stream, ids, weights.shape[1]))
    return torch.where(weights > 0, weights.log() - noise.log(), -torch.inf)


def race(weights: Tensor, seed: Tensor, position: Tensor, stream: int, ids: Tensor) -> Tensor:
    """int64 [n]: winner among positive weights [n, V], id 0 where there is none."""
    score = race_scores(weights, seed, position, stream, ids)
    # argmax returns the first maximum on CPU only; the lowest id must win everywhere.
    token = torch.arange(weights.shape[1], device=weights.device)
    best = score.amax(1, keepdim=True)
    return torch.where((score == best) & (best > -torch.inf), token, weights.shape[1]).amin(1) % weights.shape[1]
