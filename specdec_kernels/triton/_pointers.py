"""Lists of tensors for one launch: a table of their addresses on the device, and the widest words that fit them."""

from __future__ import annotations

import functools
import operator
import threading
from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

from ._launch import kept_tensor

KEPT = 256


class Pointers(NamedTuple):
    table: Tensor
    """int64 [n] on the device"""
    bits: int
    """those that some address has"""


_tables: OrderedDict[tuple, Pointers] = OrderedDict()
_in_graphs: dict[tuple, Pointers] = {}
_lock = threading.Lock()


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def pointers(op: str, tensors: list[Tensor]) -> Pointers:
    """The addresses of `tensors`. A step's are those of the step before: a table is found by them and costs no copy.

    The 256 tables that were used last are kept. A table that a CUDA graph has captured is kept for good (8 bytes a tensor), as
    nothing tells when the last graph that reads it is gone. One cannot be made during a capture, which allows no copy from the
    host that would outlive it.
    """
    device = tensors[0].device
    addresses = [t.data_ptr() for t in tensors]
    key = (device, *addresses)
    capturing = _capturing(device)
    with _lock:
        found = _in_graphs.get(key) or _tables.get(key)
        if found is None:
            if capturing:
                raise RuntimeError(
                    f"{op}: these tensors are new, and their addresses cannot be copied to the device during a CUDA graph "
                    "capture: call it with them once before"
                )
            # The copy is waited for, so that the table is there for every stream.
            table = kept_tensor(lambda: torch.tensor(addresses, dtype=torch.int64).to(device), device)
            found = Pointers(table, functools.reduce(operator.or_, addresses))
            _tables[key] = found
            if len(_tables) > KEPT:
                _tables.popitem(last=False)
        elif capturing:
            _in_graphs[key] = found
        elif key in _tables:
            _tables.move_to_end(key)
        return found


def word_of(bits: int) -> tuple[int, bool]:
    """(bytes of the widest integer that divides all addresses and strides of those bits, whether 16 bytes do)."""
    lowest = bits & -bits
    return min(lowest, 8), lowest >= 16
