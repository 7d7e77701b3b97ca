"""A run that was interrupted and started again ends like one that was not, bit for bit."""

from __future__ import annotations

import pytest
from helpers.strict_json import strict_json

from lit_fedad.deployment.update import UpdateOptions, update
from lit_fedad.federation.checkpoint import Checkpoints
from lit_fedad.federation.loop import Federation
from lit_fedad.methods.feddymem import FedDyMemClient


class PowerCut(BaseException):
    """Nothing in the program expects it."""


@pytest.mark.parametrize(
    ("method", "owner", "step", "round"),
    [
        pytest.param("federated_bank", Federation, "play", 2, id="between-rounds", marks=pytest.mark.slow),
        pytest.param(
            "federated_bank",
            Checkpoints,
            "commit",
            2,
            id="while-writing-the-checkpoint",
            marks=pytest.mark.slow,
        ),
        pytest.param("federated_bank", Federation, "play", 0, id="in-the-set-up", marks=pytest.mark.slow),
        pytest.param("local", Checkpoints, "commit", 2, id="local", marks=pytest.mark.slow),
    ],
)
def test_interrupted_run_ends_like_an_uninterrupted_one(
    lab, tmp_path, monkeypatch, differences, outcome, method, owner, step, round
):
    straight, expected = lab.finished(f"method={method}")
    original = getattr(owner, step)

    def cut(self, number, *rest):
        if number == round:
            raise PowerCut
        return original(self, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, cut)
        with pytest.raises(PowerCut):
            lab.train(tmp_path / "run", f"method={method}")
    assert not (tmp_path / "run" / "result.json").exists()
    played = []
    play = Federation.play
    monkeypatch.setattr(Federation, "play", lambda self, n: (played.append(n), play(self, n))[1])
    result = lab.train(tmp_path / "run", f"method={method}")
    assert played == list(range(round, 3))
    assert differences(outcome(result), outcome(expected)) == []
    assert differences(lab.state(tmp_path / "run"), lab.state(straight)) == []


@pytest.mark.slow
def test_client_that_fails_after_training_leaves_no_trace(lab, tmp_path, monkeypatch, differences, outcome):
    """Its optimiser must be the old one, in memory as on disk: else a resumed run would differ."""
    send = FedDyMemClient.send

    def fails_once(self, loader):
        if (self.context.round, self.context.client) == (2, 1):
            raise RuntimeError("out of memory")
        return send(self, loader)

    monkeypatch.setattr(FedDyMemClient, "send", fails_once)
    overrides = ("federation.sampler.on_failure=skip", "rounds=3", "evaluation.pictures=1")
    expected = lab.train(tmp_path / "straight", *overrides)
    with monkeypatch.context() as patch:
        play = Federation.play
        patch.setattr(Federation, "play", lambda self, n: _cut_at(3, n) or play(self, n))
        with pytest.raises(PowerCut):
            lab.train(tmp_path / "run", *overrides)
    result = lab.train(tmp_path / "run", *overrides)
    assert differences(outcome(result), outcome(expected)) == []
    assert differences(lab.state(tmp_path / "run"), lab.state(tmp_path / "straight")) == []
    assert (tmp_path / "run" / "figures" / "heatmaps.png").stat().st_size


def _cut_at(round: int, number: int) -> None:
    if number == round:
        raise PowerCut


@pytest.mark.slow
def test_a_complete_run_with_another_promise_is_judged_anew_and_not_trained(lab, tmp_path):
    out = tmp_path / "run"
    before = lab.train(out, "rounds=1", "evaluation.alpha=0.01")
    states = {path: path.read_bytes() for path in (out / "checkpoints").rglob("*.pt")}
    after = lab.train(out, "rounds=1", "evaluation.alpha=0.5")
    assert (list(before["decisions"]), list(after["decisions"])) == (["0.01"], ["0.5"])
    assert after["last"]["miss_rate"]["mean"] < before["last"]["miss_rate"]["mean"] == 1
    assert after["metrics"] == before["metrics"]
    assert after["seconds_per_round"] == before["seconds_per_round"]  # those of the rounds that were played
    assert {path: path.read_bytes() for path in (out / "checkpoints").rglob("*.pt")} == states
    assert lab.train(out, "rounds=1", "evaluation.alpha=0.5") == after


@pytest.mark.slow
def test_errors_by_thresholds_are_those_of_the_promise_by_which_a_run_is_judged_last(
    lab, small_tasks, tmp_path
):
    given = ["method=centralised", *small_tasks["feature_neighbours"], "~partition.clients"]
    earlier = lab.train(tmp_path / "run", *given, "evaluation.alpha=0.5")["last"]
    last = lab.train(tmp_path / "run", *given, "evaluation.alpha=0.1")["last"]
    assert last["me_calibrated"] != earlier["me_calibrated"]
    assert last == lab.train(tmp_path / "straight", *given, "evaluation.alpha=0.1")["last"]
    version = update(UpdateOptions(str(tmp_path / "run"), alpha=0.5))
    names = strict_json(version / "result.json")["last"]
    assert [name for name in names if "calibrated" in name or "rate" in name] == []


@pytest.mark.slow
def test_files_of_a_judgement_that_was_cut_do_not_stay_beside_those_of_the_one_before(
    lab, tmp_path, monkeypatch
):
    def cut(*_):
        raise PowerCut

    def judged_by(alpha):
        lab.train(tmp_path, "rounds=1", "evaluation.pictures=1", f"evaluation.alpha={alpha}")
        return (tmp_path / "figures" / "scores.png").read_bytes()

    before = judged_by(0.1)
    with monkeypatch.context() as patch:
        patch.setattr("lit_fedad.experiment.train.summarise_run", cut)
        with pytest.raises(PowerCut):
            judged_by(0.5)
    assert (tmp_path / "figures" / "scores.png").read_bytes() != before
    assert judged_by(0.1) == before


@pytest.mark.slow
def test_rates_that_are_nearly_the_same_are_both_judged(lab, tmp_path):
    result = lab.train(tmp_path / "run", "rounds=1", "evaluation.alpha=[0.5,0.50000001]")
    assert list(result["decisions"]) == ["0.5", "0.50000001"]
