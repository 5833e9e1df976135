"""What the ops that move bits share, without a host sync."""

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def bits(t: Tensor) -> Tensor:
    """The same memory as integers: every value is moved as it is, NaN payloads too."""
    return t.view(_INTEGERS[t.element_size()])


def only(moves: Tensor, *places: Tensor) -> list[Tensor]:
    """`places` of moves as they are; where nothing moves those of the first that does, which then happens more than once, and
    if nothing moves at all 0, for the source and the destination alike."""
    first = moves.int().argmax(0, keepdim=True)
    return [torch.where(moves.any(), torch.where(moves, place, place[first]), 0) for place in places]
