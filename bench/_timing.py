"""Paired, interleaved timing: every round runs each call once, so drift and noise hit all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

#: A sample shorter than this is repeated, and the mean of the repeats is the sample.
_SHORTEST_SAMPLE = 5e-3


@dataclass(frozen=True)
class Settings:
    """How a run measures. `quick` shrinks shapes and rounds until only the harness is tested."""

    rounds: int = 25
    peer_rounds: int = 5
    quick: bool = False
    cpu_time: bool = False
    cold: bool = False
    peers: bool = True

    @property
    def clock(self) -> Callable[[], float]:
        return time.process_time if self.cpu_time else time.perf_counter


class Remote:
    """A call that runs in another process and times itself; `run(cpu_time)` returns seconds."""

    def __init__(self, run: Callable[[bool], float]):
        self.run = run


def _significant(value: float) -> float:
    """Five significant digits, not decimals: figures go from 0.001 to 1,000."""
    return float(f"{value:.5g}")


@dataclass(frozen=True)
class Spread:
    median: float
    min: float
    p25: float
    p75: float

    @classmethod
    def of(cls, samples: list[float]) -> Spread:
        ordered = sorted(samples)
        if len(ordered) == 1:
            return cls(*ordered * 4)
        low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
        return cls(statistics.median(ordered), ordered[0], low, high)

    def as_dict(self, scale: float = 1.0) -> dict[str, float]:
        return {name: _significant(getattr(self, name) * scale) for name in ("median", "min", "p25", "p75")}


def last_level_cache_bytes() -> int:
    """Size of the largest cache that Linux reports, or 32 MiB."""
    sizes = []
    for level in range(8):
        try:
            with open(f"/sys/devices/system/cpu/cpu0/cache/index{level}/size") as file:
                sizes.append(int(file.read().strip().removesuffix("K")) * 1024)
        except (OSError, ValueError):
            continue
    return max(sizes, default=32 << 20)


def make_evict() -> Callable[[], object]:
    """A call that reads twice the last-level cache, so that what was in it is gone."""
    buffer = torch.zeros(2 * last_level_cache_bytes() // 4)
    return buffer.sum


def paired(calls: dict[str, Callable | Remote], rounds: int, settings: Settings) -> dict[str, list[float]]:
    """Seconds of each call in each round, interleaved A B C A B C ...; an untimed round comes first.

    Warm: the same buffers every time. Cold: the cache is flushed before each sample, which is then a single call.
    """
    clock = settings.clock
    evict = make_evict() if settings.cold else None

    def once(call: Callable | Remote, repeats: int) -> float:
        if evict is not None:
            evict()
        if isinstance(call, Remote):
            return call.run(settings.cpu_time)
        start = clock()
        for _ in range(repeats):
            call()
        return (clock() - start) / repeats

    repeats = {}
    for name, call in calls.items():
        once(call, 1)
        first = once(call, 1)
        repeats[name] = 1 if settings.cold else max(1, round(_SHORTEST_SAMPLE / max(first, 1e-6)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(once(call, repeats[name]))
    return samples


def summary(samples: dict[str, list[float]], subject: str) -> dict[str, dict]:
    """`ms`: spread of every call · `ratio`: spread of subject / other, taken round by round (the median of ratios is not
    the ratio of medians, and it is the former that noise common to a round leaves alone)."""
    mine = samples[subject]
    return {
        "ms": {name: Spread.of(values).as_dict(1e3) for name, values in samples.items()},
        "ratio": {
            name: Spread.of([a / b for a, b in zip(mine, values, strict=True)]).as_dict()
            for name, values in samples.items()
            if name != subject
        },
    }


def bandwidth(measured: dict[str, dict], subject: str, bytes_read: int, bytes_copied: int) -> dict[str, float]:
    """GB/s of the bytes that must be read, and its share of the bandwidth of `copy` (which moves each byte twice)."""
    seconds, copied = measured["ms"][subject]["median"] / 1e3, measured["ms"]["copy"]["median"] / 1e3
    share = bytes_read / (2 * bytes_copied * measured["ratio"]["copy"]["median"])
    return {
        "bytes_read": bytes_read,
        "gb_per_s": _significant(bytes_read / seconds / 1e9),
        "copy_gb_per_s": _significant(2 * bytes_copied / copied / 1e9),
        "of_copy_bandwidth": _significant(share),
    }


def table(headers: list[str], lines: list[list[str]]) -> str:
    """Text table; the first column is left-aligned, the rest right-aligned."""
    widths = [max(len(line[i]) for line in [headers, *lines]) for i in range(len(headers))]

    def text(line: list[str]) -> str:
        return "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )

    return "\n".join([text(headers), "  ".join("-" * w for w in widths), *map(text, lines)])


def ms(spread: dict[str, float]) -> str:
    """Median and quartiles of a spread in milliseconds, in a unit that suits it."""
    if spread["median"] < 1:
        return f"{spread['median'] * 1e3:.1f} us ({spread['p25'] * 1e3:.1f}-{spread['p75'] * 1e3:.1f})"
    digits = 2 if spread["median"] < 100 else 0
    return f"{spread['median']:.{digits}f} ms ({spread['p25']:.{digits}f}-{spread['p75']:.{digits}f})"


def times(spread: dict[str, float] | None) -> str:
    """A ratio's median, or a dash."""
    if spread is None:
        return "-"
    return f"{spread['median']:.2f}x" if spread["median"] >= 0.1 else f"{spread['median']:.4f}x"
