"""Counters and times of a speculative decoding run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field


@dataclass
class SpecDecodeStats:
    """What one `generate` call did. Counts are over all rows; times are wall-clock seconds of the host
    without the caller's streamer. On a GPU the forwards run on while the host goes ahead: their time shows where the host
    waits for the tokens, in `verify_seconds`.

    | field | meaning |
    |---|---|
    | `tokens` | new tokens returned, end-of-sequence tokens included |
    | `target_calls` | target forwards after the prefill |
    | `target_rows` | requests in those forwards, summed: a forward of 4 requests counts 4 |
    | `draft_calls` | forwards of a draft model (0 for lookups) |
    | `drafted`, `accepted` | draft tokens verified, and accepted |
    | `emitted` | tokens that those forwards gave, before an end of sequence cut some off |
    | `discarded` | drafts made ahead (`block_size`) and never verified, as one before them was rejected |
    | `drafted_at[i]`, `accepted_at[i]` | steps of a request whose chain, or longest path, had an i-th draft, and in which that many were accepted |
    | `plain_steps` | steps without any draft: nothing proposed, or speculation paused |
    | `fallbacks` | times that speculation was paused because it did not pay |
    | `prefill_seconds` | prompt forward and the first token |
    | `draft_seconds` .. `rest_seconds` | the steps after that; `verify_seconds` includes reading the tokens back |
    """

    tokens: int = 0
    target_calls: int = 0
    target_rows: int = 0
    draft_calls: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    discarded: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    plain_steps: int = 0
    fallbacks: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    verify_seconds: float = 0.0
    rest_seconds: float = 0.0

    @property
    def tokens_per_call(self) -> float:
        """Tokens per request and target forward; 1 without speculation. The prefill and its token do not count."""
        return self.emitted / self.target_rows if self.target_rows else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts / verified drafts, 0 where there were none."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Element i: accepted / verified for the i-th draft of a step (a rejection also rejects what follows it)."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def step_seconds(self) -> float:
        """Time of all steps after the prefill."""
        return self.draft_seconds + self.target_seconds + self.verify_seconds + self.rest_seconds

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.step_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def overhead_share(self) -> float:
        """Share of the step time spent outside the two models: verification, sampling and bookkeeping.

        The time of a drafter that runs no model (a lookup) counts as bookkeeping.
        """
        lookup = self.draft_seconds if self.draft_calls == 0 else 0.0
        return (self.verify_seconds + self.rest_seconds + lookup) / self.step_seconds if self.step_seconds else 0.0

    def record(
        self,
        drafted: list[int],
        accepted: list[int],
        depths: list[int] | None = None,
        emitted: int | None = None,
    ) -> None:
        """Adds one step: drafts verified and accepted, per request; depths: longest paths of trees; emitted: tokens in all, one
        more than accepted for each request where not given."""
        depths = drafted if depths is None else depths
        longest = max(depths, default=0)
        grow = longest - len(self.drafted_at)
        if grow > 0:
            self.drafted_at += [0] * grow
            self.accepted_at += [0] * grow
        for d, a in zip(depths, accepted, strict=True):
            for i in range(d):
                self.drafted_at[i] += 1
            for i in range(a):
                self.accepted_at[i] += 1
        self.target_calls += 1
        self.target_rows += len(drafted)
        self.drafted += sum(drafted)
        self.accepted += sum(accepted)
        self.emitted += sum(accepted) + len(accepted) if emitted is None else emitted
        self.plain_steps += longest == 0

    def clock(self, begin: float, drafted: float, forwarded: float, verified: float, end: float) -> None:
        """Adds the times of one step, in seconds of one clock: when it began, and when each of its parts was done."""
        self.draft_seconds += drafted - begin
        self.target_seconds += forwarded - drafted
        self.verify_seconds += verified - forwarded
        self.rest_seconds += end - verified

    def to_dict(self) -> dict:
        """Fields and derived figures."""
        derived = ["tokens_per_call", "acceptance_rate", "acceptance_by_position", "step_seconds", "seconds"]
        derived += ["tokens_per_second", "overhead_share"]
        return asdict(self) | {name: getattr(self, name) for name in derived}

    def to_json(self, **kwargs) -> str:
        return json.dumps(self.to_dict(), **kwargs)

    def table(self) -> str:
        """The run as aligned text, one figure a line."""
        total = self.step_seconds or 1.0
        by_position = " ".join(f"{rate:.2f}" for rate in self.acceptance_by_position) or "-"
        rows = [
            ("tokens", f"{self.tokens}"),
            ("seconds", f"{self.seconds:.2f} (prefill {self.prefill_seconds:.2f})"),
            ("tokens/s", f"{self.tokens_per_second:.1f}"),
            (
                "target calls",
                f"{self.target_calls} after the prefill ({self.plain_steps} without drafts, {self.fallbacks} fallbacks)",
            ),
            ("draft calls", f"{self.draft_calls}"),
            ("tokens per target call", f"{self.tokens_per_call:.2f}"),
            ("acceptance", f"{self.acceptance_rate:.2f} ({self.accepted}/{self.drafted})"),
            ("acceptance by position", by_position),
        ]
        for name in ("draft", "target", "verify", "rest"):
            seconds = getattr(self, f"{name}_seconds")
            rows.append((f"time: {name}", f"{seconds:.3f} s  {100 * seconds / total:.1f}%"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
