"""A federation of sites ends with the digits of the same federation in one process."""

import csv
import json
import shutil

import pytest
import torch
from helpers.nightly import by_method
from helpers.sites import (
    DEBUG,
    HERE,
    NAMES,
    OF_FILES,
    Here,
    comparable,
    coordinated,
    in_one_process,
    paint,
    three_sites,
    told,
)

from lit_fedad.cli.main import main
from lit_fedad.contracts.state import state_of
from lit_fedad.core.errors import UserError
from lit_fedad.deployment.export import export
from lit_fedad.deployment.predict import predict
from lit_fedad.deployment.watch import watch
from lit_fedad.evaluation.predict import image_scores
from lit_fedad.experiment.finished_run import reopen
from lit_fedad.federation.evaluator import LocalQuery
from lit_fedad.federation.loop import Federation
from lit_fedad.papers.page import report_runs
from lit_fedad.report.console import Display
from lit_fedad.sites.coordinator import Plan, coordinate
from lit_fedad.sites.messages import Request
from lit_fedad.sites.remote import NoReply
from lit_fedad.sites.status import read_status
from lit_fedad.tracking.reading import tracked_runs


@pytest.mark.slow
@pytest.mark.parametrize("method", by_method(["federated_patchcore", *OF_FILES]))
def test_sites_and_one_process_end_alike(tmp_path, differences, method):
    words = [f"method={method}", *DEBUG]
    # To fewer channels one of the products is so unlike the others that its site is left out.
    if method == "feddymem":
        words.append("backbone=resnet18")
    products = paint(tmp_path)
    plan = Plan(words, NAMES, str(tmp_path / "run"), ("fabric.accelerator=cpu",))
    result, there = coordinated(plan, Here(three_sites(tmp_path)))
    run = in_one_process(tmp_path, words, products)
    assert differences(state_of(there.server), state_of(run.federation.server)) == []
    assert told(there.history) == told(run.federation.history)
    for name, compared in (("result.json", comparable), ("calibration.json", dict)):
        of_sites, of_one = ((tmp_path / place / name).read_text() for place in ("run", "one"))
        assert differences(compared(json.loads(of_sites)), compared(json.loads(of_one))) == []
    assert result["sites"] == {
        name: {"client": client, "products": {product: 8}}
        for client, (name, product) in enumerate(zip(NAMES, products, strict=True))
    }
    assert [own["rounds"] for own in result["status"].values()] == [result["rounds"]] * 3
    assert all(own["seconds"] > 0 and own["last_seen"] for own in result["status"].values())
    check_new_images(tmp_path, run)


def check_new_images(folder, run):
    """A folder scores new images as the run in one process does: the coordinator's, or the site's whose model it is."""
    images = run.local.images.test
    new, there = folder / "all" / images[0].category / "test" / "good", str(folder / "run")
    if not run.model.client.predictors.shared:
        for use in (
            lambda: predict(there, str(new)),
            lambda: export(there),
            lambda: watch(there, str(new), once=True),
        ):
            with pytest.raises(
                UserError, match="each site predicts with a model of its own, which stays at the site"
            ):
                use()
        (own,) = (folder / NAMES[1] / "detectors").iterdir()
        there = str(own)
    table = predict(there, str(new), client=1)
    with table.open() as file:
        found = {row["path"]: float(row["score"]) for row in csv.DictReader(file)}
    loader = run.local.module.test_dataloader()
    scores = run.federation.ask(
        run.federation.rounds,
        LocalQuery("image scores", lambda client, _: image_scores(client, loader, run.fabric)),
    )
    known = {str(sample.path): float(score) for sample, score in zip(images, scores[1], strict=True)}
    # Images were scored by features that are cached in half precision, and which PaDiM whitens.
    assert found == pytest.approx(
        {path: known[path] for path in found},
        rel=1e-4 * (5 if run.config["method"]["name"] == "federated_padim" else 1),
    )
    assert found


