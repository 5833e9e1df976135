"""`nucleus`: cutoff, maximum and log-mass of each row, against reading the rows once and against sorting them."""

from __future__ import annotations

from collections.abc import Callable

import specdec_kernels

from . import _peers, _rows
from ._gate import check_nucleus
from ._inputs import RowCase
from ._timing import Settings

NAME = "nucleus"


def run(settings: Settings) -> list[dict]:
    return _rows.run(NAME, settings, _call, check_nucleus, _others)


def _call(case: RowCase) -> Callable:
    return lambda: specdec_kernels.nucleus(case.logits, case.params)


def _others(case: RowCase) -> dict[str, Callable]:
    return {"PyTorch, sort": lambda: _peers.sort_nucleus(case)}


def report(results: list[dict]) -> str:
    return _rows.report(NAME, results)
