"""Drafts copied from the request's own text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ... import SamplingTensors
from .base import DraftBatch, DraftContext, Drafter, StepOutcome

_CANDIDATES = 8  # most recent places remembered per n-gram
_LONGEST = 16  # match lengths are told apart up to this
_MISSES = 3  # tokens that may differ before a copy is given up
_EDGES = (1, 2, 3, 4, 6, 9, 13)  # lower edges of the match-length classes
# A little below what copies were accepted at in 39 texts of the demo's model (edits, quotes, summaries, chats).
_PRIOR = (0.15, 0.35, 0.6, 0.7, 0.8, 0.85, 0.93)
_PRIOR_RESUMED = 0.5
_RESUMED_LENGTH = 4  # what an accepted first draft of a resumed copy counts as: a match of this length
_PRIOR_WEIGHT = 4.0
_FORGET = 0.97


class _Rates:
    """Running acceptance of the next copied token for each class of evidence: Beta means that forget slowly."""

    def __init__(self):
        self._hits = [p * _PRIOR_WEIGHT for p in (*_PRIOR, _PRIOR_RESUMED)]
        self._trials = [_PRIOR_WEIGHT] * (len(_PRIOR) + 1)

    @property
    def resumed(self) -> int:
        return len(_PRIOR)

    @staticmethod
    def of_match(length: int) -> int:
        return sum(length >= edge for edge in _EDGES) - 1

    def __getitem__(self, kind: int) -> float:
        return self._hits[kind] / self._trials[kind]

    def kinds(self, length: int, count: int) -> list[int]:
        """Classes of `count` drafts behind a match of `length` (0: a resumed copy); each draft lengthens the match."""
        if not length:
            return [self.resumed, *(self.of_match(_RESUMED_LENGTH + i) for i in range(count - 1))][:count]
        return [self.of_match(length + i) for i in range(count)]

    def update(self, kinds: Sequence[int], accepted: int) -> None:
        # Each accepted draft is a hit, the first rejected one a miss; those behind it were never judged.
        for i, kind in enumerate(kinds[: accepted + 1]):
            self._hits[kind] = self._hits[kind] * _FORGET + (i < accepted)
            self._trials[kind] = self._trials[kind] * _FORGET + 1


@dataclass
class _Text:
    """One request's text, indexed by n-gram as it grows."""

    max_ngram: int
    tokens: list[int] = field(default_factory=list)
    places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    cursor: int | None = None  # where a copy that met a different token would go on
    misses: int = 0
    source: int | None = None  # where this step's drafts were copied from
    kinds: Sequence[int] = ()  # their classes of evidence

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            # Indexed only once it has a continuation: the current suffix never finds itself.
            for n in range(1, min(self.max_ngram, end) + 1):
                places = self.places.setdefault(tuple(self.tokens[end - n : end]), [])
                places.append(end)
                if len(places) > _CANDIDATES:
                    del places[0]
            self.tokens.append(token)

    def match(self) -> tuple[int, int]:
        """Start of the best continuation and the length of its match (0: none): longest first, then most recent."""
        tokens = self.tokens
        end = len(tokens)
        best, best_length = 0, 0
        for n in range(min(self.max_ngram, end), 0, -1):
            for place in reversed(self.places.get(tuple(tokens[end - n :]), ())):
                length = n
                while length < _LONGEST and length < place and tokens[place - length - 1] == tokens[end - length - 1]:
                    length += 1
                if length > best_length:
                    best, best_length = place, length
            if best_length:
                break
        return best, best_length

    def follow(self, emitted: Sequence[int]) -> None:
        """Moves the cursor along the source beside the emitted tokens, before they are added."""
        if self.cursor is None:
            return
        for token in emitted:
            if self.cursor >= len(self.tokens):
                break
            self.misses = 0 if self.tokens[self.cursor] == token else self.misses + 1
            self.cursor += 1
        if self.misses > _MISSES:
            self.cursor, self.misses = None, 0


class PromptLookupDrafter(Drafter):
    """Prompt lookup (n-gram speculation) over prompt and output: copies what followed the longest earlier match.

    Text that quotes, edits or summarises its prompt repeats long stretches of it; other text rarely does, so the number
    of drafts follows the evidence: the expected tokens of a step with d drafts, 1 + p1 + p1 p2 + .. + p1 .. pd with p1
    the acceptance so far of copies behind a match of that length, p2 behind one that is longer by one, and so on, over
    the step's measured cost. Where no d gains, nothing is proposed.
    A copy that meets one different token (a renamed variable) is resumed behind it.

    The index grows with the text: O(max_ngram) per token, and O(max_ngram) look-ups per step.

    Args:
        max_ngram: longest n-gram indexed; longer matches are found by extending it.
    """

    deterministic = True

    def __init__(self, max_ngram: int = 3):
        if max_ngram < 1:
            raise ValueError(f"PromptLookupDrafter: max_ngram must be >= 1, got {max_ngram}")
        self.max_ngram = max_ngram
        self._texts: list[_Text] = []
        self._rates = _Rates()

    def begin(self, prompts: Sequence[Sequence[int]], params: SamplingTensors, max_tokens: int) -> None:
        self._rates = _Rates()
        self._texts = [_Text(self.max_ngram) for _ in prompts]
        for text, prompt in zip(self._texts, prompts, strict=True):
            text.extend(prompt)

    def propose(self, context: DraftContext) -> DraftBatch | None:
        drafts = []
        for text, tokens, budget in zip(self._texts, context.tokens, context.budgets, strict=True):
            text.extend(tokens[len(text.tokens) :])
            drafts.append(self._propose_row(text, budget, context))
        counts = [len(d) for d in drafts]
        if not any(counts):
            return None
        flat = [token for row in drafts for token in row]
        return DraftBatch(torch.tensor(flat, dtype=torch.int32, device=context.position.device), counts)

    def _propose_row(self, text: _Text, budget: int, context: DraftContext) -> list[int]:
        text.source = None
        start, length = text.match()
        rates, cursor = self._rates, len(text.tokens) if text.cursor is None else text.cursor
        if cursor < len(text.tokens) and (not length or rates[rates.resumed] > rates[rates.of_match(length)]):
            start, length = cursor, 0
        elif not length:
            return []
        kinds = rates.kinds(length, min(budget, len(text.tokens) - start))
        count = self._best_count([rates[kind] for kind in kinds], context)
        if not count:
            return []
        text.source, text.kinds = start, kinds[:count]
        return text.tokens[start : start + count]

    @staticmethod
    def _best_count(rates: Sequence[float], context: DraftContext) -> int:
        """The number of drafts with the most expected tokens per cost; all of them before costs are known."""
        best, best_value, expected, reached = 0, 1.0, 1.0, 1.0
        for d, rate in enumerate(rates, 1):
            reached *= rate
            expected += reached
            cost = context.relative_cost(d)
            if cost is None:
                return len(rates)
            if expected / cost > best_value:
                best, best_value = d, expected / cost
        return best

    def observe(self, outcome: StepOutcome) -> None:
        for text, emitted, drafted, accepted in zip(
            self._texts, outcome.tokens, outcome.drafted, outcome.accepted, strict=True
        ):
            if drafted and text.source is not None:
                self._rates.update(text.kinds[:drafted], accepted)
                if text.source != text.cursor:
                    text.misses = 0
                text.cursor = text.source
            text.source = None
            text.follow(emitted)
            text.extend(emitted)

    def select_rows(self, rows: Sequence[int]) -> None:
        self._texts = [self._texts[r] for r in rows]
