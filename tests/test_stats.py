"""Figures of a run, measured step costs, and the decision to pause."""

import json
import random

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


def record(costs, *steps):
    for drafts, seconds in steps:
        costs.record(1, drafts, seconds)


def test_costs_are_measured_not_guessed():
    costs = StepCosts()
    assert costs.relative(1, 5) is None and costs.relative(1, 0) == 1.0
    record(costs, (0, 0.010), (0, 0.500), (0, 0.010))
    assert costs.relative(1, 5) is None
    costs.record(1, 5, 0.020, 0.005)
    assert costs.relative(1, 5) == pytest.approx(2.5), "the proposal counts"
    assert costs.relative(2, 5) is None
    costs = StepCosts()
    record(costs, (0, 0.010), (5, 0.020), (0, 0.010), (1, 0.012))
    assert [costs.relative(1, d) for d in (1, 3, 5, 7)] == pytest.approx([1.2, 1.6, 2.0, 2.4])


def test_costs_are_compared_side_by_side():
    """A machine that gets three times slower while every step has drafts, and steps of both kinds after that."""
    costs = StepCosts()
    record(costs, *[(0, 0.010), (5, 0.015)] * 5, *[(5, 0.045)] * 200)
    assert costs.relative(1, 5) == pytest.approx(1.5)
    record(costs, *[(0, 0.030), (5, 0.045)] * 9)
    assert costs.relative(1, 5) == pytest.approx(1.5)


@pytest.mark.parametrize("run", [1, 8, 64])
def test_changed_costs_are_learned(run):
    costs = StepCosts()
    record(costs, *[(0, 0.010), (5, 0.015)] * 9)
    for _ in range(6):
        record(costs, *[(5, 0.030)] * run, *[(0, 0.010)] * run)
    assert costs.relative(1, 5) == pytest.approx(3.0)


@pytest.mark.parametrize("kind", [0, 5])
def test_noise_does_not_carry_costs_away(kind):
    noise = random.Random(0)
    costs = StepCosts()
    for _ in range(9):
        record(costs, (0, noise.uniform(0.009, 0.011)), (5, noise.uniform(0.0135, 0.0165)))
    before = costs.relative(1, 5)
    record(costs, *[(kind, noise.uniform(0.009, 0.011)) for _ in range(5000)])
    assert costs.relative(1, 5) == pytest.approx(before, rel=0.2)


def test_one_slow_step_does_not_put_a_size_out_of_use():
    costs = StepCosts()
    record(costs, *[(0, 0.010), (5, 0.020)] * 3, (0, 0.010))
    assert costs.relative(1, 3) == pytest.approx(1.6)
    record(costs, (3, 0.160))
    assert costs.relative(1, 3) == pytest.approx(1.6), "between its neighbours until compared again"
    record(costs, *[(0, 0.010), (3, 0.018)] * 9)
    assert costs.relative(1, 3) == pytest.approx(1.8)


def test_a_plain_step_now_and_then():
    costs = StepCosts()
    assert costs.wants_plain(1), "nothing to compare with yet"
    record(costs, (0, 0.010))
    for _ in range(64):
        assert not costs.wants_plain(1)
        record(costs, (5, 0.015))
    assert costs.wants_plain(1)
    record(costs, (0, 0.010))
    assert not costs.wants_plain(1)


def test_speculation_comes_back_after_a_slow_spell():
    """Costs measured while the machine was busy put drafts out of use; without drafts they would never be measured again."""
    costs = StepCosts()
    record(costs, *[(0, 1.0), (5, 8.0)] * 7)
    steps = []
    for _ in range(300):
        drafts = 5 if costs.wants_drafts(1) or costs.relative(1, 5) < 4 else 0
        steps.append(drafts)
        record(costs, (drafts, 1.5 if drafts else 1.0))
    assert steps.index(5) <= 64
    assert sum(steps[100:]) == 5 * 200


def test_what_stays_dear_is_tried_ever_more_rarely():
    costs, tried = StepCosts(), []
    record(costs, *[(0, 1.0), (5, 8.0)] * 7)
    for i in range(4000):
        drafts = 5 if costs.wants_drafts(1) or costs.relative(1, 5) < 4 else 0
        tried += [i] * (drafts > 0)
        record(costs, (drafts, 8.0 if drafts else 1.0))
    assert 6 <= len(tried) <= 12
    assert tried[-1] - tried[-2] >= 500


def test_speculation_that_has_become_dear_is_left():
    """Warmed up at 1.5 plain steps, a step with drafts costs 3; 0.8 accepted drafts no longer pay."""
    costs, watch = StepCosts(), AcceptanceWatch()
    record(costs, *[(0, 1.0), (4, 1.5)] * 7)
    seconds = tokens = 0.0
    for i in range(3000):
        drafted = watch.speculate() and not costs.wants_plain(1)
        accepted = int(drafted and i % 5 < 4)
        record(costs, (4, 3.0) if drafted else (0, 1.0))
        if drafted:
            watch.record(accepted, costs.relative(1, 4))
        seconds, tokens = seconds + (3.0 if drafted else 1.0), tokens + 1 + accepted
    assert watch.fallbacks > 3 and tokens / seconds > 0.85


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
