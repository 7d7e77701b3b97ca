"""A site's own report: scores, thresholds and pictures of its test images, in its folder alone."""

import csv
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers.sites import DEBUG, NAMES, Here, message_of, paint, quiet_site, reply_of, settings
from PIL import Image

from lit_fedad.experiment.build import build_model
from lit_fedad.sites import coordinator
from lit_fedad.sites.claims import CLAIMS
from lit_fedad.sites.coordinator import Plan, SiteClients
from lit_fedad.sites.messages import Facts, Request
from lit_fedad.sites.offer import OFFERED
from lit_fedad.sites.refusals import Code
from lit_fedad.sites.settings import SiteSettings
from lit_fedad.sites.site import AUDIT
from lit_fedad.sites.site_part import SitePart

RUN = "0123456789abcdef"
PICTURES = [word for word in DEBUG if not word.startswith("evaluation.pictures")]
WORDS = [
    "method=fedavg", "task=autoencoder", "encoder.depth=18", "encoder.channels=16", "task.decoder.channels=16",
    *PICTURES, "evaluation.pictures=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sites")
    paint(folder)
    return quiet_site(settings(folder, "north"))


@pytest.fixture(scope="module")
def payload():
    """The server's message."""
    config = Plan(WORDS, ["north"], "x").config()
    return message_of(config, build_model(config, ()))


@pytest.fixture(scope="module")
def decide(site, payload):
    """Asks the site for decisions at a threshold for its product."""
    first = Request("hello", RUN, WORDS, 0)
    (product,) = reply_of(site, first).facts.held

    def ask(limit, question="decisions"):
        for record in (CLAIMS, AUDIT):  # a run is asked at few thresholds
            (site.settings.folder / record).unlink(missing_ok=True)
        request = Request(
            "ask", RUN, WORDS, 0, round=1, step=1, question=question, numbers={product: limit}, names=[product],
            payload=payload,
        )  # fmt: skip
        reply = reply_of(site, request)
        assert not reply.cause
        return reply

    ask.product = product
    return ask


@pytest.mark.parametrize(("images", "code"), [(2, 0), (3, Code.FEW)])
def test_scores_of_fewer_test_images_than_the_policy_has_stay(site, payload, images, code):
    """Of four test images two are normal: their scores are told apart from those of the anomalous ones."""
    policy = replace(site.settings.policy, images=images)
    few = quiet_site(site.settings, policy=policy)
    request = Request("ask", "1" * 16, WORDS, 0, round=1, step=1, question="scores", payload=payload)
    reply = reply_of(few, request)
    assert (reply.code, list(reply.numbers)) == (code, [2, 3] if code else [])
    assert (site.settings.folder / OFFERED).exists() is bool(code)  # an approval lets them go


@pytest.mark.slow
@pytest.mark.parametrize(("images", "code"), [(2, 0), (3, Code.FEW)])
def test_scores_that_are_told_by_stage_are_counted_by_stage(tmp_path, images, code):
    """Of each stage two test images are normal, of both together four: the answer has a histogram of each."""
    products = paint(tmp_path)[:2]
    shutil.copytree(tmp_path / "all" / products[1], tmp_path / "north" / "images" / products[1])
    given = settings(tmp_path, "north")
    policy = replace(given.policy, images=images)
    words = [*WORDS, "rounds=2"]
    few = quiet_site(given, stages=[[product] for product in products], policy=policy)
    config = Plan(words, ["north"], "x").config()
    payload = message_of(config, build_model(config, ()))
    request = Request("ask", "2" * 16, words, 0, round=1, step=1, question="scores", payload=payload)
    reply = reply_of(few, request)
    assert (reply.code, list(reply.numbers)) == (code, [2, 3] if code else [])


