"""A site answers requests from its own images and states, whatever the coordinator sends."""

import errno
import shutil
from dataclasses import replace

import pytest
from helpers.sites import DEBUG, OPEN, message_of, quiet_site, reply_of, settings
from safetensors.torch import load

from lit_fedad.experiment import build
from lit_fedad.experiment.build import build_model
from lit_fedad.privacy.ledger import Ledger
from lit_fedad.sites.claims import MOST_MESSAGES
from lit_fedad.sites.coordinator import Plan
from lit_fedad.sites.messages import Reply, Request, digest
from lit_fedad.sites.offer import APPROVED, Approvals, Offer
from lit_fedad.sites.refusals import Code
from lit_fedad.sites.review import review
from lit_fedad.sites.states import States

RUN = "0123456789abcdef"
WORDS = [
    "method=fedavg",
    "task=autoencoder",
    "encoder.depth=18",
    "encoder.channels=16",
    "task.decoder.channels=16",
    *DEBUG,
]


@pytest.fixture(scope="module")
def site(folder):
    return quiet_site(settings(folder, "north"))


@pytest.fixture(scope="module")
def train():
    """A request to train in round 1, with the server's first message."""
    config = Plan(WORDS, ["north"], "x").config()
    payload = message_of(config, build_model(config, ()))
    return Request("play", RUN, WORDS, 0, round=1, step=1, payload=payload)


@pytest.fixture(scope="module")
def begun(site, train):
    """The reply of the site to the training request, which the site gets first."""
    reply = reply_of(site, train)
    assert not reply.cause
    return reply


def test_a_site_says_who_it_is(site, folder):
    facts = reply_of(site, Request("hello", RUN, WORDS, 0)).facts
    (product,) = facts.held
    assert facts.held == {product: 8}
    assert 0 < facts.size < 8  # some are kept back for calibration
    assert str(folder) not in repr(facts)


def test_features_wait_for_a_coordinator_that_asks_for_more_than_who_it_is(folder, tmp_path):
    """The coordinator compares backbones first: else a wrong one is only refused after minutes of extraction."""
    site = quiet_site(settings(folder, "north", f"cache.folder={tmp_path}"))
    run, words = "9" * 16, ["method=federated_subspace", *DEBUG]
    (own,) = reply_of(site, Request("hello", run, words, 0)).facts.held
    assert not [*tmp_path.rglob("*.safetensors")]
    assert not reply_of(site, Request("play", run, words, 0, round=0, step=1, products=[own])).code
    assert [*tmp_path.rglob("*.safetensors")]


def test_a_request_sent_twice_has_one_result(begun, site, train, folder):
    """A message that the site has kept need not be sent again either."""
    later = reply_of(site, replace(train, round=2, step=2, base=1))
    assert not later.cause
    assert reply_of(site, train) == begun
    # A site that was restarted has its states, whatever it did since, but no message.
    restarted, kept = quiet_site(settings(folder, "north")), replace(train, payload=b"")
    kept = replace(kept, same=digest(train.payload))
    assert reply_of(restarted, kept).code == Code.AGAIN
    assert reply_of(restarted, replace(train, round=2, step=2, base=1)) == later
    assert reply_of(restarted, kept) == begun
    assert reply_of(restarted, replace(kept, same=digest(b"another"))).code == Code.AGAIN


@pytest.mark.parametrize(
    ("change", "code", "numbers"),
    [
        ({"overrides": [*WORDS, "data.root=x"]}, Code.OVERRIDE, [len(WORDS) + 1]),
        ({"overrides": [*WORDS, "rounds=3"]}, Code.REUSED, []),
        ({"overrides": [*WORDS, "rounds=3"], "kind": "hello"}, Code.REUSED, []),
        ({"payload": b"garbage"}, Code.MESSAGE, []),
        ({"base": 1, "step": 9, "run": "f" * 16}, Code.STATE, [1]),
        ({"round": 1, "exchange": 3}, Code.EXCHANGE, [1, 3]),
        ({"kind": "ask", "question": "calibration", "names": ["nut"]}, Code.PRODUCT, []),
        ({"kind": "ask", "question": "scores", "sums": True}, Code.LEAVE_OUT, []),
        ({"kind": "reveal"}, Code.PART, []),
        ({"kind": "offer"}, Code.REGISTRY, []),
    ],
)
def test_a_refusal_is_a_code(begun, site, train, folder, change, code, numbers):
    reply = reply_of(site, replace(train, **change))
    assert (reply.code, reply.numbers) == (code, numbers)
    assert str(folder) not in reply.cause
    assert "\n" not in reply.cause


