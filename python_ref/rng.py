"""Counter-based randomness: Philox4x32-10, no state.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC'11).

    key     = (seed low, seed high)
    counter = (index, position low, position high, stream | id << 8)

| stream | used for | position | id | index |
|---|---|---|---|---|
| 0 | draft proposals | anchor: the step's first position | draft offset | token >> 2 |
| 1 | accept coins | anchor | draft offset | 0 (lane 0) |
| 2 | sampling from the target or a residual; proposals under `coupled` | absolute position | 0 | token >> 2 |
"""

import torch
from torch import Tensor

STREAM_DRAFT = 0
STREAM_ACCEPT = 1
STREAM_SAMPLE = 2

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def _mul_hi_lo(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b for 32-bit values held in int64 (int64 wraps, so b is split into halves)."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16)
    total_low = (low + ((high & 0xFFFF) << 16)) & _MASK
    carry = (low + ((high & 0xFFFF) << 16)) >> 32
    return ((high >> 16) + carry) & _MASK, total_low


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10. `counter` int64 [..., 4] and `key` int64 [..., 2] hold 32-bit words; returns int64 [..., 4]."""
    c0, c1, c2, c3 = counter.to(torch.int64).unbind(-1)
    k0, k1 = key.to(torch.int64).unbind(-1)
    for _ in range(10):
        hi0, lo0 = _mul_hi_lo(_M0, c0)
        hi1, lo1 = _mul_hi_lo(_M1, c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return torch.stack([c0, c1, c2, c3], dim=-1)


def words(seed: int, position: int, stream: int, id: int, index: Tensor) -> Tensor:
    """The four words of each block: `index` int64 [n] -> int64 [n, 4]."""
    seed, position = int(seed) & 0xFFFFFFFFFFFFFFFF, int(position) & 0xFFFFFFFFFFFFFFFF
    counter = torch.empty(index.numel(), 4, dtype=torch.int64)
    counter[:, 0] = index & _MASK
    counter[:, 1] = position & _MASK
    counter[:, 2] = position >> 32
    counter[:, 3] = (stream | (int(id) << 8)) & _MASK
    return philox4x32(counter, torch.tensor([seed & _MASK, seed >> 32]))


def uniform(word: Tensor) -> Tensor:
    """u = (word + 0.5) * 2^-32 rounded to float32 at each operation, at most 1 - 2^-24; returned as float64.

    The rounding is part of the definition, so that a kernel's uniforms are these exactly. 2^-33 <= u <= 1 - 2^-24.
    """
    u = (word.to(torch.float64).to(torch.float32) + 0.5) * 2.0**-32
    return u.clamp_max(1.0 - 2.0**-24).to(torch.float64)


def coin(seed: int, anchor: int, offset: int) -> float:
    """Accept coin of the draft at `offset` in the step that starts at position `anchor`."""
    return float(uniform(words(seed, anchor, STREAM_ACCEPT, offset, torch.zeros(1, dtype=torch.int64))[0, 0]))


def race_noise(seed: int, position: int, stream: int, id: int, vocab: int) -> Tensor:
    """Standard exponentials e_v = -log1p(-u_v), float64 [vocab]; token v takes lane v & 3 of block v >> 2."""
    blocks = words(seed, position, stream, id, torch.arange((vocab + 3) // 4))
    return -torch.log1p(-uniform(blocks.flatten()[:vocab]))