@pytest.mark.slow
def test_a_killed_coordinator_goes_on_where_its_checkpoint_is(tmp_path, monkeypatch, differences):
    """In a round that the sites have played already: their newer states are not taken for those of the checkpoint."""
    words = ["method=fedavg", *DEBUG, "rounds=3"]
    paint(tmp_path)
    runs = {}
    for name in ("straight", "killed"):
        folder = tmp_path / name
        for site in NAMES:
            shutil.copytree(tmp_path / site / "images", folder / site / "images")
        plan = Plan(words, NAMES, str(folder / "run"), ("fabric.accelerator=cpu",))
        if name == "killed":
            save = Federation.save

            def dies(federation, round, save=save):
                if round == 2:
                    raise KeyboardInterrupt
                save(federation, round)

            with monkeypatch.context() as patch:
                patch.setattr(Federation, "save", dies)
                with pytest.raises(KeyboardInterrupt):
                    coordinate(plan, Here(three_sites(folder)), quiet=True)
        carrier = Here(three_sites(folder))  # sites that were restarted, too
        runs[name] = coordinate(plan, carrier, quiet=True), carrier, folder
    (straight, _, one), (killed, carrier, other) = runs.values()
    assert told_result(killed) == told_result(straight)
    first = Request.from_bytes(carrier.requests[1][0])
    assert (first.kind, first.round) == ("play", 2)
    assert 0 < first.base < first.step
    states = [
        torch.load(max((folder / site / "states").glob("*/*.pt")))
        for folder in (one, other)
        for site in NAMES
    ]
    assert differences(states[:3], states[3:]) == []


def told_result(result):
    """What a result says apart from times and places."""
    circumstances = ("seconds_per_round", "peak_rss_bytes", "config", "status")
    return json.dumps({key: value for key, value in result.items() if key not in circumstances})


@pytest.mark.slow
def test_what_a_federation_learnt_is_exported_and_watched(tmp_path):
    """From the coordinator's folder, by the calibration of one of its sites: what that site's operator is given."""
    paint(tmp_path)
    words = ["method=federated_subspace", *DEBUG]
    plan = Plan(words, NAMES, str(tmp_path / "run"), HERE)
    coordinate(plan, Here(three_sites(tmp_path)), quiet=True)
    images = next((tmp_path / "south" / "images").glob("*/test/good"))
    folder = export(str(tmp_path / "run"), client="south", format=["pt2"], images=str(images))
    program = torch.export.load(folder / "detector.pt2").module()
    table = predict(str(tmp_path / "run"), str(images), client="south")
    rows = list(csv.DictReader(table.open()))
    size = json.loads((folder / "preprocessing.json").read_text())["size"]
    found = program(torch.zeros(len(rows), 3, size, size))
    assert found["image_score"].shape == (len(rows),)
    seen = watch(str(tmp_path / "run"), str(images), client="south", once=True)
    logged = list(csv.DictReader((tmp_path / "run" / "watch" / "client_south" / "images.csv").open()))
    assert {row["score"] for row in logged} == {row["score"] for row in rows}
    assert seen["images"] == len(rows)


@pytest.mark.slow
def test_a_site_uses_a_model_that_never_left_it(tmp_path):
    """Another one is away when it should judge at limits of its own: its decisions are missing, and nothing else."""
    paint(tmp_path)

    class Away(Here):
        def carry(self, requests, most):
            for client, found in super().carry(requests, most):
                asked = Request.from_bytes(requests[client]).question == "decisions"
                yield client, NoReply("gone") if asked and client == 0 else found

    words = ["method=fedbn", "task=autoencoder", "encoder.channels=8", "task.decoder.channels=8", *DEBUG]
    words.append("federation.sampler.on_failure=skip")
    plan = Plan(words, NAMES, str(tmp_path / "run"), HERE)
    result = coordinate(plan, Away(three_sites(tmp_path)), quiet=True)
    assert result["unscored"] == {str(result["rounds"]): {"0": "gone"}}
    alarms = result["last"]["false_alarm_rate"]["per_client"]
    assert [rate is None for rate in alarms.values()] == [True, False, False]
    home = tmp_path / "south"
    (own,) = (home / "detectors").iterdir()
    images = next((home / "images").glob("*/test"))
    rows = {row["path"]: row for row in csv.DictReader(predict(str(own), str(images)).open())}
    report = list(csv.DictReader((home / "reports" / own.name / "decisions.csv").open()))
    assert len(report) == len(rows) == 4
    for row in report:
        for column in ("score", "threshold"):
            found, reported = float(rows[row["image"]][column]), float(row[column])
            assert found == pytest.approx(reported, rel=1e-4)
    folder = export(str(own), format=["pt2"])
    assert folder == own / "export" / "client_south"
    assert "site south" in (folder / "model_card.md").read_text()
    assert watch(str(own), str(images), once=True)["images"] == 4
    assert not list((tmp_path / "run").rglob("client.pt"))
    with pytest.raises(UserError, match="a site's own detector: predict, watch and export take it"):
        reopen(str(own))
    with (own / "client.pt").open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match="client.pt: changed since it was written; restore it from a copy"):
        predict(str(own), str(images))


