"""Drafts copied from the request's own text, and from those of finished requests."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple

import torch

from ... import SamplingTensors
from ...verify_tree import MAX_NODES
from .base import DraftBatch, DraftContext, Drafter, StepOutcome
from .suffix_automaton import SuffixAutomaton

_CONTEXTS = 2  # lengths of matches that the candidates for a draft are taken from; more were not worth their time
_MISSES = 3  # tokens that may differ before a copy is given up
_RESUMED_LENGTH = 4  # what an accepted first draft of a resumed copy counts as: a match of this length

_EDGES = (1, 2, 3, 4, 6, 9, 13, 20)  # lower edges of the match-length classes
# Near how often one of the tokens that had followed the match followed again, in 36 texts of the demo's model (edits, quotes,
# summaries, tables, chats). The first is that of resumed copies.
_PRIOR = (0.5, 0.35, 0.45, 0.65, 0.72, 0.8, 0.87, 0.93, 0.97)
_FALLBACK = 0.3  # of those, where better evidence named other tokens
_PRIOR_WEIGHT = 4.0
_FORGET = 0.03
_MOST = 0.99

_END = -1  # behind each output of the history; no id of a token


class _Rates:
    """How often tokens came that a kind of evidence named, over how often its counts alone promise them.

    Means that start from a prior and forget slowly. The kinds are resumed copies and matches of each class of lengths; the
    same where better evidence named other tokens; and all that once more for the history.
    """

    # What is added to a kind.
    fallback = len(_PRIOR)
    history = 2 * fallback

    def __init__(self):
        priors = 2 * (*_PRIOR, *(_FALLBACK * p for p in _PRIOR))
        self._hits = [p * _PRIOR_WEIGHT for p in priors]
        self._trials = [_PRIOR_WEIGHT] * len(priors)

    def kind(self, length: int, source: int = 0) -> int:
        """Of a match; length 0 for the first token of a resumed copy."""
        return bisect_right(_EDGES, length) + (self.history if source else 0)

    def __getitem__(self, kind: int) -> float:
        return min(self._hits[kind] / self._trials[kind], _MOST)

    def update(self, kind: int, promised: float, accepted: bool) -> None:
        kept = 1.0 - _FORGET * promised
        self._hits[kind] = self._hits[kind] * kept + accepted
        self._trials[kind] = self._trials[kind] * kept + promised


class _History:
    """The outputs of finished requests in one index: at least the newest `keep` tokens, at most twice as many."""

    def __init__(self, keep: int):
        self.keep, self.index = keep, SuffixAutomaton()

    def add(self, output: Sequence[int]) -> None:
        self.index.extend([*output[-self.keep :], _END])
        if len(self.index) > 2 * self.keep:
            # Running requests keep the old one, in which they have a place.
            self.index = SuffixAutomaton(self.index.tokens[-self.keep :])


class _Evidence(NamedTuple):
    """What followed a match, or what comes next in a resumed copy."""

    length: int
    source: int
    kind: int
    continuations: list[tuple[int, int, int]]


class _Candidate(NamedTuple):
    """A token that may come behind a node. Ordered as they rank: by the probability that the path to it is accepted."""

    score: float
    place: int  # where in the source it was last
    token: int
    source: int
    kind: int
    promised: float  # what the kind's rate is multiplied by


class _Node(NamedTuple):
    """A draft, with the longest matches of the text and the path to it."""

    draft: _Candidate
    parent: int
    depth: int
    matches: list[tuple[int, int]]  # state and length in each source
    copy: int | None  # where in the cursor's source a resumed copy goes on


@dataclass
class _Text:
    """One request's text, and the drafts of its last step: node i is nodes[i], the root nodes[0]."""

    sources: list[SuffixAutomaton]  # the text's own, then that of the history
    prompt_length: int
    shared: tuple[int, int] = (0, 0)  # the match in the history
    cursor: int | None = None  # where a copy that met a different token would go on
    cursor_source: int = 0
    misses: int = 0
    nodes: list[_Node] = field(default_factory=list)

    @property
    def own(self) -> SuffixAutomaton:
        return self.sources[0]

    def extend(self, tokens: Sequence[int]) -> None:
        self.own.extend(tokens)
        for source in self.sources[1:]:
            for token in tokens:
                self.shared = source.step(*self.shared, token)

    def grow(self, rates: _Rates, depth: int, width: int | None) -> Iterator[_Node]:
        """Nodes behind the root, the likeliest first, down to `depth`; behind each node its `width` best candidates."""
        matches = [self.own.match(), self.shared][: len(self.sources)]
        node = _Node(_Candidate(1.0, 0, _END, 0, 0, 0.0), -1, 0, matches, self.cursor)
        self.nodes = [node]
        heap: list[tuple[float, int, int, tuple]] = []
        found = 0
        while True:
            if node.depth < depth:
                for candidate in self._candidates(rates, node)[:width]:
                    found += 1
                    heappush(heap, (-candidate[0], found, len(self.nodes) - 1, candidate))
            if not heap:
                return
            _, _, number, candidate = heappop(heap)
            draft = _Candidate(*candidate)
            parent = self.nodes[number]
            matches = [s.step(*m, draft.token) for s, m in zip(self.sources, parent.matches, strict=True)]
            copy = parent.copy
            if copy is not None:
                copy = copy + 1 if self._copied(copy) == draft.token else None
            node = _Node(draft, number, parent.depth + 1, matches, copy)
            self.nodes.append(node)
            yield node

    def _copied(self, place: int) -> int:
        """The token at a place of the cursor's source, _END behind its last."""
        tokens = self.sources[self.cursor_source].tokens
        return tokens[place] if place < len(tokens) else _END

    def _candidates(self, rates: _Rates, node: _Node) -> list[tuple]:
        """The _Candidates behind a node as plain tuples (most are never drafted), best first, each token once.

        The longest match names its tokens, each with p = rate of its kind * share of the places; shorter ones name other
        tokens with what that leaves of the probability.
        """
        evidence = []
        for i, (index, match) in enumerate(zip(self.sources, node.matches, strict=True)):
            for state, length in islice(index.contexts(*match), _CONTEXTS):
                kind = rates.kind(length, i)
                evidence.append(_Evidence(length, i, kind, index.continuations(state)))
        if len(self.sources) > 1:
            evidence.sort(key=lambda e: -e.length)
        if node.copy is not None and (copied := self._copied(node.copy)) != _END:
            # Right behind the token that differed its rate says where it ranks, further on it counts as a match.
            length = _RESUMED_LENGTH + node.depth - 1 if node.depth else 0
            kind = rates.kind(length, self.cursor_source)
            if node.depth:
                rank = sum(e.length >= length for e in evidence)
            else:
                rank = sum(rates[e.kind] >= rates[kind] for e in evidence)
            evidence.insert(rank, _Evidence(length, self.cursor_source, kind, [(copied, 1, node.copy)]))
        left, named = 1.0, {_END}
        found: list[tuple] = []
        for _, source, kind, continuations in evidence:
            new = [c for c in continuations if c[0] not in named]
            if not new:
                continue
            kind += rates.fallback if found else 0
            rate = rates[kind]
            total = sum(count for _, count, _ in new)
            score = node.draft.score * left * rate / total
            found += [(score * count, place, token, source, kind, left * count / total) for token, count, place in new]
            named.update(c[0] for c in new)
            left *= 1.0 - rate
        found.sort(reverse=True)
        return found

    def judge(self, rates: _Rates, drafted: int, path: Sequence[int]) -> None:
        """Learns from the drafts behind each node of the path: the target drew one token there, one of theirs or none.
        What hangs from a rejected draft was never judged. The copy goes on where the best guess at the path's end was."""
        reached = {0, *path}
        nodes = self.nodes[: drafted + 1]
        for number, node in enumerate(nodes[1:], 1):
            if node.parent in reached:
                rates.update(node.draft.kind, node.draft.promised, number in reached)
        end = path[-1] if path else 0
        guess = next((n.draft for n in nodes[1:] if n.parent == end), None)
        draft, place = (guess, guess.place) if guess else (nodes[end].draft, nodes[end].draft.place + 1)
        if (draft.source, place) != (self.cursor_source, self.cursor):
            self.misses = 0
        self.cursor_source, self.cursor = draft.source, place

    def follow(self, emitted: Iterable[int]) -> None:
        """Moves the cursor along its source beside the emitted tokens, before they are added."""
        if self.cursor is None:
            return
        for token in emitted:
            copied = self._copied(self.cursor)
            if copied == _END:
                break
            self.misses = 0 if copied == token else self.misses + 1
            self.cursor += 1
        if self.misses > _MISSES:
            self.cursor, self.misses = None, 0


