"""Figures of a run, measured step costs, and the decision to pause."""

import json

import pytest

from specdec_kernels.decoding.policy import AcceptanceWatch, StepCosts
from specdec_kernels.decoding.stats import SpecDecodeStats


def test_counts_and_rates():
    stats = SpecDecodeStats()
    stats.record([5, 2, 0], [5, 0, 0])
    stats.record([3, 0, 0], [1, 0, 0])
    stats.record([0, 0, 0], [0, 0, 0])
    assert (stats.target_calls, stats.target_rows, stats.plain_steps) == (3, 9, 1)
    assert (stats.drafted, stats.accepted) == (10, 6)
    assert stats.drafted_at == [3, 3, 2, 1, 1] and stats.accepted_at == [2, 1, 1, 1, 1]
    assert stats.acceptance_by_position == [2 / 3, 1 / 3, 1 / 2, 1.0, 1.0]
    assert stats.acceptance_rate == 0.6
    assert stats.tokens_per_call == (6 + 9) / 9


def test_times_json_and_table():
    stats = SpecDecodeStats(tokens=90, prefill_seconds=1.0, draft_seconds=0.5, target_seconds=7.0, verify_seconds=1.0)
    stats.rest_seconds = 0.5
    stats.record([1], [1])
    assert stats.step_seconds == 9.0 and stats.tokens_per_second == 9.0
    # A lookup's time is bookkeeping, a draft model's is not.
    assert stats.overhead_share == pytest.approx(2.0 / 9)
    stats.draft_calls = 1
    assert stats.overhead_share == pytest.approx(1.5 / 9)
    read = json.loads(stats.to_json())
    assert read["tokens"] == 90 and read["tokens_per_second"] == 9.0 and read["acceptance_by_position"] == [1.0]
    assert "tokens per target call" in stats.table() and "77.8%" in stats.table()
    assert SpecDecodeStats().table() and SpecDecodeStats().to_dict()["tokens_per_call"] == 0.0


def test_costs_are_measured_not_guessed():
    costs = StepCosts()
    assert costs.relative(1, 5) is None
    for seconds in (0.010, 0.500, 0.010):
        costs.record(1, 0, seconds)
    assert costs.relative(1, 5) is None, "one point says nothing about the slope"
    costs.record(1, 5, 0.020, 0.005)
    assert costs.relative(1, 5) == pytest.approx(2.5)
    costs.record(1, 1, 0.012, 0.001)
    assert costs.relative(1, 3) == pytest.approx((0.016 + 0.003) / 0.010)
    assert costs.relative(2, 5) is None
    assert costs.relative(1, 0) == 1.0


def test_costs_are_compared_at_the_same_pace():
    """Plain steps measured on a quiet machine, the others on a busy one."""
    costs = StepCosts()
    for _ in range(3):
        costs.record(1, 0, 0.010)
        costs.record(1, 5, 0.015)
    for _ in range(20):
        costs.record(1, 5, 0.045)
    assert costs.relative(1, 5) == pytest.approx(1.5, rel=0.1)
    # The kinds of step do part: plain ones are as fast as ever.
    for _ in range(20):
        costs.record(1, 0, 0.010)
        costs.record(1, 5, 0.045)
    assert costs.relative(1, 5) == pytest.approx(4.5, rel=0.02)


def test_one_slow_step_does_not_put_a_size_out_of_use():
    costs = StepCosts()
    for _ in range(3):
        costs.record(1, 0, 0.010)
        costs.record(1, 5, 0.020)
    assert costs.relative(1, 3) == pytest.approx(1.6)
    costs.record(1, 3, 0.160)
    assert costs.relative(1, 3) == pytest.approx(1.6), "between its neighbours until measured again"
    for _ in range(9):
        costs.record(1, 0, 0.010)
        costs.record(1, 5, 0.020)
        costs.record(1, 3, 0.018)
    assert costs.relative(1, 3) == pytest.approx(1.8, rel=0.02)


def test_what_is_beyond_the_measured_sizes_is_not_held_against_a_measurement():
    """Two noisy first points say little about a size far outside them."""
    costs = StepCosts()
    costs.record(1, 0, 0.010)
    costs.record(1, 1, 0.015)
    costs.record(1, 5, 0.012)
    assert costs.relative(1, 5) == pytest.approx(1.2)


def test_draft_costs_are_at_the_same_pace():
    costs = StepCosts()
    for _ in range(9):
        costs.record(1, 0, 0.010)
        costs.record(1, 2, 0.010, 0.005)
    for _ in range(20):
        costs.record(1, 2, 0.030, 0.015)
    assert costs.relative(1, 2) == pytest.approx(1.5, rel=0.02)


def test_watch_pauses_and_retries():
    watch = AcceptanceWatch(threshold=0.5, window=4, pause=3, longest=5)
    pauses = []
    for _ in range(3):
        for _ in range(4):
            assert watch.speculate()
            watch.record(0.2, 1.5)  # break-even 0.5 accepted drafts, half of it 0.25
        plain = 0
        while not watch.speculate():
            plain += 1
        pauses.append(plain)
        watch.record(0.2, 1.5)
        for _ in range(3):
            assert watch.speculate()
            watch.record(0.3, 1.5)
        # 0.275 on average: stays on.
        watch._recent.clear()
    assert pauses[0] == 3 and watch.fallbacks == 3
    off = AcceptanceWatch(threshold=0.0, window=1)
    for _ in range(10):
        off.record(0.0, 9.0)
        assert off.speculate()
    unknown = AcceptanceWatch(window=1)
    unknown.record(0.0, None)
    assert unknown.speculate()


def test_failed_retries_lengthen_the_pause():
    watch = AcceptanceWatch(window=2, pause=2, longest=5)
    pauses = []
    for _ in range(4):
        watch.record(0.0, 2.0)
        watch.record(0.0, 2.0)
        plain = 0
        while not watch.speculate():
            plain += 1
        pauses.append(plain)
    assert pauses == [2, 4, 5, 5]
    watch.record(5.0, 2.0)
    watch.record(5.0, 2.0)
    watch.record(0.0, 2.0)
    watch.record(0.0, 2.0)
    plain = 0
    while not watch.speculate():
        plain += 1
    assert plain == 2, "a good stretch makes the next pause short again"
