"""What speculation gains: tokens a step over its cost, and the draft length that gains most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .policy import StepCosts

_WEIGHT, _FORGET = 8.0, 0.97
_START = 0.6


@dataclass(frozen=True)
class CostModel:
    """Speed-up of steps with d drafts over steps without (Leviathan 2211.17192, with acceptance by position and a verification
    that is not free):

        S(d) = (1 + a_1 + a_1 a_2 + .. + a_1 .. a_d) / (verify(d) + draft(d))

    acceptance: a_i, the share of steps that accept draft i of those that accepted all before it; behind the last one it stays.
    verify: d -> forward and verification of d drafts over a plain step · draft: d -> making d drafts over a plain step.
    """

    acceptance: Sequence[float]
    verify: Callable[[int], float]
    draft: Callable[[int], float]

    def tokens(self, drafts: int) -> float:
        """Expected tokens of a step with d drafts."""
        reached, total = 1.0, 1.0
        for i in range(drafts):
            reached *= self.acceptance[min(i, len(self.acceptance) - 1)] if self.acceptance else 0.0
            total += reached
        return total

    def speedup(self, drafts: int) -> float:
        return self.tokens(drafts) / (self.verify(drafts) + self.draft(drafts))

    def best(self, most: int) -> int:
        """The d in 0..most of the largest speed-up; the smallest of equal ones."""
        return max(range(most + 1), key=lambda d: (self.speedup(d) if d else 1.0, -d))


class AutoLength:
    """Chooses the draft length of each step from what earlier steps cost and accepted, so that it depends on no draft of its
    own.

    Acceptances are running means that forget slowly; one that was never seen is that of the position before it.

    most: longest drafts.
    """

    def __init__(self, most: int):
        self.most = most
        self._hits, self._trials = [0.0] * most, [0.0] * most

    def record(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """One step: drafts (of a tree its depth) and accepted drafts of each request."""
        for d, a in zip(drafted, accepted, strict=True):
            for i in range(min(d, a + 1, self.most)):
                self._hits[i] = self._hits[i] * _FORGET + (i < a)
                self._trials[i] = self._trials[i] * _FORGET + 1

    def acceptance(self) -> list[float]:
        rates, before = [], _START
        for hits, trials in zip(self._hits, self._trials, strict=True):
            before = (hits + before * _WEIGHT) / (trials + _WEIGHT)
            rates.append(before)
        return rates

    def choose(self, costs: StepCosts, batch: int, nodes: int | None = None) -> int:
        """The best length by the costs of this batch size; `most` before any is known, to learn them.

        nodes: of a tree, whose depth is chosen; the number of its nodes is taken to be the same for all.
        """
        if costs.step(batch, 1) is None:
            return self.most
        model = CostModel(
            self.acceptance(),
            lambda d: costs.step(batch, d if nodes is None else nodes) or 1.0,
            lambda d: costs.draft(batch, d if nodes is None else nodes, d),
        )
        return model.best(self.most)
