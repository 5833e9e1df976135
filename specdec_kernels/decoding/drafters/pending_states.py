"""The target's states that a drafter has not read yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import StepOutcome


class PendingStates:
    """States of the tokens that stayed, of every running request, from `observe` until they are taken: a step without drafts
    leaves its own to the next one that has some.

    prompts: tokens of each request's prompt, which the first outcome is of.
    """

    def __init__(self, name: str, prompts: Sequence[Sequence[int]]):
        self._name = name
        self._rows: list[list[Tensor]] = [[] for _ in prompts]
        self._prompts: list[int] | None = [len(p) for p in prompts]

    def add(self, outcome: StepOutcome) -> None:
        """Takes in `outcome.hidden`; ValueError where it has not a row for each token that stayed."""
        counts = self._prompts if self._prompts is not None else [n + 1 for n in outcome.accepted]
        self._prompts = None
        if outcome.hidden is None or outcome.hidden.shape[0] != sum(counts):
            got = None if outcome.hidden is None else list(outcome.hidden.shape)
            raise ValueError(f"{self._name}: outcome.hidden must be [{sum(counts)}, T * H], got {got}")
        for row, states in zip(self._rows, outcome.hidden.split(counts), strict=True):
            row.append(states)

    def select_rows(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[r] for r in rows]

    def take(self) -> tuple[Tensor, list[int]] | None:
        """(states [n, T * H], request-major, tokens of each request), which are pending no more; None where none were."""
        parts = [states for row in self._rows for states in row]
        if not parts:
            return None
        counts = [sum(map(len, row)) for row in self._rows]
        self._rows = [[] for _ in self._rows]
        return torch.cat(parts), counts
