"""A site answers orders from its own images and states, whatever the coordinator sends."""

from dataclasses import replace

import pytest
from helpers.sites import DEBUG, message_of, paint, settings

from lit_fedad.experiment.build import build_model
from lit_fedad.report.console import Display
from lit_fedad.sites.coordinator import Plan
from lit_fedad.sites.letters import AGAIN, Order, Reply, digest
from lit_fedad.sites.site import Site, without_paths

RUN = "0123456789abcdef"
WORDS = ["method=fedavg", "task=autoencoder", "encoder.depth=18", "task.decoder.channels=16", *DEBUG]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sites")
    paint(folder)
    return folder


@pytest.fixture(scope="module")
def site(folder):
    return Site(settings(folder, "north"), Display(quiet=True))


@pytest.fixture(scope="module")
def train():
    """An order to train in round 1, with the server's first message."""
    config = Plan(WORDS, ["north"], "x").config()
    letter = message_of(config, build_model(config, ()))
    return Order("play", RUN, WORDS, 0, round=1, step=1, letter=letter)


def ask(site, order):
    return Reply.from_bytes(site.answer(order.to_bytes()))


def test_it_says_what_it_is(site, folder):
    facts = ask(site, Order("hello", RUN, WORDS, 0)).facts
    (product,) = facts.held
    assert facts.held == {product: 8}
    assert 0 < facts.size < 8  # some are kept back for calibration
    assert str(folder) not in repr(facts)


def test_an_order_sent_twice_has_one_result(site, train, folder):
    first = site.answer(train.to_bytes())
    assert not Reply.from_bytes(first).cause
    later = ask(site, replace(train, round=2, step=2, base=1))
    assert site.answer(train.to_bytes()) == first
    # A site that was restarted has its states, whatever it did since.
    again = Site(settings(folder, "north"), Display(quiet=True))
    assert ask(again, replace(train, round=2, step=2, base=1)) == later
    assert again.answer(train.to_bytes()) == first


def test_a_message_that_it_has_kept_need_not_come_again(site, train, folder):
    first = ask(site, train)
    again = replace(train, letter=b"", same=digest(train.letter))
    assert ask(site, again) == first
    restarted = Site(settings(folder, "north"), Display(quiet=True))
    assert ask(restarted, again).cause == AGAIN
    assert ask(restarted, train) == first
    assert ask(site, replace(again, same=digest(b"another"))).cause == AGAIN


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"words": [*WORDS, "data.root=x"]}, "'data.root=x' is not taken from a federation"),
        ({"letter": b"garbage"}, "the server sent bytes that hold no message"),
        ({"base": 1, "step": 9, "run": "f" * 16}, "the site has no state of step 1 of this run"),
        ({"round": 1, "exchange": 3}, "the coordinator asked for exchange 3 of round 1"),
        ({"kind": "ask", "question": "images"}, "the coordinator asked 'images', which no site answers"),
        ({"kind": "ask", "question": "calibration", "names": ["nut"]}, "does not know the site's product"),
        (
            {"kind": "ask", "question": "scores", "sums": True},
            "a model made of sums, which this method has not",
        ),
    ],
)
def test_what_it_refuses_is_one_line(site, train, folder, capsys, change, cause):
    found = ask(site, replace(train, **change)).cause
    assert cause in found
    assert "\n" not in found
    assert str(folder) not in found


def test_a_cause_names_no_path(train, folder, tmp_path, capsys):
    given = settings(folder, "north")
    gone = Site(
        replace(given, data=("data=mvtec_mixture", f"data.root={tmp_path / 'nowhere'}")), Display(quiet=True)
    )
    cause = ask(gone, train).cause
    assert "<path>" in cause
    assert str(tmp_path) not in cause
    assert str(tmp_path) in capsys.readouterr().err  # the site's own operator sees it
    assert without_paths("a 3/4 share; C:\\data\\x.png and ~/x") == "a 3/4 share; <path> and <path>"


def test_products_apart_have_the_sites_name(folder):
    site = Site(replace(settings(folder, "north"), apart=True), Display(quiet=True))
    facts = ask(site, Order("hello", "a" * 16, WORDS, 0)).facts
    assert all(product.startswith("north.") for product in facts.held)
