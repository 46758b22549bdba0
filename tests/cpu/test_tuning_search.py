"""Where the fused path stops paying, found on made-up times; what a wrong limit costs."""

import random

import pytest

from fastdeploy_fusion.tuning import regret
from fastdeploy_fusion.tuning.search import (
    Sample,
    best_limit,
    check_counts,
    find_limit,
    is_settled,
    powers_of_two,
    ratio_interval,
    verdict,
)


def crossing_at(tokens, noise=0.0, seed=0, rounds=15):
    """Times that cross at `tokens`: fused has the smaller constant, plain the smaller slope."""
    rng = random.Random(seed)

    def measure(count):
        jitter = [1 + rng.uniform(-noise, noise) for _ in range(2 * rounds)]
        fused, plain = 5.0 + 0.02 * count, 5.0 + 0.005 * tokens + 0.015 * count
        return Sample(
            count, {"fused": [fused * j for j in jitter[:rounds]], "plain": [plain * j for j in jitter[rounds:]]}
        )

    return measure


def sample(tokens, fused, plain, rounds=9):
    return Sample(tokens, {"fused": [fused] * rounds, "plain": [plain] * rounds})


class TestConfidence:
    def test_five_rounds_can_tell_nothing_apart_and_six_can(self):
        assert ratio_interval([1] * 5, [2] * 5) == (0.0, float("inf"))
        assert ratio_interval([1] * 6, [2] * 6) == (0.5, 0.5)

    def test_drift_that_hits_both_sides_cancels(self):
        slow = [1, 10, 100, 1, 10, 100, 1]
        assert verdict(Sample(1, {"fused": slow, "plain": [1.1 * t for t in slow]})) == 1
        assert verdict(Sample(1, {"fused": [1.1 * t for t in slow], "plain": slow})) == -1

    def test_one_outlier_decides_nothing(self):
        assert verdict(Sample(1, {"fused": [1.0] * 8 + [50.0], "plain": [1.2] * 9})) == 1

    def test_noise_is_not_told_apart(self):
        rng = random.Random(1)
        times = [[1 + rng.uniform(-0.3, 0.3) for _ in range(20)] for _ in range(2)]
        found = Sample(1, {"fused": times[0], "plain": times[1]})
        assert verdict(found) == 0 and not is_settled(found)

    def test_a_tie_is_settled_when_it_is_a_narrow_one(self):
        assert is_settled(sample(1, 1.0, 1.001))

    def test_the_interval_covers_the_true_ratio(self):
        rng = random.Random(2)
        hits = 0
        for _ in range(300):
            low, high = ratio_interval([rng.uniform(0.5, 1.5) for _ in range(15)], [1.0] * 15)
            hits += low <= 1.0 <= high
        assert hits >= 0.93 * 300


class TestSearch:
    @pytest.mark.parametrize("truth", [3, 48, 700, 3500, 11000])
    def test_the_crossing_is_found_within_five_percent(self, truth):
        limit, crossed, curve = find_limit(crossing_at(truth), 16384)
        assert crossed and truth / 1.07 - 1 <= limit <= truth * 1.07 + 1
        assert [s.tokens for s in curve] == sorted({s.tokens for s in curve})

    @pytest.mark.parametrize("seed", range(5))
    def test_noise_costs_little(self, seed):
        measure = crossing_at(2500, noise=0.1, seed=seed)
        limit, _, _ = find_limit(measure, 16384)
        quiet = crossing_at(2500)
        rows = [quiet(count).to_dict() for count in range(1, 16385, 37)]
        assert regret.worst(rows, limit)[0] < 0.05

    def test_fused_always_ahead(self):
        limit, crossed, curve = find_limit(lambda count: sample(count, 1.0, 2.0), 1000)
        assert (limit, crossed) == (1000, False)
        assert [s.tokens for s in curve] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]

    def test_fused_never_ahead(self):
        assert find_limit(lambda count: sample(count, 2.0, 1.0), 64)[:2] == (0, True)

    def test_a_disturbance_of_one_pass_is_no_crossing(self):
        looks = []

        def measure(count):
            looks.append(count)
            disturbed = count == 64 and looks.count(64) == 1
            return sample(count, 3.0 if disturbed else 1.0, 2.0)

        assert find_limit(measure, 64)[:2] == (64, False)
        assert looks.count(64) == 3

    def test_one_bad_count_below_does_not_move_the_limit(self):
        curve = [sample(n, 1.02 if n == 4 else 0.5, 1.0) for n in powers_of_two(1024)]
        assert best_limit(curve) == 1024

    def test_the_second_look_is_at_other_counts(self):
        measured = {*powers_of_two(16384), 3500}
        counts = check_counts(16384, 3500, measured)
        assert not set(counts) & measured
        assert {3, 6, 12288, 2800, 3325, 3675, 4375} <= set(counts) and max(counts) <= 16384


class TestRegret:
    ROWS = (
        {"tokens": 8, "us": {"fused": 5.0, "plain": 10.0}},
        {"tokens": 4096, "us": {"fused": 120.0, "plain": 100.0}},
    )

    def test_of_a_limit_too_high_and_too_low(self):
        assert regret.worst(self.ROWS, 8192) == (pytest.approx(0.2), 4096)
        assert regret.worst(self.ROWS, 4) == (pytest.approx(1.0), 8)
        assert regret.worst(self.ROWS, 8)[0] == 0

    def test_a_third_side_that_cannot_be_chosen_counts(self):
        assert regret.regret({"tokens": 8, "us": {"fused": 5.0, "pure": 4.0, "plain": 10.0}}, 8) == pytest.approx(0.25)

    def test_the_table_names_every_limit(self):
        lines = regret.table(self.ROWS, {"flat": 8192, "tuned": 8}).splitlines()
        assert lines[0] == "| tokens | fused, us | plain, us | fastest | flat (8192) | tuned (8) |"
        assert lines[-1].split("|")[-3:-1] == [" **20.0%** ", " **0.0%** "]

    def test_noise_is_no_certain_regret(self):
        rng = random.Random(3)
        noisy = [[1 + rng.uniform(-0.5, 0.5) for _ in range(15)] for _ in range(2)]
        row = Sample(8, {"fused": [1.02 * t for t in noisy[0]], "plain": noisy[1]}).to_dict()
        assert regret.certain(row, 8) < 0.02
        row = Sample(8, {"fused": [1.3] * 15, "plain": [1.0] * 15}).to_dict()
        assert regret.certain(row, 8) == pytest.approx(0.3) and regret.certain(row, 4) == 0