def test_messages_of_another_form_take_no_answer_of_their_place(train, folder, tmp_path):
    """They are refused, and do not count among the messages that are answered at one place."""
    site = quiet_site(settings(folder, "north"), folder=tmp_path)
    garbage = [replace(train, payload=bytes([number])) for number in range(MOST_MESSAGES)]
    assert {reply_of(site, request).code for request in garbage} == {Code.MESSAGE}
    assert reply_of(site, train).code == Code.NONE


def test_states_that_are_settled_are_removed(train, folder, tmp_path):
    site = quiet_site(settings(folder, "north"), folder=tmp_path)
    for step in (1, 2, 3):
        assert not reply_of(
            site, replace(train, round=min(step, 2), step=step, base=step - 1, settled=step - 1)
        ).cause
    assert sorted(int(path.stem) for path in (tmp_path / "states" / RUN).glob("*.pt")) == [2, 3]


@pytest.mark.parametrize("keep", [True, False])
def test_what_predicts_is_kept_where_it_is_asked_for(train, folder, tmp_path, keep):
    site = quiet_site(settings(folder, "north"), folder=tmp_path)
    asked = replace(train, kind="ask", question="scores", round=2, step=5, keep=keep)
    assert reply_of(site, asked).payload
    assert [path.name for path in (tmp_path / "states" / RUN).glob("*.pt")] == ["000000000005.pt"] * keep


def test_a_model_that_all_share_is_no_detector_of_the_site(train, folder, tmp_path):
    site = quiet_site(settings(folder, "north"), folder=tmp_path)
    assert reply_of(site, replace(train, kind="ask", question="scores", round=2, step=5, keep=True)).payload
    assert not (tmp_path / "detectors").exists()


@pytest.mark.parametrize(("mark", "code"), [("images", Code.IMAGES), ("model", Code.MODEL)])
def test_a_run_goes_on_with_what_it_began_with(begun, train, folder, mark, code):
    file = folder / "north" / "states" / RUN / mark
    noted = file.read_text()
    file.write_text("another")
    reply = reply_of(quiet_site(settings(folder, "north")), train)
    file.write_text(noted)
    assert (reply.code, reply.payload) == (code, b"")


@pytest.mark.parametrize("name", ["runs.jsonl", "ledger.jsonl"])
def test_a_record_that_was_cut_off_is_no_shorter_record(begun, train, folder, tmp_path, name):
    """What it held would be told, or spent, again; the log says how long it was, also after a refusal."""
    for kept in ("log.jsonl", "runs.jsonl"):
        shutil.copy(folder / "north" / kept, tmp_path)
    Ledger(tmp_path / "ledger.jsonl").spend("a", "noise", 1.0, 1e-5)
    given = replace(settings(folder, "north"), folder=tmp_path)
    assert not reply_of(quiet_site(given), train).code
    whole = (tmp_path / name).read_bytes()
    for left in (b"", b"\n".join(whole.split(b"\n")[:-2]), None):
        (tmp_path / name).unlink() if left is None else (tmp_path / name).write_bytes(left)
        site = quiet_site(given)
        assert [reply_of(site, train).code for _ in range(2)] == [Code.FAILED] * 2
        assert f"{name}: has" in site.log.entries()[-1]["why"]
    (tmp_path / name).write_bytes(whole)
    assert not reply_of(quiet_site(given), train).code


@pytest.mark.parametrize("name", ["runs.jsonl", "ledger.jsonl"])
def test_a_record_that_is_removed_while_the_site_is_at_work_is_missed_at_once(
    begun, train, folder, tmp_path, name
):
    """A program that renames old logs may take it for one."""
    for kept in ("log.jsonl", "runs.jsonl"):
        shutil.copy(folder / "north" / kept, tmp_path)
    Ledger(tmp_path / "ledger.jsonl").spend("a", "noise", 1.0, 1e-5)
    site = quiet_site(replace(settings(folder, "north"), folder=tmp_path))
    assert not reply_of(site, train).code
    (tmp_path / name).rename(tmp_path / "old")
    assert reply_of(site, train).code == Code.FAILED
    assert f"{name}: has 0 lines of" in site.log.entries()[-1]["why"]
    (tmp_path / "old").rename(tmp_path / name)
    assert not reply_of(site, train).code


def test_a_site_that_is_asked_under_anothers_number_says_so(begun, train, folder):
    """Its images are the same, and nothing is to be given back: two files under keys were exchanged."""
    reply = reply_of(quiet_site(settings(folder, "north")), replace(train, client=1))
    assert (reply.code, reply.payload) == (Code.NUMBER, b"")


