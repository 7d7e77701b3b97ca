"""Scores of clients right after their training."""

import pytest
from helpers.toy_federation import by_hand

from lit_fedad.contracts import Predictors
from lit_fedad.federation.sampling import ClientSampler


@pytest.fixture
def after_fit(toy):
    """The tiny method, of which clients are scored with what they have just trained: their weight and visits."""

    def make(**parts):
        federation = toy(**parts)
        federation.evaluator.after_fit = True
        return federation

    return make


def test_clients_are_scored_with_what_they_have_just_trained(after_fit):
    history = after_fit().run()
    for w, report in zip([0.0, *by_hand(2)], history, strict=True):
        second = 4 + 0.5**3 * (w - 4)
        assert report.trained == {
            0: (pytest.approx(w + 0.5 * (1 - w)), report.round), 1: (pytest.approx(second), report.round)
        }  # fmt: skip


def test_nobody_is_scored_who_trains_again_before_the_next_evaluation(after_fit):
    values = {client: [float(client)] for client in range(6)}
    parts = {"values": values, "sampler": ClientSampler(fraction=0.5), "rounds": 7}
    history = after_fit(**parts, evaluate_every=4).run()
    for due in ([1, 2, 3, 4], [5, 6, 7]):
        reports = [report for report in history if report.round in due]
        last = {client: report.round for report in reports for client in report.participants}
        assert [set(r.trained) for r in reports] == [
            {c for c, at in last.items() if at == r.round} for r in reports
        ]
        assert any(at < due[-1] for at in last.values())


def test_a_score_of_what_was_trained_leaves_no_trace(toy, after_fit, tmp_path):
    plain = toy(folder=tmp_path / "a").run()
    federation = after_fit(folder=tmp_path / "b")

    def deploy(which="own"):
        if federation.client.context.round <= federation.rounds:  # what predicts after the last round is kept
            federation.client.task.w.data.zero_()
            federation.client.visits = 0

    federation.client.deploy = deploy
    history = federation.run()
    assert all(report.trained == {0: (0.0, 0), 1: (0.0, 0)} for report in history)
    assert [r.scalars for r in history] == [r.scalars for r in plain]
    assert [federation.pool.get(client)["visits"] for client in (0, 1)] == [3, 3]


def test_without_a_model_of_its_own_no_client_is_scored(toy, after_fit, tmp_path, monkeypatch):
    federation = after_fit(folder=tmp_path / "a")
    monkeypatch.setattr(type(federation.client), "predictors", Predictors(own=False))
    assert [report.trained for report in federation.run()] == [{}, {}, {}]
    assert [report.trained for report in toy(folder=tmp_path / "b").run()] == [{}, {}, {}]


def test_who_fails_is_not_scored(after_fit):
    history = after_fit(fails={(2, 1)}, sampler=ClientSampler(on_failure="skip")).run()
    assert [set(report.trained) for report in history] == [{0, 1}, {0}, {0, 1}]


def test_scores_are_kept_in_the_checkpoint(after_fit):
    first = after_fit(rounds=2).run()
    again = after_fit(rounds=3).run()
    assert [report.trained for report in again[:2]] == [report.trained for report in first]
