"""LiRA's scores against SciPy, example by example."""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from scipy.stats import multivariate_normal, norm
from sklearn.metrics import roc_auc_score

from lit_fedad.audits.lira import confidence, exchangeable_scores, likelihood_ratios


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


def test_confidence_keeps_the_digits_where_probabilities_round_to_0_and_1():
    phi = confidence(torch.tensor([[200.0, 0, 0], [200.0, 0, 0]]), torch.tensor([0, 1]))
    np.testing.assert_allclose(phi, [200 - np.log(2), -200], rtol=1e-12)


@pytest.mark.parametrize("shadows", [8, 64])
def test_scores_are_scipys(shadows):
    phi, seen, inside, _ = draw(shadows)
    with_it = [seen[inside[:, i], i].numpy() for i in range(len(phi))]
    without = [seen[~inside[:, i], i].numpy() for i in range(len(phi))]
    if shadows < 64:
        sd_in, sd_out = [pooled_deviation(with_it)] * len(phi), [pooled_deviation(without)] * len(phi)
    else:
        sd_in, sd_out = [g.std(ddof=1) for g in with_it], [g.std(ddof=1) for g in without]
    found = likelihood_ratios(phi, seen, inside)
    for i, value in enumerate(phi.tolist()):
        out = norm(without[i].mean(), sd_out[i])
        expected = norm.logpdf(value, with_it[i].mean(), sd_in[i]) - out.logpdf(value)
        assert found[i].item() == pytest.approx(expected, rel=1e-9)


def test_missing_observations_leave_the_others_as_they_are():
    phi, seen, inside, _ = draw(8)
    holes = torch.cat([seen, torch.full((2, len(phi)), torch.nan)])
    more = torch.cat([inside, inside[:2]])
    torch.testing.assert_close(likelihood_ratios(phi, holes, more), likelihood_ratios(phi, seen, inside))


def test_an_example_that_lacks_one_side_has_no_score():
    phi, seen, inside, _ = draw(8)
    inside[:, 3], inside[:, 20] = True, False
    assert likelihood_ratios(phi, seen, inside).isnan().nonzero().flatten().tolist() == [3, 20]


def test_equal_shadow_models_do_not_divide_by_zero():
    seen = torch.full((8, 4), 11.5)
    inside = torch.arange(8).unsqueeze(1).expand(8, 4) % 2 == 0
    assert likelihood_ratios(torch.tensor([11.5, 11.5, 2.0, -3.0]), seen, inside).isfinite().all()
    twice = torch.stack([seen + torch.arange(8.0).unsqueeze(1)] * 2, -1)
    assert likelihood_ratios(twice[0], twice, inside).isfinite().all()


def test_the_attack_finds_members_and_beats_a_threshold_on_confidence():
    phi, seen, inside, members = draw(32, examples=400)
    reached, threshold = (
        roc_auc_score(members, score) for score in (likelihood_ratios(phi, seen, inside), phi)
    )
    assert reached > max(0.85, threshold + 0.1)


def test_several_statistics_are_one_gaussian_of_several_dimensions():
    """Up to the shrinkage of correlations by a thousandth."""
    shadows, examples = 64, 12
    rng = np.random.default_rng(1)
    inside = torch.from_numpy(np.stack([rng.permutation(shadows) % 2 == 0 for _ in range(examples)], 1))
    mixing = np.array([[1.0, 0.6], [0.0, 2.0]])
    seen = torch.from_numpy(rng.normal(size=(shadows, examples, 2)) @ mixing) + inside.unsqueeze(-1)
    phi = torch.from_numpy(rng.normal(size=(examples, 2)) @ mixing)
    scores = likelihood_ratios(phi, seen, inside)
    for i in range(examples):
        logs = []
        for side in (inside[:, i], ~inside[:, i]):
            own = seen[side, i].numpy()
            covariance = np.cov(own.T)
            covariance[[0, 1], [1, 0]] *= 0.999
            logs.append(multivariate_normal(own.mean(0), covariance).logpdf(phi[i].numpy()))
        assert scores[i].item() == pytest.approx(logs[0] - logs[1], rel=1e-6, abs=1e-9)


def test_each_shadow_model_is_attacked_without_its_pair():
    _, seen, inside, _ = draw(8)
    scores = exchangeable_scores(seen, inside)
    for model in range(8):
        others = [k for k in range(8) if k // 2 != model // 2]
        expected = likelihood_ratios(seen[model], seen[others], inside[others])
        torch.testing.assert_close(scores[model], expected)