def test_a_full_disk_is_named(begun, train, folder, monkeypatch):
    """The system names no file if a write fails."""

    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(States, "put", full)
    site = quiet_site(settings(folder, "north"))
    assert reply_of(site, train).code == Code.FAILED
    assert site.log.entries()[-1]["why"].startswith(f"{folder / 'north'}: no space is left on the disk")


def test_what_takes_a_model_of_sums_is_not_answered_without_them(site):
    asked = Request("hello", "c" * 16, ["method=federated_subspace", *DEBUG], 0)
    own = [*reply_of(site, asked).facts.held]
    asked = replace(asked, kind="ask", question="calibration", products=own, names=own, step=1)
    assert reply_of(site, asked).code == Code.QUERY
    assert "calibration without the model's sums" in site.log.entries()[-1]["why"]


@pytest.mark.parametrize(
    ("kinds", "approved", "told"),
    [(["sums"], False, True), ([], False, False), ([], True, True)],
)
def test_losses_leave_where_sums_do_or_the_run_is_approved(train, folder, tmp_path, kinds, approved, told):
    policy = replace(OPEN, allow=["counts", "weights", *kinds], images=6)  # as many as it trains with
    given = replace(settings(folder, "north"), folder=tmp_path, policy=policy)
    if approved:
        found = review(given, Offer(WORDS))
        Approvals(tmp_path / APPROVED).add(found.digest, found.method, found.taken)
    reply = reply_of(quiet_site(given), train)
    assert reply.payload
    assert bool(reply.scalars) is told


def test_a_site_with_a_budget_takes_no_part_without_noise(folder, tmp_path):
    site = quiet_site(settings(folder, "north"), folder=tmp_path, epsilon=4.0)
    reply = reply_of(site, Request("hello", RUN, WORDS, 0))
    assert (reply.code, reply.numbers) == (Code.PROMISE, [4])
    assert not reply.facts.held


def test_an_error_stays_at_the_site(train, folder, tmp_path):
    given = settings(folder, "north")
    root = tmp_path / "Adler, Karin 1950"
    gone = quiet_site(given, folder=tmp_path, data=("data=mvtec_mixture", f"data.root={root}"))
    reply = gone.answer(train.to_bytes())
    assert b"Adler" not in reply
    assert Reply.from_bytes(reply).cause == "failed; entry 1 of its log (lit-fedad site log) says why"
    assert str(root) in gone.log.entries()[0]["why"]  # the site's own operator reads it


def test_products_apart_have_the_sites_name(folder):
    site = quiet_site(settings(folder, "north"), apart=True)
    facts = reply_of(site, Request("hello", "a" * 16, WORDS, 0)).facts
    assert all(product.startswith("north.") for product in facts.held)


def test_its_backbone_is_built_once_also_where_products_are_told_apart_later(folder, monkeypatch):
    built = []
    create = build.build
    monkeypatch.setattr(
        build, "build", lambda section, *key, **more: built.append(section) or create(section, *key, **more)
    )
    site = quiet_site(settings(folder, "north"))
    words = ["method=federated_subspace", *DEBUG]
    (own,) = reply_of(site, Request("hello", "b" * 16, words, 0)).facts.held
    play = Request("play", "b" * 16, words, 0, round=0, step=1)
    assert reply_of(site, play).code == Code.PRODUCT
    moments = load(reply_of(site, replace(play, products=["another", own])).payload)
    assert sum("create_backbone" in str((section or {}).get("_target_")) for section in built) == 1
    assert [int(count) > 0 for count in moments["count"].unflatten(0, (3, -1)).sum(1)] == [False, True, False]


def test_a_site_says_who_it_is_to_a_coordinator_that_began_again(folder):
    """It names no products yet, although the site's session has some."""
    words, run = ["method=federated_subspace", *DEBUG], "d" * 16
    hello = Request("hello", run, words, 0)
    site = quiet_site(settings(folder, "north"))
    (own,) = reply_of(site, hello).facts.held
    assert not reply_of(site, Request("play", run, words, 0, round=0, step=1, products=[own])).code
    assert reply_of(quiet_site(settings(folder, "north")), hello).facts.held


def test_a_request_is_no_longer_than_a_message_of_the_run(folder, train):
    """The policy is the bound until all products that the model tells apart are known."""
    site = quiet_site(settings(folder, "north"))
    before = site.largest
    assert reply_of(site, Request("hello", "e" * 16, ["method=federated_subspace", *DEBUG], 0)).facts.held
    assert site.largest == before == OPEN.megabytes << 20
    assert reply_of(site, Request("hello", RUN, WORDS, 0)).facts.held
    assert len(train.to_bytes()) < site.largest < before
