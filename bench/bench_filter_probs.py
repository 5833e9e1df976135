"""`filter_probs`: renormalised probabilities, against softmax, sorting and transformers' warpers."""

from __future__ import annotations

from collections.abc import Callable

import specdec_kernels

from . import _peers, _rows
from ._gate import check_probs
from ._inputs import RowCase
from ._timing import Settings

NAME = "filter_probs"


def run(settings: Settings) -> list[dict]:
    return _rows.run(NAME, settings, _call, check_probs, _others)


def _call(case: RowCase) -> Callable:
    return lambda: specdec_kernels.filter_probs(case.logits, case.params)


def _others(case: RowCase) -> dict[str, Callable]:
    calls = {"PyTorch, sort": lambda: _peers.sort_probs(case)}
    if _peers.transformers_missing() is None:
        calls["transformers' warpers and softmax"] = _peers.transformers_probs(case)
    for name, call in calls.items():
        check_probs(case, call(), [0], name)
    return calls


def report(results: list[dict]) -> str:
    return _rows.report(NAME, results)
