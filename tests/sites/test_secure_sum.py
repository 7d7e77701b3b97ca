"""Sites whose uploads are summed: the coordinator's model is that of a plain run, and no plain message arrives."""

from dataclasses import replace

import pytest
import torch
from helpers.sites import DEBUG, NAMES, Here, enrol_in_sums, paint, settings

from lit_fedad.core.errors import UserError
from lit_fedad.federation.checkpoint import Checkpoints
from lit_fedad.privacy.keys import KeyPair
from lit_fedad.report.console import Display
from lit_fedad.sites.coordinator import Plan, coordinate
from lit_fedad.sites.letters import Order, Reply
from lit_fedad.sites.remote import Lost
from lit_fedad.sites.roster import Given, Roster, write_sum_key
from lit_fedad.sites.site import Site

WORDS = ["method=federated_subspace", *DEBUG, "rounds=0"]
OWN = ["cache.enabled=false", "fabric.accelerator=cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sites")
    paint(folder)
    enrol_in_sums(folder)
    return folder


def sites(folder, secure):
    own = (*OWN,) if secure else OWN
    return [
        Site(
            replace(
                settings(folder, name, *own), roster=Roster.read(folder / name, name) if secure else None
            ),
            Display(quiet=True),
        )
        for name in NAMES
    ]


class Dropping(Here):
    """Loses a site when it is asked for its message."""

    def carry(self, orders, most):
        for client, found in super().carry(orders, most):
            dead = client == 1 and Order.from_bytes(orders[client]).kind == "play"
            yield client, Lost("the line went dead") if dead else found


def play(folder, name, carrier, words):
    plan = Plan([*WORDS, *words], NAMES, str(folder / name), OWN)
    coordinate(plan, carrier, quiet=True)
    checkpoints = Checkpoints(folder / name / "checkpoints")
    return checkpoints.load(checkpoints.latest())[1]["server"]


@pytest.mark.slow
def test_the_coordinator_has_the_sum_alone(folder):
    carrier = Here(sites(folder, secure=True))
    summed = play(folder, "summed", carrier, ["federation=secure"])
    plain_carrier = Here(sites(folder, secure=False))
    plain = play(folder, "plain", plain_carrier, ["federation/robust=off"])
    for name in ("count", "mean", "covariance"):
        torch.testing.assert_close(summed["moments"][name], plain["moments"][name], rtol=1e-5, atol=1e-6)

    def letters(carrier):
        pairs = zip(carrier.orders, carrier.replies, strict=True)
        return [
            Reply.from_bytes(replies[client]).letter
            for orders, replies in pairs
            for client, order in orders.items()
            if Order.from_bytes(order).kind == "play"
        ]

    covariance = [blob[-4000:] for blob in letters(plain_carrier)]
    assert len(covariance) == len(letters(carrier)) == len(NAMES)
    for blob in letters(carrier):
        values = torch.frombuffer(bytearray(blob[-8 * (len(blob) // 8) :]), dtype=torch.int64)
        assert values.double().std() > 2**61  # uniform: 2^64 / sqrt(12)


@pytest.mark.slow
def test_a_site_that_drops_out_is_not_in_the_sum(folder):
    carrier = Dropping(sites(folder, secure=True))
    server = play(folder, "dropped", carrier, ["federation=secure", "seed=1"])
    whole = play(folder, "whole", Here(sites(folder, secure=True)), ["federation=secure", "seed=2"])
    assert 3 * int(server["moments"]["count"]) == 2 * int(whole["moments"]["count"])
    # Asked for the same round with others, the sites that were in the sum give nothing: the difference is east's.
    with pytest.raises(UserError, match="part of round 0 is in the sum of other sites already"):
        play(folder, "again", Here(sites(folder, secure=True)), ["federation=secure", "seed=1"])


def test_sites_refuse_what_their_roster_does_not_say(folder):
    roster = Roster.read(folder / "north", "north")
    assert set(roster.numbered(NAMES, 0)) == {0, 1, 2}
    for names, client in ((["north", "north", "south"], 0), (NAMES, 1), (["north", "east"], 5)):
        with pytest.raises(UserError, match="in another way than the roster"):
            roster.numbered(names, client)
    with pytest.raises(UserError, match="site west is not on this site's roster"):
        roster.numbered(["north", "west"], 0)


def test_a_roster_that_cannot_be_used_is_refused_in_one_line(folder, tmp_path):
    assert Roster.read(tmp_path, "north") is None
    write_sum_key(tmp_path, "north")
    line = (tmp_path / "sum.pub").read_text()
    other = KeyPair()
    for text, cause in (
        ("north\n", "line 1: give the name of a site and its key"),
        (line + line, "line 2: give the name of a site and its key, once"),
        (line + "east short\n", "line 2: is no key of 32 bytes"),
        (line + line.replace("north", "east"), "two sites have the same key"),
        ("", "site north is not in it with its own key"),
        ("".join(p.read_text() for p in (folder / "north" / "sum.pub",)), "not in it with its own key"),
    ):
        (tmp_path / "roster").write_text(text)
        with pytest.raises(UserError, match=cause) as refused:
            Roster.read(tmp_path, "north")
        assert "\n" not in str(refused.value)
    assert other.public != (tmp_path / "sum.key").read_bytes()
    assert (tmp_path / "sum.key").stat().st_mode & 0o077 == 0


def test_a_part_is_given_to_one_sum(tmp_path):
    given = Given(tmp_path / "sums.json")
    given.claim((1, 0), [0, 1, 2])
    given.claim((1, 0), [2, 1, 0])  # the same sum again, after a coordinator has gone back to its checkpoint
    given.claim((2, 0), [0, 1])
    with pytest.raises(UserError, match="part of round 1 is in the sum of other sites already"):
        Given(tmp_path / "sums.json").claim((1, 0), [0, 1])
    (tmp_path / "sums.json").write_text("[]")
    with pytest.raises(UserError, match="cannot be kept"):
        given.claim((3, 0), [0])


@pytest.mark.parametrize(
    ("secure", "words", "cause"),
    [
        (True, ["federation/robust=off"], "answers in runs of secure sums alone"),
        (False, ["federation=secure"], "and this site no roster"),
    ],
)
def test_a_site_answers_in_one_kind_of_run(folder, secure, words, cause):
    site = sites(folder, secure)[0]
    order = Order("hello", "0123456789abcdef", [*WORDS, *words], 0)
    assert cause in Reply.from_bytes(site.answer(order.to_bytes())).cause
