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
