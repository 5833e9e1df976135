"""When speculation pays: measured costs of a step, and the watch over acceptance."""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

_KEEP = 9
_PACE = 6  # even: two kinds of step in turn meet in the middle


class StepCosts:
    """Measured seconds of a step by batch size and number of drafts, from a decoder's own steps.

    `target` covers the forward and the verification, `draft` the proposal. Medians of the last few measurements, so one
    slow step says nothing. Plain steps and steps with drafts are seldom measured at the same time, so what slows the last
    few steps whatever their kind (a busy machine, a longer context) is taken out before a measurement is kept: the
    seconds in the tables compare with each other, not with a clock.
    """

    def __init__(self) -> None:
        self._target: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=_KEEP))
        self._draft: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=_KEEP))
        # Recent steps' seconds over what was expected of them.
        self._pace: dict[int, deque[float]] = defaultdict(lambda: deque([1.0] * _PACE, maxlen=_PACE))

    def record(self, batch: int, drafts: int, target_seconds: float, draft_seconds: float = 0.0) -> None:
        """One step of `batch` requests with at most `drafts` drafts each; target_seconds > 0."""
        if (batch, drafts) in self._target:
            self._pace[batch].append(target_seconds / median(self._target[batch, drafts]))
        elif (expected := self._interpolated(batch, drafts)) is not None:
            # One slow step must not put a size out of use before it has been tried again.
            self._target[batch, drafts].extend([expected] * 2)
        pace = median(self._pace[batch])
        self._target[batch, drafts].append(target_seconds / pace)
        if drafts:
            self._draft[batch, drafts].append(draft_seconds / pace)

    def known(self, batch: int, drafts: int) -> bool:
        return (batch, drafts) in self._target

    def relative(self, batch: int, drafts: int) -> float | None:
        """Cost of a step with `drafts` drafts over that of one without; None before both ends have been measured.

        A count that has not been measured itself is interpolated between the nearest that have.
        """
        plain = self._estimate(self._target, batch, 0)
        step = self._estimate(self._target, batch, drafts)
        if plain is None or step is None:
            return None
        return (step + (self._estimate(self._draft, batch, drafts) or 0.0)) / plain

    def _interpolated(self, batch: int, drafts: int) -> float | None:
        sizes = [d for b, d in self._target if b == batch]
        return self._estimate(self._target, batch, drafts) if sizes and min(sizes) < drafts < max(sizes) else None

    @staticmethod
    def _estimate(table, batch: int, drafts: int) -> float | None:
        if (batch, drafts) in table:
            return median(table[batch, drafts])
        points = sorted(d for b, d in table if b == batch)
        below = [d for d in points if d < drafts]
        above = [d for d in points if d > drafts]
        if below and above:
            low, high = below[-1], above[0]
        elif len(below) >= 2:
            low, high = below[-2:]
        else:
            return None
        at_low, at_high = median(table[batch, low]), median(table[batch, high])
        return max(at_low + (at_high - at_low) * (drafts - low) / (high - low), at_low)


class AcceptanceWatch:
    """Pauses speculation while it loses time, and tries it again later.

    A step with d drafts costs `relative` plain steps and yields 1 + accepted tokens, so it breaks even at
    accepted = relative - 1 per request. Where the mean over the last `window` steps with drafts stays below `threshold`
    times that, the next `pause` steps are plain; each pause that follows a failed retry is twice as long, to `longest`.

    Args:
        threshold: share of break-even below which to pause; 0 never pauses.
        window: steps with drafts to judge by.
        pause: plain steps of the first pause.
        longest: limit of a pause.
    """

    def __init__(self, threshold: float = 0.5, window: int = 8, pause: int = 16, longest: int = 256):
        if not threshold >= 0:
            raise ValueError(f"AcceptanceWatch: threshold must be >= 0, got {threshold}")
        self.threshold, self.window, self.pause, self.longest = threshold, window, pause, longest
        self._recent: deque[tuple[float, float]] = deque(maxlen=window)
        self._next_pause, self._left = pause, 0
        self.fallbacks = 0

    def speculate(self) -> bool:
        """Whether the next step should have drafts; counts down a pause."""
        if self._left:
            self._left -= 1
            return False
        return True

    def record(self, accepted_per_request: float, relative_cost: float | None) -> None:
        """One step with drafts; an unknown cost is not judged."""
        if relative_cost is None:
            return
        self._recent.append((accepted_per_request, relative_cost - 1.0))
        if len(self._recent) < self.window:
            return
        accepted = sum(a for a, _ in self._recent)
        break_even = sum(max(b, 0.0) for _, b in self._recent)
        if accepted < self.threshold * break_even:
            self._left, self._next_pause = self._next_pause, min(2 * self._next_pause, self.longest)
            self._recent.clear()
            self.fallbacks += 1
        else:
            self._next_pause = self.pause