@pytest.mark.slow
def test_a_site_that_is_away_costs_itself_the_round(tmp_path, capsys):
    """The others' round is the one that they would have had alone, and it is back in the next."""
    words = ["method=fedavg", *DEBUG, "federation.sampler.on_failure=skip"]
    paint(tmp_path)

    class Away(Here):
        def carry(self, requests, most):
            for client, found in super().carry(requests, most):
                request = Request.from_bytes(requests[client])
                late = client == 1 and request.kind == "play" and request.round == 1
                yield client, NoReply("did not answer within 5 seconds") if late else found

    carrier = Away(three_sites(tmp_path))
    plan = Plan(words, NAMES, str(tmp_path / "run"), ("fabric.accelerator=cpu",))
    result = coordinate(plan, carrier, quiet=True)
    printed = capsys.readouterr().err
    assert "round 1: site east left out: did not answer within 5 seconds" in printed
    assert "client" not in printed
    assert result["failures"] == {"1": {"1": "did not answer within 5 seconds"}}
    status = read_status(tmp_path / "run")
    assert status["sites"]["east"]["troubles"] == ["round 1: did not answer within 5 seconds"]
    assert [own["last_round"] for own in status["sites"].values()] == [2, 2, 2]
    # What it did in the round that was lost is forgotten: round 2 starts from the state before.
    plays = [Request.from_bytes(found[1]) for found in carrier.requests if 1 in found]
    lost, after = (next(o for o in plays if o.kind == "play" and o.round == r) for r in (1, 2))
    assert after.base == lost.base


@pytest.mark.slow
def test_a_federation_is_tracked_and_reported(tmp_path, monkeypatch):
    """From the coordinator's folder, as a run in one process; with what the operator sees of each site."""
    paint(tmp_path)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)  # `sync` sends to the user's own server alone
    own = ("fabric.accelerator=cpu", "tracking=mlflow", f"tracking.uri={uri}")
    words = ["method=federated_subspace", *DEBUG, "federation.sampler.on_failure=skip"]

    class Away(Here):
        def carry(self, requests, most):
            for client, found in super().carry(requests, most):
                asked = Request.from_bytes(requests[client]).question == "calibration"
                yield client, NoReply("did not answer within 5 seconds") if asked and client == 2 else found

    plan = Plan(words, NAMES, str(tmp_path / "run"), own)
    result = coordinate(plan, Away(three_sites(tmp_path)), quiet=True)
    assert main(["sync", f"run={tmp_path / 'run'}"]) == 0  # what a slow machine has not sent yet
    (run,) = tracked_runs((), uri)
    assert result["tracking_run_id"] == run.run_id
    assert (run.status, run.experiment) == ("FINISHED", "sites")
    assert run.tags["method"] == "federated_subspace"
    assert run.metrics["site/south/bytes_up"] == result["status"]["south"]["bytes_up"] > 0
    assert "clients/i_auroc/south" in run.metrics
    assert "clients/i_auroc/2" not in run.metrics
    assert run.metrics["i_auroc/mean"] == result["last"]["i_auroc"]["mean"]
    page = report_runs(
        Display(quiet=True), out=str(tmp_path / "report"), overrides={"tracking.uri": uri}
    ).read_text()
    for text in ("north", "last seen", "did not answer within 5 seconds"):
        assert text in page
