"""LiRA on whole runs, small enough to be played in seconds."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from helpers.damage import forge
from helpers.shadowed import OVERFIT, TINY, Spy

from lit_fedad.audits.membership import LiraOptions, attack, infer
from lit_fedad.audits.membership_report import membership_report
from lit_fedad.audits.shadow_runs import ShadowRuns
from lit_fedad.cli import main as cli
from lit_fedad.cli import privacy
from lit_fedad.contracts.sums import HiddenByNoiseError
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.experiment.finished_run import reopen
from lit_fedad.experiment.train import train
from lit_fedad.federation.loop import Federation

pytestmark = pytest.mark.slow  # all look at one run and its six shadows
SHADOWS = 6


@pytest.fixture(scope="module")
def overfit(tmp_path_factory):
    """Folder of a run that learns its few images by heart."""
    out = tmp_path_factory.mktemp("overfit") / "run"
    train(compose([*TINY, *OVERFIT, "data.train_per_class=4", f"out={out}"]), quiet=True)
    return out


@dataclass
class Audited:
    run: Path
    findings: list[dict]
    spy: Spy

    def of(self, side, statistic="all"):
        """The report of one statistic."""
        return next(f["report"] for f in self.findings if (f["side"], f["statistic"]) == (side, statistic))


@pytest.fixture(scope="module")
def audited(overfit):
    watching, original = Spy(), Federation.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Federation, "run", lambda self: watching.run(self, original))
        findings = infer(reopen(str(overfit)), LiraOptions(shadows=SHADOWS, share=1.0)).content["findings"]
        return Audited(overfit, findings, watching)


def shadows_of(run: Path):
    """The runs' shadows, and what each of them showed."""
    shadows = ShadowRuns(reopen(str(run)), run / "privacy" / "lira", 1.0, 0)
    return shadows, [shadows.play(n, lambda *_: None) for n in range(SHADOWS)]


def test_members_of_an_overfit_run_are_told(audited):
    report = audited.of("sent")
    assert report["auc"]["value"] > 0.8
    assert report["auc"]["low"] > report["auc"]["chance_high"]
    assert report["fedvck"]["mean_auc"][0] > report["fedvck"]["mean_auc"][1]
    assert report["examples"] == {0: 12, 1: 12}
    assert audited.of("sent", "predictor: confidence or image score")["auc"]["value"] > 0.8


def test_each_statistic_is_reported_and_all_of_them_together(audited):
    assert [(found["side"], found["statistic"]) for found in audited.findings] == [
        ("sent", "update: direction of the last layer"),
        ("sent", "update: 2 exchanges"),
        ("sent", "predictor: confidence or image score"),
        ("sent", "predictor: 2 exchanges"),
        ("sent", "all"),
        ("received", "predictor: confidence or image score"),
        ("received", "predictor: 2 exchanges"),
        ("received", "all"),
    ]


def test_files(audited):
    written = json.loads((audited.run / "privacy" / "lira.json").read_text())
    report = audited.of("sent")
    assert written["sent_auc"] == report["auc"]["value"]
    assert written["sent_auc_chance"] == report["auc"]["chance"]
    assert written["received_tpr_at_1_percent"] == audited.of("received")["tpr"]["tpr_at_1_percent"]["value"]
    assert (written["shadows"], written["rounds"]) == (SHADOWS, 2)
    assert written["findings"][4]["report"]["clients"]["0"][0] == report["clients"][0][0]
    assert (audited.run / "figures" / "lira.png").stat().st_size
    left = sorted(p.parent.name for p in audited.run.rglob("seen.pt"))
    assert left == [f"shadow_{n}" for n in range(SHADOWS)]
    assert not [*(audited.run / "privacy").rglob("checkpoints")]


