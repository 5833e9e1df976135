"""`schedule_lengths` in Triton: one launch of one program."""

import torch
import triton
import triton.language as tl

from ..eager.schedule_lengths import schedule_lengths as in_plain_torch
from ._launch import OPTIONS, power_of_2, workspace

MOST = 4096  # drafts that one program sorts in its registers
REQUESTS = tl.constexpr(256)  # looked at together
FIXED = tl.constexpr(1 << 40)


@triton.jit(do_not_specialize=["T", "budget", "B", "K"])
def schedule_lengths_kernel(
    confidence, num_draft, steps_per_second, T, budget, lengths, keys, taus, B, K, SIZE: tl.constexpr
):
    """A draft's key is its survival, then its place by offset and request. Sorted, the keys say which is the last one admitted;
    a request's length is the number of its keys that reach that one.

    Bytes: 4 B K of confidences; 24 B K of workspace, written and read.
    """
    for first in range(0, B, REQUESTS):
        b = first + tl.arange(0, REQUESTS)
        count = tl.zeros([REQUESTS], tl.int64) + K
        if num_draft is not None:
            count = tl.load(num_draft + b, mask=b < B, other=0).to(tl.int64)
        survives = tl.full([REQUESTS], 1.0, tl.float32)
        for j in range(0, K):
            c = tl.load(confidence + b.to(tl.int64) * K + j, mask=b < B, other=0.0)
            survives = survives * tl.where(c > 0.0, tl.where(c < 1.0, c, 1.0), 0.0)  # NaN is 0
            place = j * B + b
            key = (survives.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)
            tl.store(keys + place, tl.where(count > j, key, -1), mask=b < B)
    tl.debug_barrier()  # other warps read the keys
    i = tl.arange(0, SIZE)
    n = i + 1
    key = tl.sort(tl.load(keys + i, mask=i < B * K, other=-1), descending=True)
    admitted = (key >= 0) & (n <= budget)
    if steps_per_second is not None:
        survives = tl.where(key >= 0, (key >> 32).to(tl.int32).to(tl.float32, bitcast=True), 0.0)
        tau = tl.cumsum((survives * FIXED).to(tl.int64), 0) + (tl.zeros([], tl.int64) + B) * FIXED
        tl.store(taus + n, tau)
        tl.store(taus, (tl.zeros([], tl.int64) + B) * FIXED)
        tl.debug_barrier()
        rate = tau.to(tl.float64) * tl.load(steps_per_second + tl.minimum(B + n, T - 1)).to(tl.float64)
        before = tl.load(taus + i).to(tl.float64) * tl.load(steps_per_second + tl.minimum(B + i, T - 1)).to(tl.float64)
        gains = (key >= 0) & (rate > before) & (B + n < T)
        admitted = n < tl.min(tl.where(gains, SIZE + 1, n), 0)
    least = tl.min(tl.where(admitted, key, 0x7FFFFFFFFFFFFFFF), 0)
    for first in range(0, B, REQUESTS):
        b = first + tl.arange(0, REQUESTS)
        length = tl.zeros([REQUESTS], tl.int32)
        for j in range(0, K):
            length += (tl.load(keys + j * B + b, mask=b < B, other=-1) >= least).to(tl.int32)
        tl.store(lengths + b, length, mask=b < B)


def schedule_lengths(confidence, num_draft, steps_per_second, budget, lengths) -> None:
    B, K = confidence.shape
    if B * K > MOST:  # a sort over several programs is torch's
        in_plain_torch(confidence, num_draft, steps_per_second, budget, lengths)
        return
    size = power_of_2(max(B * K, 16))
    T = 0 if steps_per_second is None else steps_per_second.shape[0]
    with workspace(0, 0, {}, confidence.device, keys=2 * B * K, taus=2 * (size + 1)) as scratch:
        schedule_lengths_kernel[(1,)](
            confidence, num_draft, steps_per_second, T, min(budget, size), lengths, scratch["keys"].view(torch.int64),
            scratch["taus"].view(torch.int64), B, K, SIZE=size, **OPTIONS | {"maxnreg": 255},
        )  # fmt: skip
