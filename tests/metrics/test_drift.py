"""The test of drift against counting and multiplying by hand, and its promise on drawn scores."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from lit_fedad.metrics.conformal import ScoreCounts
from lit_fedad.metrics.drift import DriftTest, Stability, uniformity


def whole(draw, n, most=12):
    """Whole numbers, many of them equal; each has a bin of its own."""
    return [float(value) for value in draw.integers(1, most, n)]


def calibrated(scores, **settings):
    return DriftTest(ScoreCounts.of(torch.tensor(scores)), **settings)


def test_a_p_value_is_a_rank_among_all_images_before():
    draw = np.random.default_rng(0)
    calibration, stream = whole(draw, 7), whole(draw, 40)
    test, seen, within = calibrated(calibration), list(calibration), []
    for score in stream:
        p_value = test.add([score])[0].p_value
        above, equal = sum(old > score for old in seen), 1 + sum(old == score for old in seen)
        seen.append(score)
        low, high = above / len(seen), (above + equal) / len(seen)
        assert low < p_value <= high
        within.append((p_value - low) / (high - low))
    assert uniformity(within)[1] > 0.01  # equal scores are ranked at random


def test_martingale_and_statistic_are_those_of_four_bets_between_which_wealth_jumps():
    draw, stakes = np.random.default_rng(1), {"half": 0.5, "most": 0.8}
    test, bets = calibrated(whole(draw, 40), run_length=1e9), dict.fromkeys((-1, 0, *stakes), 1 / 4)
    capitals, top = [1.0], 2  # 5 % of 40
    for before, score in enumerate([*whole(draw, 30), *(20.0 + image for image in range(10))], 40):
        step = test.add([score])[0]
        chance, capital = (top + 1) / (before + 1), sum(bets.values())
        for bet in bets:
            if stake := stakes.get(bet):
                pays = stake / chance if step.p_value <= chance else (1 - stake) / (1 - chance)
            else:
                pays = 1 + bet * (step.p_value - 0.5)
            bets[bet] = (0.99 * bets[bet] + 0.01 / 4 * capital) * pays
        top += step.p_value <= chance
        capitals.append(sum(bets.values()))
        assert step.log_martingale == pytest.approx(math.log10(capitals[-1]))
        assert step.statistic == pytest.approx(sum(capitals[-1] / earlier for earlier in capitals[:-1]))
    assert capitals[-1] > capitals[30]


@pytest.mark.parametrize("images", [1, 40])
def test_false_alarms_are_at_most_one_in_a_run_length(images):
    """With as few as one calibration image; at least a third of what is promised is used."""
    length, streams, run_length = 300, 150, 100
    draw = np.random.default_rng(images)
    alarms = []
    for _ in range(streams):
        test = calibrated(draw.normal(size=images).tolist(), run_length=run_length)
        alarms.append(sum(step.alarm for step in test.add(draw.normal(size=length))))
    error = np.std(alarms) / math.sqrt(streams)
    assert 0.3 * length / run_length < np.mean(alarms) < length / run_length + 4 * error


def test_p_values_of_few_calibration_images_are_uniform_and_independent():
    draw = np.random.default_rng(2)
    streams = []
    for seed in range(300):
        test = calibrated(draw.normal(size=3).tolist(), seed=seed)
        streams.append([step.p_value for step in test.add(draw.normal(size=8))])
    streams = np.array(streams)
    assert uniformity(streams.ravel())[1] > 0.01
    correlation = np.corrcoef(streams.T)[~np.eye(8, dtype=bool)]
    assert np.abs(correlation).max() < 4 / math.sqrt(300)


def test_a_shift_is_found_within_a_few_images_and_the_statistic_begins_anew():
    draw = np.random.default_rng(3)
    test = calibrated(draw.normal(size=60).tolist(), run_length=1000)
    assert not any(step.alarm for step in test.add(draw.normal(size=200)))
    steps = test.add(draw.normal(3, size=30))
    (first, *_) = [number for number, step in enumerate(steps, 1) if step.alarm]
    assert first <= 20
    assert steps[first - 1].statistic == 0
    assert steps[first].statistic < 10


def test_images_that_score_lower_raise_no_alarm():
    draw = np.random.default_rng(5)
    test = calibrated(draw.normal(size=60).tolist(), run_length=1000)
    assert not any(step.alarm for step in test.add(draw.normal(-1, size=200)))


def test_a_few_anomalies_raise_no_alarm():
    draw = np.random.default_rng(4)
    scores = draw.normal(size=100)
    scores[[30, 31, 60]] = 1e6
    assert not any(step.alarm for step in calibrated(draw.normal(size=50).tolist()).add(scores.tolist()))


@pytest.mark.parametrize("images", [20, 100])
def test_a_new_product_is_found_at_its_first_images(images):
    """All beyond the calibration scores, from the first image of the stream, at the default run length."""
    draw = np.random.default_rng(images)
    steps = calibrated(draw.normal(size=images).tolist()).add((50 + draw.normal(size=20)).tolist())
    assert any(step.alarm for step in steps[:12])


def test_a_light_under_which_half_of_the_images_are_anomalous_is_found_within_twenty():
    """With 48 calibration images, at the default run length, in three of four draws."""
    found = 0
    for seed in range(20):
        draw = np.random.default_rng(seed)
        test = calibrated(draw.normal(size=48).tolist())
        test.add(draw.normal(size=40))
        found += any(step.alarm for step in test.add(draw.normal(size=20) + 4 * (draw.permutation(20) < 10)))
    assert found >= 15


def test_equal_seeds_rank_alike_and_others_do_not():
    scores = [5.0] * 20
    first, second, other = (
        [step.p_value for step in calibrated([5.0] * 9, seed=seed).add(scores)] for seed in (0, 0, 1)
    )
    assert first == second
    assert first != other


def test_uniformity_is_the_largest_step_between_the_distributions():
    p_values = [0.05, 0.3, 0.31, 0.9]
    ordered = np.sort(p_values)
    by_hand = max(max((i + 1) / 4 - p, p - i / 4) for i, p in enumerate(ordered))
    distance, p_value = uniformity(p_values)
    assert distance == pytest.approx(by_hand)
    assert 0.3 < p_value < 0.9
    assert uniformity(np.linspace(0, 0.2, 50))[1] < 1e-6
    assert all(map(math.isnan, uniformity([])))


def test_without_calibration_images_the_first_image_wins_nothing_by_being_a_top_one():
    """A score of which one has been seen is a top one for certain: bets on it pay what they staked."""
    (step,) = DriftTest(ScoreCounts.union(())).add([5.0])
    assert step.log_martingale == pytest.approx(math.log10((1 - (step.p_value - 0.5) + 3) / 4))


def test_the_stability_of_no_score_has_no_limit():
    assert math.isnan(Stability.of(ScoreCounts.of(torch.arange(20.0)), torch.empty(0)).limit)


def test_the_stability_index_by_hand():
    calibration = ScoreCounts.of(torch.arange(1.0, 21))  # two in each of ten bins
    found = Stability.of(calibration, torch.tensor([0.5, 1.0, 2.0, 3.0, 19.0, 25.0]))
    assert found.expected == (2,) * 10
    assert found.seen == (3, 1, 0, 0, 0, 0, 0, 0, 0, 2)
    shares = [(3.5 / 11, 1), (1.5 / 11, 1), (0.5 / 11, 7), (2.5 / 11, 1)]
    assert found.index == pytest.approx(sum(n * (q - 0.1) * math.log(q / 0.1) for q, n in shares))
    assert found.limit == pytest.approx((1 / 20 + 1 / 6) * stats.chi2.isf(0.05, 9))


def test_equal_calibration_scores_share_a_bin():
    found = Stability.of(ScoreCounts.of(torch.tensor([1.0] * 30 + [2.0])), torch.tensor([1.0, 3.0]))
    assert found.expected == (30, 1)
    assert found.seen == (1, 1)
    shares = [(30.5 / 32, 1 / 2), (1.5 / 32, 1 / 2)]
    assert found.index == pytest.approx(sum((q - p) * math.log(q / p) for p, q in shares))


def test_without_drift_the_index_stays_below_its_limit_in_about_19_of_20_cases():
    draw = torch.Generator().manual_seed(0)
    below = []
    for _ in range(300):
        calibration, new = torch.randn(100, generator=draw), torch.randn(50, generator=draw)
        found = Stability.of(ScoreCounts.of(calibration), new)
        below.append(found.index < found.limit)
    assert 0.9 < sum(below) / len(below) < 0.995
