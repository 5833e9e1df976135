"""The index behind prompt lookup against a search of the text, and on the texts that are worst for it."""

import random
from time import perf_counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_kernels.decoding.drafters.suffix_automaton import LONGEST, SuffixAutomaton


def places(text, suffix):
    """Where the text goes on behind each earlier occurrence of its suffix."""
    return [end for end in range(len(suffix), len(text)) if text[end - len(suffix) : end] == suffix]


def continuations(text, suffix):
    """(token, count, last place) of what followed, in order."""
    followed = {}
    for place in places(text, suffix):
        followed[text[place]] = (followed.get(text[place], (0,))[0] + 1, place)
    return sorted((token, *rest) for token, rest in followed.items())


def check(index, text, state, length):
    """The match is a suffix of the text, and the contexts behind it are those where the places change."""
    seen = list(index.contexts(state, length))
    for at, (context, n) in enumerate(seen):
        suffix = text[len(text) - n :]
        assert sorted(index.continuations(context)) == continuations(index.tokens, suffix)
        # Lengths that are left out have the same places as the next longer one that is not.
        shorter = seen[at + 1][1] if at + 1 < len(seen) else 0
        for between in range(shorter + 1, n):
            assert places(index.tokens, text[len(text) - between :]) == places(index.tokens, suffix)
        assert shorter < n


repetitive = st.builds(
    lambda unit, times, change: (unit * times)[:90] + change + unit * 2,
    st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 40), st.lists(st.integers(0, 2), max_size=3),
)  # fmt: skip
texts = st.lists(st.integers(0, 1), max_size=70) | st.lists(st.integers(0, 3), max_size=70) | repetitive


@settings(max_examples=300, deadline=None)
@given(texts, st.integers(1, 5))
def test_matches_are_those_of_a_search(text, at_once):
    index = SuffixAutomaton()
    for first in range(0, len(text), at_once):
        index.extend(text[first : first + at_once])
        seen = text[: first + at_once]
        state, length = index.match()
        longest = next((n for n in range(min(LONGEST, len(seen)), 0, -1) if places(seen, seen[len(seen) - n :])), 0)
        assert length == longest
        check(index, seen, state, length)


@settings(max_examples=200, deadline=None)
@given(texts, texts, st.integers(0, 40))
def test_a_text_beside_the_index(text, other, known):
    """Matches of another text, found token by token, while the index grows and its states are split under them."""
    index, match, whole = SuffixAutomaton(text[:known]), (0, 0), known >= len(text)
    for at, token in enumerate(other, 1):
        match = index.step(*match, token)
        seen = other[:at]
        assert any(index.tokens[end - match[1] : end] == seen[at - match[1] :] for end in range(len(index) + 1))
        if whole:
            longer = seen[at - match[1] - 1 :] if match[1] < at else None
            found = longer and any(text[i : i + len(longer)] == longer for i in range(len(text)))
            assert match[1] == LONGEST or not found
        index.extend(text[known : known + 2])
        known += 2
        check(index, seen, *match)


def worst(n):
    """Texts of n tokens whose indexes have long links, many states, many continuations of one state, or repeat for long."""
    generator = random.Random(0)
    return {
        "equal": [5] * n,
        "period 2": [5, 6] * (n // 2),
        "random": [generator.randrange(4) for _ in range(n)],
        "random, large vocabulary": [generator.randrange(50_000) for _ in range(n)],
        "one token before all others": [t for i in range(n // 2) for t in (1, i + 2)],
        "twice the same": [generator.randrange(50_000) for _ in range(n // 2)] * 2,
    }


@pytest.mark.parametrize("kind", list(worst(0)))
def test_linear(kind):
    """100,000 tokens: at most two states and three transitions per token, and no more time per token than for 5,000."""
    seconds = {}
    for n in (5_000, 100_000):
        text = worst(n)[kind]
        begin = perf_counter()
        index = SuffixAutomaton(text)
        seconds[n] = perf_counter() - begin
        assert len(index._link) <= 2 * n and sum(map(len, index._next)) <= 3 * n
        # What a step reads does not grow with the text.
        state, length = index.match()
        links = list(index.contexts(state, length))
        assert length <= LONGEST and len(links) <= LONGEST
        assert all(len(index.continuations(s)) <= 16 for s, _ in links)
    # Quadratic would be 400 times as long; caches and a busy machine make it a little more than 20 times.
    assert seconds[100_000] < 100 * max(seconds[5_000], 1e-3)


def test_many_continuations():
    """Of more than 16 continuations 16 are named, the first and the last that were new; their counts are whole."""
    text = [t for i in range(100) for t in (1, i + 2)] + [1, 2, 500, 1]
    index = SuffixAutomaton(text)
    state, length = index.match()
    assert length == 1
    named = index.continuations(state)
    assert sorted(t for t, _, _ in named) == [*range(2, 10), *range(94, 102)]
    assert named[0] == (2, 2, len(text) - 3)
