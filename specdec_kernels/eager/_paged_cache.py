"""What the plain-torch ops over a paged cache share."""

import torch
from torch import Tensor

from ..status import CacheStatus

BAD_PAGE, BAD_REF_COUNT, FREE_LIST_FULL, OUT_OF_PAGES, TABLE_FULL = (int(bit) for bit in CacheStatus)


def put(target: Tensor, index: Tensor, value: Tensor | int, where: Tensor) -> None:
    """target[index] = value where `where`, one value an element, and nothing elsewhere, without waiting for the device to
    count what is written."""
    index = torch.where(where, index, 0)
    target.index_add_(0, index, torch.where(where, value - target[index], 0).to(target.dtype))
