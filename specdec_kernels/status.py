"""What the `status` outputs say."""

import enum


class Status(enum.IntFlag):
    """Bits of a request's (or row's) `status`; 0 is an ordinary result.

    >>> Status(17)
    <Status.EMPTY_ROW|PLACEHOLDER: 17>
    """

    EMPTY_ROW = 1
    """A row had nothing to keep (all -inf or NaN): id 0 was emitted and the chain ended there."""
    NAN = 2
    """A logit was NaN; it counted as -inf."""
    ZERO_Q = 4
    """A draft had q(x) = 0: it was rejected and its row emitted from p."""
    BAD_Q_ROW = 8
    """A draft's q row could not be used: its row emitted from p."""
    PLACEHOLDER = 16
    """A draft id was negative or >= V: the chain ended there and its row emitted from p."""
    BAD_OFFSETS = 32
    """Offsets reached outside the tensors, or a chain was longer than max_draft; both were clamped."""


class CacheStatus(enum.IntFlag):
    """Bits of a request's `status` from the ops over a paged cache; 0 is an ordinary result.

    >>> CacheStatus(5)
    <CacheStatus.BAD_PAGE|FREE_LIST_FULL: 5>
    """

    BAD_PAGE = 1
    """A page that was needed is not one of the cache's: -1, outside [0, P), or past the table's columns."""
    BAD_REF_COUNT = 2
    """A page was released whose reference count is below 1: it stays as it is."""
    FREE_LIST_FULL = 4
    """A page was released with P pages on the free list already: it was not pushed, so one is there twice."""
    OUT_OF_PAGES = 8
    """The free list has fewer pages than the request needs: it got none."""
    TABLE_FULL = 16
    """The request would need more blocks than its table has columns, or be longer than 2^31 - 1: it got none."""
    EVICTED = 32
    """The window at the new length reaches entries that were evicted: nothing was rolled back. Free the request and compute its
    tokens again."""
