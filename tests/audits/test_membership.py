"""LiRA on whole runs, small enough to be played in seconds."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import yaml
from helpers.damage import forge

from lit_fedad.audits import membership as membership_audit
from lit_fedad.audits.membership import LiraOptions, ShadowRuns, attack, infer
from lit_fedad.cli import main as cli
from lit_fedad.config import compose
from lit_fedad.contracts.kept_state import read_kept
from lit_fedad.errors import UserError
from lit_fedad.experiment.finished_run import reopen
from lit_fedad.experiment.train import train
from lit_fedad.federation.loop import Federation
from lit_fedad.privacy.lira import MembershipReport, membership_report
from lit_fedad.privacy.shadow_splits import trained_on

SHADOWS = 4
# Two clients with ten images each, 16 pixels wide: a network learns by heart sooner than it learns the classes.
TINY = [
    *("data=motif_classes", "data.train_per_class=2", "data.test_per_class=2", "data.size=16"),
    *("image.size=16", "image.resize=null", "backbone=null", "partition=iid", "partition.clients=2"),
    *("task=classifier_convnet", "encoder.channels=8", "task.augment=false", "batch_size=5"),
    *("evaluation.every=9", "evaluation.pictures=0", "tracking=off", "fabric.accelerator=cpu"),
]
OVERFIT = ("method=fedavg", "rounds=2", "method.client.local_epochs=15", "task.learning_rate=0.02")


@dataclass
class Spy:
    """What federations held and ended with, by the name of their folder."""

    held: dict[str, list[list[int]]] = field(default_factory=dict)
    ended: dict[str, dict] = field(default_factory=dict)

    def run(self, federation: Federation, original):
        name = federation.checkpoints.folder.parent.name
        self.held[name] = [list(own) for own in federation.data.partition]
        result = original(federation)
        self.ended[name] = read_kept(federation.server)
        return result


@pytest.fixture
def spy(monkeypatch):
    watching, original = Spy(), Federation.run
    monkeypatch.setattr(Federation, "run", lambda self: watching.run(self, original))
    return watching


@pytest.fixture(scope="module")
def overfit(tmp_path_factory):
    """Folder of a run that learns its few images by heart."""
    out = tmp_path_factory.mktemp("overfit") / "run"
    train(compose([*TINY, *OVERFIT, f"out={out}"]), quiet=True)
    return out


@dataclass
class Audited:
    run: Path
    report: MembershipReport
    spy: Spy


@pytest.fixture(scope="module")
def audited(overfit):
    watching, original = Spy(), Federation.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Federation, "run", lambda self: watching.run(self, original))
        return Audited(overfit, infer(reopen(str(overfit)), LiraOptions(shadows=SHADOWS)), watching)


def observations(run: Path, home: Path | None = None):
    """The runs' shadows, phi of the attacked run, and of every shadow run."""
    shadows = ShadowRuns(reopen(str(run)), (home or run) / "privacy" / "lira", 0)
    phi, *observed = (shadows.play(n, lambda *_: None) for n in (None, *range(SHADOWS)))
    return shadows, phi, observed


def test_members_of_an_overfit_run_are_told(audited):
    assert audited.report.mean > 0.8
    assert audited.report.defence_rate == 0
    assert audited.report.examples == {0: 20, 1: 20}


def test_files(audited):
    written = json.loads((audited.run / "privacy" / "lira.json").read_text())
    assert written["auc"] == {str(client): auc for client, auc in audited.report.auc.items()}
    assert written["max_auc"] == max(written["auc"].values())
    assert written["looks_at"] == "confidence"
    assert (written["shadows"], written["mode"], written["round"]) == (SHADOWS, "online", 2)
    assert (audited.run / "figures" / "lira.png").stat().st_size
    left = sorted(
        p.relative_to(audited.run / "privacy" / "lira").as_posix() for p in audited.run.rglob("phi.pt")
    )
    assert left == [*(f"shadow_{n}/phi.pt" for n in range(SHADOWS)), "target/phi.pt"]
    assert not [*(audited.run / "privacy").rglob("checkpoints")]


def test_attacked_run_is_played_again_bit_for_bit(audited):
    (last,) = (audited.run / "checkpoints").glob("round_*")
    server = torch.load(last / "server.pt")["server"]
    torch.testing.assert_close(audited.spy.ended["target"], server, rtol=0, atol=0)
    assert any(
        (audited.spy.ended["shadow_0"]["weights"][name] != value).any()
        for name, value in server["weights"].items()
    )