class PromptLookupDrafter(Drafter):
    """Prompt lookup over prompt and output: copies what followed the longest earlier match of the text's end.

    Text that quotes, edits or summarises its prompt, or repeats itself, repeats long stretches; other text rarely does. So
    each draft has an estimate of its acceptance, and the number of drafts follows the evidence. As in SuffixDecoding
    (2411.04975), of a match that had several continuations each gets a part:

        p(draft) = r(length of the match) * places that it followed / places of the match

    where r is how often such matches were right so far, over what their counts promised. Shorter matches name other tokens
    with what longer ones left of the probability. With s the product of p along a draft's path, a step is expected to give
    1 + sum of s tokens; it drafts the number that gives the most per measured cost, nothing where none gains, and all that
    the limits allow before costs are known. A copy that meets a different token (a renamed variable) is resumed behind it.

    A chain takes the best candidate of each draft. A tree takes the drafts of largest s, wherever they hang: siblings come
    in the order of their s, and no two are the same. Where several continuations are likely it accepts more for its rows;
    where one dominates it is that chain.

    The index is a suffix automaton: a token costs O(1) amortised and about 0.5 KB of memory; a draft looks at a bounded number
    of states, whatever the length of the text.

    Args:
        tree: propose trees, for rules that verify them.
        max_nodes: most drafts of a tree, in 1..128; a chain is bounded by the decoder's number of drafts, a tree's depth too.
        history: tokens of finished requests' outputs that are looked up as well, the newest ones; 0 for none. They are kept
            from batch to batch. Under rule "token" a seed then gives the same text only with the same history.

    >>> drafter = PromptLookupDrafter(tree=True, max_nodes=3)
    >>> params = SamplingTensors.create(temperature=0.0)
    >>> text = [7, 1, 2, 7, 1, 3, 7]
    >>> drafter.begin([text], params, 64)
    >>> batch = drafter.propose(DraftContext([text], torch.tensor([7]), params, [4], "target_only", lambda drafts: None))
    >>> batch.tokens, batch.parents
    (tensor([1, 3, 2], dtype=torch.int32), tensor([0, 1, 1], dtype=torch.int32))
    """

    deterministic = chooses_length = True

    def __init__(self, *, tree: bool = False, max_nodes: int = 12, history: int = 0):
        if not 1 <= max_nodes <= MAX_NODES:
            raise ValueError(f"PromptLookupDrafter: max_nodes must be in 1..{MAX_NODES}, got {max_nodes}")
        if history < 0:
            raise ValueError(f"PromptLookupDrafter: history must be >= 0, got {history}")
        self.trees, self.max_nodes = tree, max_nodes
        self._history = _History(history) if history else None
        self._texts: list[_Text] = []
        self._rates = _Rates()

    def begin(self, prompts: Sequence[Sequence[int]], params: SamplingTensors, max_tokens: int) -> None:
        self._finish(self._texts)
        self._rates = _Rates()
        self._texts = []
        for prompt in prompts:
            text = _Text([SuffixAutomaton()] + ([self._history.index] if self._history else []), len(prompt))
            text.extend(prompt)
            self._texts.append(text)

    def propose(self, context: DraftContext) -> DraftBatch | None:
        cost = cache(context.relative_cost)
        nodes: list[_Node] = []
        counts = []
        for text, tokens, budget in zip(self._texts, context.tokens, context.budgets, strict=True):
            text.extend(tokens[len(text.own) :])
            counts.append(self._grow(text, budget, min(self.max_nodes, context.max_nodes), cost))
            nodes += text.nodes[1:]
        if not nodes:
            return None
        rows = [[n.draft.token for n in nodes], [n.parent for n in nodes]]
        drafts, parents = torch.tensor(rows, dtype=torch.int32, device=context.position.device)
        return DraftBatch(drafts, counts, parents=parents if self.trees else None)

    def _grow(self, text: _Text, depth: int, max_nodes: int, cost: Callable[[int], float | None]) -> int:
        """Grows the drafts with the most expected tokens per cost, and gives their number."""
        width, limit = (None, max_nodes) if self.trees else (1, depth)
        best, best_value, expected = 0, 1.0, 1.0
        for d, node in enumerate(islice(text.grow(self._rates, depth, width), limit), 1):
            expected += node.draft.score
            relative = cost(d)
            if relative is None:
                best = d
            elif expected / relative > best_value:
                best, best_value = d, expected / relative
        del text.nodes[best + 1 :]
        return best

    def observe(self, outcome: StepOutcome) -> None:
        steps = zip(self._texts, outcome.tokens, outcome.drafted, outcome.accepted, strict=True)
        for row, (text, emitted, drafted, accepted) in enumerate(steps):
            path: Sequence[int] = range(1, accepted + 1) if outcome.paths is None else outcome.paths[row]
            if drafted and len(text.nodes) > 1:
                text.judge(self._rates, drafted, path)
                text.follow(emitted[len(path) :])
            else:
                text.follow(emitted)
            text.nodes = []
            text.extend(emitted)

    def select_rows(self, rows: Sequence[int]) -> None:
        kept = set(rows)
        self._finish(text for r, text in enumerate(self._texts) if r not in kept)
        self._texts = [self._texts[r] for r in rows]

    def _finish(self, texts: Iterable[_Text]) -> None:
        if self._history:
            for text in texts:
                self._history.add(text.own.tokens[text.prompt_length :])
