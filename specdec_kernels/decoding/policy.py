"""When speculation pays: measured costs of a step, and the watch over acceptance."""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

_KEEP = 9
_PLAIN_EVERY = 64
_RETRY_AFTER = (64, 512)  # steps without drafts: at first, at most


class StepCosts:
    """Cost of a step by batch size and number of drafts, in steps without drafts, from a decoder's own steps.

    Seconds measured at different times do not compare: a machine gets busy, a context grows. So a step with drafts is
    compared with a plain step right before or after it, and a proposal with the forward and verification of its own
    step. Medians of the last few such ratios: one slow step says nothing.

    Ratios that put drafts out of use are never contradicted, as no step has any then. So after a while without drafts one
    step should have some (`wants_drafts`), and its ratio replaces the old ones; each time that this changes nothing, the
    while is twice as long.
    """

    def __init__(self) -> None:
        self._ratios: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=_KEEP))
        self._proposals: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=_KEEP))
        self._last: dict[int, tuple[int, float]] = {}
        self._since_plain: dict[int, int] = {}
        self._without_drafts: dict[int, int] = defaultdict(int)
        self._patience: dict[int, int] = defaultdict(lambda: _RETRY_AFTER[0])

    def record(
        self, batch: int, drafts: int, target_seconds: float, draft_seconds: float = 0.0, depth: int | None = None
    ) -> None:
        """One step of `batch` requests with at most `drafts` drafts each.

        target_seconds: of forward and verification, > 0 · draft_seconds: of the proposal · depth: the longest path, of trees.
        """
        before, seconds = self._last.get(batch, (drafts, target_seconds))
        self._last[batch] = drafts, target_seconds
        if drafts == 0:
            self._since_plain[batch] = 0
            if before:
                self._compare(batch, before, seconds / target_seconds)
            self._without_drafts[batch] += 1
        else:
            if self.wants_drafts(batch):
                for key in [key for key in self._ratios if key[0] == batch]:
                    del self._ratios[key]
                self._patience[batch] = min(2 * self._patience[batch], _RETRY_AFTER[1])
            elif self._without_drafts[batch] == 0:  # one after another: they are in use
                self._patience[batch] = _RETRY_AFTER[0]
            self._without_drafts[batch] = 0
            if batch in self._since_plain:
                self._since_plain[batch] += 1
            self._proposals[batch, drafts if depth is None else depth].append(draft_seconds / target_seconds)
            if before == 0:
                self._compare(batch, drafts, target_seconds / seconds)

    def _compare(self, batch: int, drafts: int, ratio: float) -> None:
        sizes = [d for b, d in self._ratios if b == batch]
        if drafts not in sizes and sizes and drafts < max(sizes):
            # One slow step must not put a size out of use before it has been tried again.
            expected = self._step(batch, drafts)
            self._ratios[batch, drafts].extend([expected] * 2)
        self._ratios[batch, drafts].append(ratio)

    def wants_plain(self, batch: int) -> bool:
        """Whether the next step should have no drafts, so that there is one to compare with."""
        return self._since_plain.get(batch, _PLAIN_EVERY) >= _PLAIN_EVERY

    def wants_drafts(self, batch: int) -> bool:
        """Whether the next step should have drafts, whatever is known of their cost."""
        return self._without_drafts[batch] >= self._patience[batch]

    def relative(self, batch: int, drafts: int, depth: int | None = None) -> float | None:
        """Cost of a step with `drafts` drafts over that of one without; None before any has been compared.

        A count that has not been compared itself lies on the line through its neighbours that have (0 drafts cost 1). The
        proposal of a tree costs by its depth.
        """
        step = self.step(batch, drafts)
        return None if step is None else step + self.draft(batch, drafts, depth)

    def draft(self, batch: int, drafts: int, depth: int | None = None) -> float:
        """The part of `relative` that the proposal has."""
        return (self.step(batch, drafts) or 1.0) * self._proposal(batch, drafts if depth is None else depth)

    def _proposal(self, batch: int, drafts: int) -> float:
        """Cost of a proposal over that of its own step's forward: between those that were measured, none for no drafts."""
        known = {d: median(r) for (b, d), r in self._proposals.items() if b == batch}
        if not drafts or not known:
            return 0.0
        if drafts in known:
            return known[drafts]
        known[0] = 0.0
        below = max(d for d in known if d < drafts)
        above = min((d for d in known if d > drafts), default=None)
        if above is None:
            return known[below] * drafts / below if below else 0.0
        return known[below] + (known[above] - known[below]) * (drafts - below) / (above - below)

    def step(self, batch: int, drafts: int) -> float | None:
        """Cost of forward and verification of `drafts` drafts over a step without; None before any has been compared."""
        return 1.0 if drafts == 0 else self._step(batch, drafts)

    def _step(self, batch: int, drafts: int) -> float | None:
        known = {d: median(r) for (b, d), r in self._ratios.items() if b == batch}
        if not known:
            return None
        known[0] = 1.0
        if drafts in known:
            return known[drafts]
        below = max(d for d in known if d < drafts)
        above = min((d for d in known if d > drafts), default=None)
        if above is None:
            below, above = sorted(known)[-2:]
        slope = (known[above] - known[below]) / (above - below)
        return max(known[below] + slope * (drafts - below), known[below])


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