def rows_of(folder):
    with (folder / "decisions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_decisions_are_told_at_few_limits(site, decide, payload, tmp_path):
    """Counts at many limits would tell each score."""
    own = quiet_site(site.settings, folder=tmp_path)
    asked = Request(
        "ask", RUN, WORDS, 0, round=1, step=1, question="decisions", names=[decide.product], payload=payload
    )
    limits = ({decide.product: limit} for limit in (1.0, 2.0, 1.0, 3.0, 4.0))
    codes = [reply_of(own, replace(asked, numbers=numbers)).code for numbers in limits]
    assert codes == [0, 0, 0, 0, Code.REPEATED]


@pytest.mark.parametrize(("calibration", "fewest"), [(((0, 1, 2),), 1), ((), 2)])
def test_calibration_tells_of_the_images_that_were_held_out_or_else_of_all(calibration, fewest):
    train = [SimpleNamespace(category=name) for name in ("nut", "nut", "pin", "pin", "nut")]
    partition = SimpleNamespace(calibration=calibration, clients=((0, 1, 2, 3, 4),))
    part = SimpleNamespace(images=SimpleNamespace(train=train), partition=partition, number=0)
    assert SitePart.fewest_scored(part, "calibration") == fewest


def test_copies_of_an_image_are_one_image_behind_a_sum():
    part = SimpleNamespace(
        summed=lambda by_product: {"0/nut": ["a", "b", "c"], "0/pin": ["d", "d", "d", "e"]}
    )
    assert SitePart.fewest(part) == 2


@pytest.mark.slow
def test_every_image_is_in_the_report_and_only_counts_leave(site, decide):
    folder = site.settings.folder / "reports" / RUN
    decide(1e9)
    rows = rows_of(folder)
    scores = [float(row["score"]) for row in rows]
    assert len(rows) == 4
    assert {row["product"] for row in rows} == {decide.product}
    assert {row["decision"] for row in rows} == {"normal"}
    middle = sorted(scores)[1]
    reply = decide((middle + sorted(scores)[2]) / 2)
    called = [row["decision"] == "anomalous" for row in rows_of(folder)]
    assert called == [score > middle for score in scores]
    page = (folder / "report.md").read_text()
    normal = sum(row["shows"] == "good" for row in rows)
    alarms = sum(row["decision"] == "anomalous" and row["shows"] == "good" for row in rows_of(folder))
    cells = [cell.strip() for cell in page.splitlines()[6].split("|")[1:-1]]
    assert cells[:4] == [decide.product, str(normal), str(alarms), str(4 - normal)]
    with Image.open(folder / "heatmaps.png") as picture:
        assert min(picture.size) > 100
    sent = reply.to_bytes()
    assert b".png" not in sent
    assert len(reply.payload) < 1000  # eight counts


@pytest.mark.slow
def test_images_that_were_scored_are_not_predicted_again(site, payload, decide, monkeypatch):
    request = Request("ask", RUN, WORDS, 0, round=1, step=1, question="scores", payload=payload)
    assert not reply_of(site, request).cause
    monkeypatch.setattr(type(site._session[1].evaluator), "__call__", None)
    decide(0.5)


def test_without_matplotlib_the_report_has_no_picture(site, decide, monkeypatch):
    folder = site.settings.folder / "reports" / RUN
    decide(1e9)
    assert "heatmaps.png" in (folder / "report.md").read_text()
    monkeypatch.setattr("lit_fedad.sites.site_files.find_spec", lambda name: None)
    decide(1e9)
    assert len(rows_of(folder)) == 4
    assert "heatmaps.png" not in (folder / "report.md").read_text()


def test_the_report_has_the_limits_that_the_detector_is_shipped_with(site, decide):
    folder = site.settings.folder / "reports" / RUN
    decide(1e9)
    before = (folder / "decisions.csv").read_bytes()
    decide(0.0, "further decisions")
    assert (folder / "decisions.csv").read_bytes() == before


def test_a_limit_without_a_promise_is_named(site, decide):
    decide(float("inf"))
    page = (site.settings.folder / "reports" / RUN / "report.md").read_text()
    assert "none: too few calibration images" in page


def test_where_no_report_can_be_written_the_round_goes_on(site, decide, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    session = site._session[1]
    before, session.settings = session.settings, replace(session.settings, folder=blocked)
    decide(1.0)
    session.settings = before


def test_what_a_killed_site_left_of_its_files_is_removed_when_it_starts(tmp_path):
    report, states = tmp_path / "reports" / RUN, tmp_path / "states" / RUN
    for folder in (report, states):
        folder.mkdir(parents=True)
    for name in (".report.md.4711.partial", ".decisions.csv.4711.partial", "report.md"):
        (report / name).write_text("x")
    (states / f".{5:012d}.pt.partial").write_text("x")
    (tmp_path / f".{OFFERED}.4711.partial").write_text("x")
    quiet_site(SiteSettings("north", tmp_path, ())).tidy()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["report.md"]


def test_sites_report_by_the_first_rate_alone(monkeypatch, tmp_path):
    """It is the one that the detector is shipped with; for sets of anomalies, limits do not depend on classes."""
    asked = []
    monkeypatch.setattr(coordinator, "calibrate", lambda *_: None)
    monkeypatch.setattr(coordinator, "ship", lambda run: None)
    monkeypatch.setattr(coordinator, "decide_apart", lambda *given: asked.append(given[-3:]))
    config, federation = {"calibration": {"by": "product"}}, SimpleNamespace(rounds=1)
    for anomalies in ([], ["far"]):
        data = coordinator.SitesData({0: Facts(anomalies=anomalies)}, ["nut"], ["nut"], None, None)
        run = SimpleNamespace(
            data=data, federation=federation, config=config, alphas=[0.1, 0.01], decisions={}
        )
        SiteClients(Plan([], NAMES, str(tmp_path), ()), Here([])).judge(run)
    assert asked == [(0.1, True, True), (0.01, True, False), (0.1, False, True), (0.01, False, False)]