def test_shadow_runs_hold_half_of_the_examples(audited):
    truth = json.loads((audited.run / "partition.json").read_text())["clients"]
    held = audited.spy.held
    for client in range(2):
        rows = [held[f"shadow_{n}"][client] for n in range(SHADOWS)]
        assert {len(row) for row in rows} == {len(truth[client]) - 6}  # of twelve examples
        times = Counter(i for row in rows for i in row)
        assert Counter(times.values()) == {SHADOWS: len(truth[client]) - 12, SHADOWS // 2: 12}
        assert set(truth[client]) == set(times)


def test_models_that_saw_no_example_tell_nobody(audited):
    """A pair of shadow runs is made to one that saw no example: each of it the run without the example."""
    shadows, observed = shadows_of(audited.run)
    for client in shadows.clients:
        trained = shadows.trained_on(client, range(SHADOWS))
        for exchange in observed[0]["sent"].values():
            assert exchange[client]["predictor"].shape == (12, 1)
        for pair in range(0, SHADOWS, 2):
            for exchange in observed[pair]["sent"]:
                for kind in ("predictor", "update"):
                    first, second = (observed[n]["sent"][exchange][client][kind] for n in (pair, pair + 1))
                    blind = torch.where(trained[pair].unsqueeze(1), second, first)
                    observed[pair]["sent"][exchange][client][kind] = blind
                    observed[pair + 1]["sent"][exchange][client][kind] = blind.clone()
    found = attack(shadows, {n: one["sent"] for n, one in enumerate(observed)})["all"]
    assert abs(membership_report(found).auc.value - 0.5) < 0.2


def test_a_pair_of_which_noise_hid_one_is_left_out_and_another_takes_its_place(
    audited, tmp_path, monkeypatch
):
    shutil.copytree(audited.run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/privacy/lira/shadow_3")
    played, run, merge = [], Federation.run, Federation._merge

    def count(federation):
        played.append(federation.checkpoints.folder.parent.name)
        run(federation)

    def hide(federation, *updates):
        if played[-1] == "shadow_3":
            raise HiddenByNoiseError
        return merge(federation, *updates)

    monkeypatch.setattr(Federation, "run", count)
    monkeypatch.setattr(Federation, "_merge", hide)
    options = LiraOptions(shadows=SHADOWS, share=1.0)
    findings = infer(reopen(str(tmp_path / "run")), options).content["findings"]
    assert played == ["shadow_3", "shadow_6", "shadow_7"]
    assert json.loads((tmp_path / "run/privacy/lira.json").read_text())["pairs_left_out"] == 1
    assert findings[4]["report"]["auc"]["value"] > 0.8
    assert findings != audited.findings
    # The hidden one is not played again.
    assert infer(reopen(str(tmp_path / "run")), options).content["findings"] == findings
    assert len(played) == 3


def test_an_attack_of_which_too_much_is_hidden_ends_in_one_line(overfit, tmp_path, monkeypatch):
    def hide(federation):
        raise HiddenByNoiseError

    monkeypatch.setattr(Federation, "run", hide)
    with pytest.raises(UserError, match="lira: the noise hides .* too many shadow runs: 0 of 12 are left"):
        infer(reopen(str(overfit)), LiraOptions(shadows=SHADOWS, share=1.0, out=str(tmp_path)))


def test_interrupted_audit_goes_on_where_it_stopped(audited, tmp_path, monkeypatch):
    play, played = Federation.play, []

    def watched(self, round):
        played.append((self.checkpoints.folder.parent.name, round))
        return play(self, round)

    def cut(self, round):
        if (self.checkpoints.folder.parent.name, round) == ("shadow_4", 2):
            raise KeyboardInterrupt
        return watched(self, round)

    options = LiraOptions(shadows=SHADOWS, share=1.0, out=str(tmp_path))
    monkeypatch.setattr(Federation, "play", cut)
    with pytest.raises(KeyboardInterrupt):
        infer(reopen(str(audited.run)), options)
    assert not (tmp_path / "privacy" / "lira.json").exists()
    monkeypatch.setattr(Federation, "play", watched)
    findings = infer(reopen(str(audited.run)), options).content["findings"]
    assert played[-3:] == [("shadow_4", 2), ("shadow_5", 1), ("shadow_5", 2)]
    assert len(played) == 2 * SHADOWS
    assert findings == audited.findings


def test_uploads_without_content_are_refused_after_one_round(tmp_path, monkeypatch):
    train(compose([*TINY, "method=local", "rounds=2", f"out={tmp_path / 'run'}"]), quiet=True)
    rounds, play = [], Federation.play
    monkeypatch.setattr(Federation, "play", lambda self, n: (rounds.append(n), play(self, n))[1])
    with pytest.raises(UserError, match="LocalClient: what its clients send scores no image"):
        infer(reopen(str(tmp_path / "run")), LiraOptions())
    assert rounds == [1]


@pytest.mark.parametrize("shadows", [3, 7, 4, 0])
def test_too_few_shadows_and_odd_numbers_are_refused(shadows):
    with pytest.raises(UserError, match=f"shadows={shadows}: give an even number, at least 6"):
        LiraOptions(shadows=shadows)


def test_shadow_runs_of_other_options_are_refused(audited):
    with pytest.raises(UserError, match="shadow_0: of another run, or of other options"):
        infer(reopen(str(audited.run)), LiraOptions(share=1.0, seed=1))


def test_runs_that_cannot_be_attacked(audited, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(audited.run, copy, ignore=shutil.ignore_patterns("privacy"))
    config = yaml.safe_load((copy / "config.yaml").read_text())
    config["fabric"]["devices"] = 2
    forge(copy, "config.yaml", yaml.safe_dump(config))
    with pytest.raises(UserError, match="several processes; attack one with fabric.devices=1"):
        infer(reopen(str(copy)), LiraOptions())
    (copy / "result.json").unlink()
    with pytest.raises(UserError, match="the run is not complete"):
        infer(reopen(str(copy)), LiraOptions())


def test_command(audited, capsys, monkeypatch):
    command = ["privacy", f"run={audited.run}", "attack=lira", f"shadows={SHADOWS}", "share=1.0"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "uploads: each client's own" in out
    auc = audited.of("sent")["auc"]
    assert f"{auc['value']:.3f} [{auc['low']:.3f}, {auc['high']:.3f}] ({auc['chance']:.3f}, " in out
    assert cli.main([*command, "rounds.x=4"]) == 2
    assert "'rounds.x' cannot be given for a trained run" in capsys.readouterr().err

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(privacy, "infer", stop)
    assert cli.main(command) == 130
    assert "the same command continues" in capsys.readouterr().err