def test_shadow_runs_hold_half_of_the_examples(audited):
    truth = json.loads((audited.run / "partition.json").read_text())["clients"]
    held = audited.spy.held
    assert held["target"] == truth
    for client in range(2):
        rows = [held[f"shadow_{n}"][client] for n in range(SHADOWS)]
        assert {len(row) for row in rows} == {len(truth[client])}
        times = Counter(i for row in rows for i in row)
        assert set(times.values()) == {SHADOWS // 2}
        assert len(times) == 20
        assert set(truth[client]) < set(times)
    everybody = [i for n in range(SHADOWS) for i in set(held[f"shadow_{n}"][0]) & set(held[f"shadow_{n}"][1])]
    assert everybody == []


def test_models_that_saw_no_example_tell_nobody(audited):
    """phi of each example from a shadow run without it, on which the Gaussians are not fitted."""
    shadows, phi, observed = observations(audited.run)
    assert infer(reopen(str(audited.run)), LiraOptions(shadows=SHADOWS)) == audited.report
    unseen, last = {}, SHADOWS - 2
    for client in phi:
        parts = [shadows.chosen(last), shadows.chosen(last + 1)]
        rows = [observed[last][client], observed[last + 1][client]]
        examples = shadows.examples(client)
        unseen[client] = torch.stack([rows[int(i in parts[0])][n] for n, i in enumerate(examples)])
        assert not any(i in parts[int(i in parts[0])] for i in examples)
    scores, members = attack(shadows, unseen, observed[:last], "online")
    blind = membership_report({0: torch.cat([*scores.values()])}, {0: torch.cat([*members.values()])})
    assert abs(blind.auc[0] - 0.5) < 0.2
    scores, members = attack(shadows, phi, observed, "online")
    both, truth = torch.cat([*scores.values()]), torch.cat([*members.values()])
    shuffled = truth[torch.randperm(len(truth), generator=torch.Generator().manual_seed(0))]
    assert membership_report({0: both}, {0: truth}).auc[0] > 0.8
    assert abs(membership_report({0: both}, {0: shuffled}).auc[0] - 0.5) < 0.2


def test_complete_shadow_runs_serve_the_offline_attack(audited, spy, tmp_path):
    shutil.copytree(audited.run, tmp_path / "run")
    report = infer(reopen(str(tmp_path / "run")), LiraOptions(shadows=SHADOWS, mode="offline"))
    assert spy.held == {}
    assert report.mean > 0.8
    assert report != audited.report


@pytest.mark.slow
def test_interrupted_audit_goes_on_where_it_stopped(audited, tmp_path, monkeypatch):
    play, played = Federation.play, []

    def watched(self, round):
        played.append((self.checkpoints.folder.parent.name, round))
        return play(self, round)

    def cut(self, round):
        if (self.checkpoints.folder.parent.name, round) == ("shadow_1", 2):
            raise KeyboardInterrupt
        return watched(self, round)

    options = LiraOptions(shadows=SHADOWS, out=str(tmp_path))
    monkeypatch.setattr(Federation, "play", cut)
    with pytest.raises(KeyboardInterrupt):
        infer(reopen(str(audited.run)), options)
    assert not (tmp_path / "privacy" / "lira.json").exists()
    monkeypatch.setattr(Federation, "play", watched)
    report = infer(reopen(str(audited.run)), options)
    assert played[5:] == [("shadow_1", 2), ("shadow_2", 1), ("shadow_2", 2), ("shadow_3", 1), ("shadow_3", 2)]
    assert report == audited.report


def test_uploads_without_content_are_refused_after_one_round(tmp_path, spy, monkeypatch):
    train(compose([*TINY, "method=local", "rounds=2", f"out={tmp_path / 'run'}"]), quiet=True)
    rounds, play = [], Federation.play
    monkeypatch.setattr(Federation, "play", lambda self, n: (rounds.append(n), play(self, n))[1])
    with pytest.raises(UserError, match="LocalClient: what its clients send scores no image"):
        infer(reopen(str(tmp_path / "run")), LiraOptions())
    assert rounds == [1]


@pytest.mark.parametrize("shadows", [3, 5, 2, 0])
def test_too_few_shadows_and_odd_numbers_are_refused(shadows):
    with pytest.raises(UserError, match=f"shadows={shadows}: give an even number, at least 4"):
        LiraOptions(shadows=shadows)


def test_shadow_runs_of_another_seed_are_refused(audited):
    with pytest.raises(UserError, match="target: attacked with another seed"):
        infer(reopen(str(audited.run)), LiraOptions(shadows=4, seed=1))


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
    command = ["privacy", f"run={audited.run}", "attack=lira", f"shadows={SHADOWS}"]
    assert cli.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "client     AUC   TPR at 1 % FPR   examples" in lines
    assert f"0   {audited.report.auc[0]:.3f}   " in next(
        line for line in lines if line.strip().startswith("0")
    )
    assert cli.main([*command, "rounds.x=4"]) == 2
    assert "'rounds.x' cannot be given for a trained run" in capsys.readouterr().err

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(membership_audit, "infer", stop)
    assert cli.main(command) == 130
    assert "the same command continues" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*RANDOM weights")
def test_uploaded_banks_of_feddymem_are_attacked(tiny_run, tmp_path, spy):
    options = LiraOptions(shadows=4, out=str(tmp_path))
    report = infer(reopen(str(tiny_run)), options)
    written = json.loads((tmp_path / "privacy" / "lira.json").read_text())
    assert written["looks_at"] == "negative image score"
    assert set(report.auc) == {0, 1}
    assert all(0 <= auc <= 1 for auc in report.auc.values())
    (last,) = (tiny_run / "checkpoints").glob("round_*")
    server = torch.load(last / "server.pt")["server"]
    torch.testing.assert_close(spy.ended["target"]["known"], server["known"], rtol=0, atol=0)
    phi = torch.load(tmp_path / "privacy" / "lira" / "target" / "phi.pt")["phi"]
    assert all(len(own.unique()) == len(own) == report.examples[client] for client, own in phi.items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*RANDOM weights")
def test_fedavg_shares_no_bank_to_score_with(tmp_path):
    overrides = [
        "debug=seconds",
        "method=fedavg",
        "tracking=off",
        "cache.enabled=false",
        f"out={tmp_path / 'run'}",
    ]
    train(compose([*overrides, f"data.root={tmp_path / 'data'}"]), quiet=True)
    with pytest.raises(UserError, match="FedAvgClient: what its clients send scores no image"):
        infer(reopen(str(tmp_path / "run")), LiraOptions())


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["fedavg", "fedprox", "scaffold", "fedbn", "fedrep", "moon", "dbe", "apfl", "apple"]
)
def test_methods_that_share_weights(tmp_path, method):
    train(compose([*TINY, f"method={method}", "rounds=2", f"out={tmp_path}"]), quiet=True)
    report = infer(reopen(str(tmp_path)), LiraOptions(shadows=4))
    assert set(report.auc) == {0, 1}


@pytest.mark.slow
def test_some_clients_in_some_rounds(tmp_path, spy):
    """The same clients upload last in every shadow run."""
    some = ("federation.sampler.fraction=0.5", "rounds=3", "partition.clients=4")
    train(compose([*TINY, *OVERFIT, *some, f"out={tmp_path}"]), quiet=True)
    report = infer(reopen(str(tmp_path)), LiraOptions(shadows=4))
    kept = [torch.load(file)["phi"] for file in tmp_path.rglob("phi.pt")]
    assert len(report.auc) == 2
    assert all(set(phi) == set(report.auc) for phi in kept)
    (last,) = (tmp_path / "checkpoints").glob("round_*")
    server = torch.load(last / "server.pt")["server"]
    torch.testing.assert_close(spy.ended["target"], server, rtol=0, atol=0)


@pytest.mark.slow
def test_images_that_come_task_after_task(tmp_path, spy):
    """A held-out image comes when the member comes that it stands for: every task keeps its classes."""
    stream = [
        *(
            "method=gldp",
            "experiment=gldp_small",
            "data.train_per_class=6",
            "data.test_per_class=3",
            "data.size=16",
            "image.size=16",
        ),
        *("partition.clients=2", "partition.stages=2", "partition.imbalance=2", "rounds=2", "batch_size=8"),
        *("method.client.base_epochs=2", "method.client.head_epochs=3", "encoder.channels=4"),
        *("evaluation.pictures=0", "tracking=off", "fabric.accelerator=cpu"),
    ]
    train(compose([*stream, f"out={tmp_path}"]), quiet=True)
    report = infer(reopen(str(tmp_path)), LiraOptions(shadows=4))
    assert set(report.auc) == {0, 1}
    tasks = json.loads((tmp_path / "partition.json").read_text())["stages"]
    attacked = reopen(str(tmp_path))
    shadows = ShadowRuns(attacked, tmp_path / "privacy" / "lira", 0)
    products = [sample.category for sample in shadows.images.train]
    for shadow in range(4):
        now = trained_on(tasks, shadows.cells, shadows.chosen(shadow))
        assert [sorted({i for task in own for i in task}) for own in now] == [
            sorted(own) for own in spy.held[f"shadow_{shadow}"]
        ]
        for own, then in zip(now, tasks, strict=True):
            for task, real in zip(own, then, strict=True):
                assert Counter(products[i] for i in task) == Counter(products[i] for i in real)
