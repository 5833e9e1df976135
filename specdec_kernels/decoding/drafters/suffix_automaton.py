"""An index of all earlier places of a growing text: what followed each of its suffixes, and how often."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice

LONGEST = 32
"""Lengths of a suffix are told apart up to this."""
_MOST = 16  # continuations of a state that are looked at


class SuffixAutomaton:
    """Suffix automaton (Blumer et al. 1985) of a text that grows at its end.

    A state stands for the substrings that end at the same places; `_next` leads on by one token, `_link` to the longest
    suffix that has more places. For substrings of up to LONGEST + 1 tokens a state counts its places and knows the last.

    Appending a token costs O(1) amortised and, for the counts, a walk over the links of its last LONGEST + 1 tokens: two
    to eight in text, LONGEST + 1 where the same few tokens repeat. At most two states and three transitions per token.

    >>> index = SuffixAutomaton([1, 2, 3, 1, 2, 4, 1, 2])
    >>> state, length = index.match()
    >>> length, sorted(index.continuations(state))
    (2, [(3, 1, 2), (4, 1, 5)])
    """

    def __init__(self, tokens: Iterable[int] = ()):
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]  # of the longest substring
        self._count = [0]
        self._recent = [-1]  # place of the last token
        self._last = 0
        self._suffix = 0  # the state of the last LONGEST + 1 tokens
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens."""
        following, link, length, count, recent = self._next, self._link, self._length, self._count, self._recent
        text, last, suffix = self.tokens, self._last, self._suffix
        for token in tokens:
            place = len(text)
            text.append(token)
            new, at = len(link), last
            following.append({})
            length.append(length[last] + 1)
            link.append(0)
            count.append(0)
            recent.append(place)
            while at >= 0 and token not in following[at]:
                following[at][token] = new
                at = link[at]
            if at >= 0:
                state = following[at][token]
                if length[state] > length[at] + 1:
                    # The shorter substrings of `state` now end here too, the longer ones do not.
                    clone = len(link)
                    following.append(following[state].copy())
                    length.append(length[at] + 1)
                    link.append(link[state])
                    count.append(count[state])
                    recent.append(recent[state])
                    while at >= 0 and following[at].get(token) == state:
                        following[at][token] = clone
                        at = link[at]
                    link[state] = state = clone
                link[new] = state
            last = new
            suffix = following[suffix][token]
            known = min(place, LONGEST) + 1
            while length[link[suffix]] >= known:
                suffix = link[suffix]
            state = suffix
            while state:
                count[state] += 1
                recent[state] = place
                state = link[state]
        self._last, self._suffix = last, suffix

    def match(self) -> tuple[int, int]:
        """State and length of the longest suffix, of at most LONGEST tokens, that ended before too; (0, 0): none."""
        state = self._suffix
        known = min(len(self.tokens), LONGEST)
        if state and self._length[self._link[state]] >= known:
            state = self._link[state]
        if self._count[state] < 2:
            state = max(self._link[state], 0)
            known = self._length[state]
        return state, known

    def contexts(self, state: int, length: int) -> Iterator[tuple[int, int]]:
        """State and length of a match, then of each shorter suffix of it that has more places, but for the empty one."""
        state = self._current(state, length)
        while state:
            yield state, length
            state = self._link[state]
            length = self._length[state]

    def continuations(self, state: int) -> list[tuple[int, int, int]]:
        """Tokens that followed a state's substrings, each with how often it did and its last place.

        Of more than 16 different ones the 8 that were first seen, and the 8 that were last seen for the first time.
        """
        following = self._next[state]
        items: Iterable[tuple[int, int]] = following.items()
        if len(following) > _MOST:
            items = chain(islice(items, _MOST // 2), islice(reversed(following.items()), _MOST // 2))
        return [(token, self._count[to], self._recent[to]) for token, to in items]

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """State and length of the longest suffix, of at most LONGEST tokens, of a match and one more token."""
        state = self._current(state, length)
        while token not in self._next[state]:
            if not state:
                return 0, 0
            state = self._link[state]
            length = self._length[state]
        length = min(length + 1, LONGEST)
        return self._current(self._next[state][token], length), length

    def _current(self, state: int, length: int) -> int:
        """A state may have been split since a match was found, and stand for longer substrings now."""
        while state and self._length[self._link[state]] >= length:
            state = self._link[state]
        return state
