"""Values that go from the host to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values as a tensor, without waiting for what the device has still to do."""
    if values and min(values) == max(values):
        return torch.full((len(values),), values[0], dtype=dtype, device=device)
    if device.type == "cuda":
        return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
    return torch.tensor(values, dtype=dtype, device=device)


def padded_on_device(
    rows: Sequence[Sequence[int]], device: torch.device, *, fill: int = 0, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Rows of different lengths as one tensor [B, longest], the same way."""
    width = max(map(len, rows))
    flat = [value for row in rows for value in (*row, *[fill] * (width - len(row)))]
    return on_device(flat, dtype, device).view(len(rows), width)
