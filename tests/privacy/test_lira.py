"""LiRA's scores against SciPy, example by example, and against scikit-learn."""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from lit_fedad.privacy.lira import CLAMP, confidence, membership_report, offline_scores, online_scores, roc


def draw(shadows: int, examples: int = 30, seed: int = 0):
    """phi of the attacked model and of shadow models, half of which were trained on each example; who is a member."""
    rng = np.random.default_rng(seed)
    members = np.arange(examples) < examples // 2
    inside = np.stack([rng.permutation(np.arange(shadows) < shadows // 2) for _ in range(examples)], axis=1)
    hardness = rng.normal(0, 3, examples)
    seen = hardness + 2 * inside + rng.normal(0, 1, (shadows, examples))
    phi = hardness + 2 * members + rng.normal(0, 1, examples)
    return torch.from_numpy(phi), torch.from_numpy(seen), torch.from_numpy(inside), torch.from_numpy(members)


def pooled_deviation(groups):
    """Of all observations around the mean of their group."""
    squares = sum(((group - group.mean()) ** 2).sum() for group in groups)
    return np.sqrt(squares / sum(len(group) - 1 for group in groups))


def test_confidence_is_the_logit_of_the_true_class():
    logits = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)) * 2
    labels = torch.arange(50) % 6
    log_p = log_softmax(logits.double().numpy(), axis=1)[np.arange(50), labels]
    np.testing.assert_allclose(confidence(logits, labels), log_p - np.log1p(-np.exp(log_p)), rtol=1e-10)


def test_confidence_is_clamped_where_probabilities_are_0_or_1_in_float32():
    phi = confidence(torch.tensor([[200.0, 0, 0], [200.0, 0, 0]]), torch.tensor([0, 1]))
    np.testing.assert_allclose(phi, [np.log(1 / CLAMP - 1), -np.log(1 / CLAMP - 1)])


@pytest.mark.parametrize("shadows", [8, 64])
def test_scores_are_scipys(shadows):
    phi, seen, inside, _ = draw(shadows)
    with_it = [seen[inside[:, i], i].numpy() for i in range(len(phi))]
    without = [seen[~inside[:, i], i].numpy() for i in range(len(phi))]
    if shadows < 64:
        sd_in, sd_out = [pooled_deviation(with_it)] * len(phi), [pooled_deviation(without)] * len(phi)
    else:
        sd_in, sd_out = [g.std(ddof=1) for g in with_it], [g.std(ddof=1) for g in without]
    online, offline = online_scores(phi, seen, inside), offline_scores(phi, seen, inside)
    for i, value in enumerate(phi.tolist()):
        out = norm(without[i].mean(), sd_out[i])
        expected = norm.logpdf(value, with_it[i].mean(), sd_in[i]) - out.logpdf(value)
        assert online[i].item() == pytest.approx(expected, rel=1e-9)
        assert offline[i].exp().item() == pytest.approx(out.cdf(value), rel=1e-9)


def test_missing_observations_leave_the_others_as_they_are():
    phi, seen, inside, _ = draw(8)
    holes = torch.cat([seen, torch.full((2, len(phi)), torch.nan)])
    more = torch.cat([inside, inside[:2]])
    torch.testing.assert_close(online_scores(phi, holes, more), online_scores(phi, seen, inside))
    torch.testing.assert_close(offline_scores(phi, holes, more), offline_scores(phi, seen, inside))


def test_an_example_that_lacks_one_side_has_no_score_and_is_left_out():
    phi, seen, inside, members = draw(8)
    inside[:, 3], inside[:, 20] = True, False
    online, offline = online_scores(phi, seen, inside), offline_scores(phi, seen, inside)
    assert online.isnan().nonzero().flatten().tolist() == [3, 20]
    assert offline.isnan().nonzero().flatten().tolist() == [3]
    kept = ~online.isnan()
    report = membership_report({0: online}, {0: members})
    assert report.examples == {0: 28}
    assert report.auc[0] == pytest.approx(roc_auc_score(members[kept], online[kept]))


def test_equal_shadow_models_do_not_divide_by_zero():
    """Where all are as sure as can be, the clamp leaves them no spread."""
    seen = torch.full((8, 4), 11.5)
    inside = torch.arange(8).unsqueeze(1).expand(8, 4) % 2 == 0
    assert online_scores(torch.tensor([11.5, 11.5, 2.0, -3.0]), seen, inside).isfinite().all()


def test_online_attack_finds_members_and_beats_a_threshold_on_confidence():
    phi, seen, inside, members = draw(32, examples=400)
    aucs = membership_report(
        {0: online_scores(phi, seen, inside), 1: offline_scores(phi, seen, inside), 2: phi},
        dict.fromkeys(range(3), members),
    ).auc
    assert aucs[0] > 0.85
    assert min(aucs[0], aucs[1]) > aucs[2] + 0.1


def test_report_by_hand():
    members = torch.tensor([True, True, False, False])
    found, guessed = torch.tensor([4.0, 2.0, 3.0, 1.0]), torch.tensor([1.0, 3.0, 2.0, 4.0])
    report = membership_report({0: found, 5: guessed}, {0: members, 5: members})
    assert report.auc == {0: 0.75, 5: 0.25}
    assert report.tpr == {0: 0.5, 5: 0.0}  # above every non-member
    assert (report.worst, report.mean, report.defence_rate) == (0.75, 0.625, 0.5)


def test_true_positive_rate_at_one_percent():
    scores = torch.cat([torch.arange(200.0) - 0.5, torch.arange(200.0) + 100])
    members = torch.arange(400) >= 200
    # Two of 200 non-members may be called members, 197.5 and 198.5: with them are members from 197 on, to 299.
    assert membership_report({0: scores}, {0: members}).tpr[0] == pytest.approx(103 / 200)


def test_roc_ends_in_both_corners():
    false, true = roc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([False, False, True, True]))
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
    assert np.trapezoid(true, false) == pytest.approx(0.75)


def test_a_client_with_nothing_to_compare_is_named():
    with pytest.raises(ValueError, match="client 7"):
        membership_report({7: torch.tensor([1.0, torch.nan])}, {7: torch.tensor([True, False])})
