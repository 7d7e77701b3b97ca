"""What is reported of an attack, against scikit-learn and SciPy, by chance and with a planted leak."""

import numpy as np
import pytest
import torch
from scipy.stats import mannwhitneyu
from sklearn.metrics import roc_auc_score, roc_curve

from lit_fedad.audits.lira import exchangeable_scores
from lit_fedad.audits.membership_report import Attacked, membership_report, pooled_roc


def halves(rng, cells, models):
    """Complementary halves of each cell [J, n], for pairs of models."""
    rows = []
    for _ in range(models // 2):
        first = np.zeros(len(cells), dtype=bool)
        for cell in np.unique(cells):
            own = rng.permutation(np.flatnonzero(cells == cell))
            first[own[: len(own) // 2]] = True
        rows += [first, ~first]
    return torch.from_numpy(np.stack(rows))


def attack(seed, leak, models=8, sizes=(20, 12), dimensions=2):
    """Exchangeable LiRA on drawn statistics of two clients, of which members' are higher by a leak."""
    rng, found = np.random.default_rng(seed), {}
    for client, size in enumerate(sizes):
        cells = np.arange(size) // 4
        members = halves(rng, cells, models)
        hardness = rng.normal(0, 5, (size, dimensions))
        phi = torch.from_numpy(hardness + rng.normal(size=(models, size, dimensions)))
        phi += leak * members.unsqueeze(-1)
        scores = exchangeable_scores(phi, members)
        found[client] = Attacked(scores, members, torch.from_numpy(cells))
    return found


def joined(attacked, name):
    return torch.cat([getattr(one, name).flatten() for one in attacked.values()]).numpy()


def test_the_pooled_curve_is_scikit_learns():
    attacked = attack(0, 1.0)
    scores, members = joined(attacked, "scores"), joined(attacked, "members")
    report = membership_report(attacked)
    assert report.auc.value == pytest.approx(roc_auc_score(members, scores))
    false, true, _ = roc_curve(members, scores, drop_intermediate=False)
    ours = pooled_roc(attacked)
    np.testing.assert_allclose(ours[0], false)
    np.testing.assert_allclose(ours[1], true)
    for name, rate in (("tpr_at_0.1_percent", 0.001), ("tpr_at_1_percent", 0.01)):
        assert report.tpr[name].value == true[false <= rate].max()
    assert report.examples == {0: 20, 1: 12}


def test_equal_scores_make_one_step():
    scores, members = (
        torch.tensor([[1.0, 1, 0, 1], [0, 1, 2, 2]]),
        torch.tensor([[True, False, True, False]] * 2),
    )
    report = membership_report({0: Attacked(scores, members, torch.zeros(4, dtype=torch.int64))})
    assert report.auc.value == pytest.approx(roc_auc_score(members.flatten(), scores.flatten()))


def test_areas_by_client_and_model_are_those_of_the_rank_test():
    attacked = attack(1, 0.7)
    report = membership_report(attacked)
    models, floors, defended = [], [], []
    for model in range(8):
        areas = []
        for one in attacked.values():
            score, member = one.scores[model].numpy(), one.members[model].numpy()
            test = mannwhitneyu(score[member], score[~member])
            areas.append(test.statistic / (member.sum() * (~member).sum()))
        floors.append(np.maximum(areas, 0.5))
        defended += [area <= 0.5 for area in areas]
        score, member = (
            torch.cat([getattr(one, name)[model] for one in attacked.values()])
            for name in ("scores", "members")
        )
        models.append(roc_auc_score(member, score))
    assert report.auc_of_models == pytest.approx((np.mean(models), np.std(models, ddof=1)))
    assert report.fedvck["largest_auc"][0] == pytest.approx(np.max(floors, 1).mean())
    assert report.fedvck["mean_auc"][0] == pytest.approx(np.mean(floors))
    assert report.fedvck["defence_rate"][0] == pytest.approx(np.mean(defended))


def test_scores_that_are_missing_are_left_out():
    attacked = attack(2, 1.0)
    scores = attacked[0].scores.clone()
    scores[3], scores[:, 5] = torch.nan, torch.nan
    attacked[0] = attacked[0]._replace(scores=scores)
    kept = ~np.isnan(joined(attacked, "scores"))
    expected = roc_auc_score(joined(attacked, "members")[kept], joined(attacked, "scores")[kept])
    assert membership_report(attacked).auc.value == pytest.approx(expected)


def test_a_client_of_whom_nothing_is_seen_is_left_out():
    attacked = attack(2, 1.0)
    blank = attacked[1]._replace(scores=torch.full_like(attacked[1].scores, torch.nan))
    report = membership_report({0: attacked[0], 7: blank})
    assert list(report.clients) == [0]
    assert report.auc == membership_report({0: attacked[0]}).auc


@pytest.mark.slow
def test_without_a_leak_the_area_is_half_and_its_interval_says_so():
    """Many attacks on nothing: their mean is one half, and nearly all intervals hold it."""
    reports = [membership_report(attack(seed, 0.0), seed) for seed in range(30)]
    areas = np.array([report.auc.value for report in reports])
    assert abs(areas.mean() - 0.5) < 0.03
    held = [report.auc.low <= 0.5 <= report.auc.high for report in reports]
    assert np.mean(held) > 0.8
    assert np.mean([report.auc.value <= report.auc.chance_high for report in reports]) > 0.7


def test_a_planted_leak_is_found_beyond_chance():
    report = membership_report(attack(3, 3.0))
    assert report.auc.value > 0.9
    assert report.auc.low > report.auc.chance_high
    assert report.tpr["tpr_at_1_percent"].value > report.tpr["tpr_at_1_percent"].chance_high
    assert report.fedvck["defence_rate"][0] == 0
    assert min(mean for mean, _ in report.clients.values()) > 0.8


def test_chance_is_what_the_metric_gives_for_nothing():
    """The mean over clients of max(0.5, AUC) is above one half by chance, and the defence rate near one half."""
    report = membership_report(attack(4, 3.0, sizes=(8, 8, 8, 8)))
    assert report.auc.chance == pytest.approx(0.5, abs=0.03)
    assert 0.53 < report.fedvck["mean_auc"][1] < 0.65
    assert 0.35 < report.fedvck["defence_rate"][1] < 0.7
    assert report.fedvck["largest_auc"][1] > report.fedvck["mean_auc"][1]


def test_equal_seeds_give_equal_reports():
    assert membership_report(attack(5, 1.0)) == membership_report(attack(5, 1.0))


def pair(scores, members):
    """Two models of complementary halves, with the same scores of one cell."""
    scores, members = torch.tensor([scores, scores]), torch.tensor([members, [not one for one in members]])
    return Attacked(scores, members, torch.zeros(scores.shape[1], dtype=torch.int64))


def test_a_client_of_an_area_of_one_half_is_defended():
    report = membership_report({0: pair([1.0, 1.0, 1.0, 1.0], [True, False, True, False])})
    assert report.clients[0][0] == 0.5
    assert report.fedvck["defence_rate"] == (1.0, 1.0)
    assert report.fedvck["largest_auc"] == (0.5, 0.5)


def test_a_false_positive_rate_counts_up_to_its_end():
    """Of 100 that are no members one lies above all members but one: it is the 1 % that may."""
    scores = torch.cat([torch.tensor([9.0, 7.0]), torch.tensor([8.0]), torch.arange(99) / 100]).repeat(2, 1)
    members = (torch.arange(102) < 2).repeat(2, 1)
    report = membership_report({0: Attacked(scores, members, torch.zeros(102, dtype=torch.int64))})
    assert report.tpr["tpr_at_0.1_percent"].value == 0.5
    assert report.tpr["tpr_at_1_percent"].value == 1.0


def test_membership_is_permuted_within_the_cells_of_each_client():
    """Each cell is all members or none, in turn by client: no permutation changes anything."""
    attacked, cells, rng = {}, torch.tensor([0, 0, 1, 1]), torch.Generator().manual_seed(0)
    for client in range(3):
        members = torch.stack([cells == client % 2, cells != client % 2])
        attacked[client] = Attacked(torch.rand(2, 4, generator=rng), members, cells)
    auc = membership_report(attacked).auc
    assert (auc.chance, auc.chance_high) == pytest.approx((auc.value, auc.value))


@pytest.mark.parametrize("member", [True, False])
def test_members_alone_or_others_alone_are_refused(member):
    scores, members = torch.zeros(2, 3), torch.full((2, 3), member)
    with pytest.raises(ValueError, match="members and non-members"):
        membership_report({0: Attacked(scores, members, torch.zeros(3, dtype=torch.int64))})
