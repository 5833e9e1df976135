"""`sample`: one token per row from raw logits, against reading the rows once and against sort and multinomial."""

from __future__ import annotations

from collections.abc import Callable

import specdec_kernels

from . import _peers, _rows
from ._gate import check_sample
from ._inputs import RowCase
from ._timing import Settings

NAME = "sample"


def run(settings: Settings) -> list[dict]:
    return _rows.run(NAME, settings, _call, check_sample, _others)


def _call(case: RowCase) -> Callable:
    return lambda: specdec_kernels.sample(case.logits, case.params, case.position)


def _others(case: RowCase) -> dict[str, Callable]:
    calls = {"PyTorch, sort and multinomial": lambda: _peers.sort_probs(case).multinomial(1)}
    if _peers.transformers_missing() is None:
        probs = _peers.transformers_probs(case)
        calls["transformers' warpers and multinomial"] = lambda: probs().multinomial(1)
    return calls


def report(results: list[dict]) -> str:
    return _rows.report(NAME, results)
