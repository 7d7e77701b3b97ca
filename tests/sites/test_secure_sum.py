"""Sites whose uploads are summed: the coordinator's model is that of a plain run, and no plain message arrives."""

from functools import partial

import pytest
import torch
from helpers.refusals import refusal
from helpers.sites import DEBUG, NAMES, Here, enrol_in_sums, paint, quiet_site, reply_of, settings, with_keys
from safetensors.torch import save

from lit_fedad.core.errors import UserError
from lit_fedad.federation.checkpoint import Checkpoints
from lit_fedad.memory.moments import Moments, MomentSets
from lit_fedad.privacy.keys import KeyPair
from lit_fedad.privacy.messages import write_survivors
from lit_fedad.privacy.protocol import Gathering
from lit_fedad.sites.coordinator import Plan, coordinate
from lit_fedad.sites.messages import Reply, Request
from lit_fedad.sites.refusals import Code
from lit_fedad.sites.remote import NoReply
from lit_fedad.sites.settings import KeyRegistry, write_sum_key

WORDS = ["method=federated_subspace", *DEBUG, "rounds=0"]
FOUR = (*NAMES, "west")  # of three, all must finish
OWN = ["cache.enabled=false", "fabric.accelerator=cpu"]


def sites(folder, secure, names=NAMES):
    given = with_keys if secure else settings
    return [quiet_site(given(folder, name, *OWN)) for name in names]


class Dropping(Here):
    """Loses a site when it is asked for its message."""

    def carry(self, requests, most):
        for client, found in super().carry(requests, most):
            dead = client == 1 and Request.from_bytes(requests[client]).kind == "play"
            yield client, NoReply("the line went dead") if dead else found


def play(folder, name, carrier, overrides, names=NAMES):
    plan = Plan([*WORDS, *overrides], names, str(folder / name), OWN)
    coordinate(plan, carrier, quiet=True)
    checkpoints = Checkpoints(folder / name / "checkpoints")
    return checkpoints.load(checkpoints.latest())[1]["server"]


@pytest.mark.slow
def test_the_coordinator_has_the_sum_alone(folder):
    carrier = Here(sites(folder, secure=True))
    summed = play(folder, "summed", carrier, ["federation=secure"])
    plain_carrier = Here(sites(folder, secure=False))
    plain = play(folder, "plain", plain_carrier, ["federation/robust=off"])
    (found,), apart = (MomentSets(**server["moments"]) for server in (summed, plain))
    assert len(apart) > 1  # a product's sum would be the message of the site that holds it
    whole = Moments.union(apart)
    assert found.count == whole.count
    torch.testing.assert_close(found.mean, whole.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.covariance, whole.covariance, rtol=1e-5, atol=1e-6)

    def messages(carrier):
        pairs = zip(carrier.requests, carrier.replies, strict=True)
        return [
            Reply.from_bytes(replies[client]).payload
            for requests, replies in pairs
            for client, request in requests.items()
            if Request.from_bytes(request).kind == "play"
        ]

    covariance = [blob[-4000:] for blob in messages(plain_carrier)]
    assert len(covariance) == len(messages(carrier)) == len(NAMES)
    for blob in messages(carrier):
        values = torch.frombuffer(bytearray(blob[-8 * (len(blob) // 8) :]), dtype=torch.int64)
        assert values.double().std() > 2**61  # uniform: 2^64 / sqrt(12)


@pytest.mark.slow
def test_a_site_that_drops_out_is_not_in_the_sum(tmp_path):
    folder = tmp_path  # whose images were in no sum before
    paint(folder, FOUR)
    enrol_in_sums(folder, FOUR)

    def run(name, secure, *overrides, carrier=Here):
        return play(folder, name, carrier(sites(folder, secure, FOUR)), overrides, FOUR)

    server = run("dropped", True, "federation=secure", "seed=1", carrier=Dropping)
    whole = run("whole", False, "federation/robust=off", "seed=1")
    assert 4 * int(server["moments"]["count"].sum()) == 3 * int(whole["moments"]["count"].sum())
    # In another run with others, the sites that were in the sum give nothing: the difference is east's.
    with pytest.raises(UserError, match="its part of round 0 to the sum of other sites already"):
        run("again", True, "federation=secure", "seed=2")


def test_sites_refuse_what_their_key_registry_does_not_say(folder):
    registry = KeyRegistry.read(folder / "north", "north")
    assert set(registry.numbered(NAMES, 0)) == {0, 1, 2}
    for names, client in (
        (["north", "north", "south"], 0), (NAMES, 1), (["north", "east"], 5), (["east", "north"], 0), (["north"], -1),
    ):  # fmt: skip
        with pytest.raises(UserError, match="under other names or keys"):
            registry.numbered(names, client)
    with pytest.raises(UserError, match="site west is not in this site's key registry"):
        registry.numbered(["north", "west"], 0)


def test_a_key_registry_that_cannot_be_used_is_refused_in_one_line(folder, tmp_path):
    assert KeyRegistry.read(tmp_path, "north") is None
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
        (tmp_path / "key_registry").write_text(text)
        with refusal(cause):
            KeyRegistry.read(tmp_path, "north")
    (tmp_path / "key_registry").unlink()
    (tmp_path / "key_registry").symlink_to(tmp_path / "not_mounted")
    with pytest.raises(UserError, match="key_registry: cannot be read"):  # and not: answer without masks
        KeyRegistry.read(tmp_path, "north")
    assert other.public != (tmp_path / "sum.key").read_bytes()
    assert (tmp_path / "sum.key").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("secure", "overrides", "cause"),
    [
        (True, ["federation/robust=off"], "answers in runs of secure sums alone"),
        (False, ["federation=secure"], "has no key registry"),
    ],
)
def test_a_site_answers_in_one_kind_of_run(folder, secure, overrides, cause):
    site = sites(folder, secure)[0]
    request = Request("hello", "0123456789abcdef", [*WORDS, *overrides], 0)
    assert cause in reply_of(site, request).cause


def test_nothing_is_sent_but_masked_for_a_sum_of_the_sites_own_images(folder):
    site = sites(folder, secure=True)[0]
    products = [next((folder / name / "images").iterdir()).name for name in NAMES]

    def ask(kind, **given):
        words = [*WORDS, "federation=secure"]
        request = Request(kind, "fedcba9876543210", words, 0, products=products, names=list(NAMES), **given)
        return reply_of(site, request)

    own = int(sum(ask("hello").facts.held.values()))
    unasked = ask("play", round=0, step=1)
    assert (unasked.code, unasked.payload) == (Code.MASK, b"")
    for counted in (own + 1, own - 1):
        invitation = Gathering("place", dict.fromkeys(range(3), counted), 3).invitation
        reply = ask("offer", payload=invitation.to_bytes())
        assert (reply.code, reply.numbers) == (Code.COUNT, [counted, own])


def asked_of_north(folder, names, *more):
    """What a site among others answers in a run of secure sums, and an invitation to some of them."""
    paint(folder)
    enrol_in_sums(folder, names)
    site = sites(folder, secure=True)[0]
    products = [next((folder / name / "images").iterdir()).name for name in NAMES]
    words = [*WORDS, "federation=secure", *more]

    def ask(kind, names=names, **given):
        request = Request(kind, "0123456789abcdef", words, 0, products=products, names=list(names), **given)
        return reply_of(site, request)

    ask("hello")
    sizes = dict.fromkeys(range(3), site._session[1].facts.size)

    def invitation(quorum=3):
        return Gathering("place", sizes, quorum).invitation.to_bytes()

    return ask, invitation


@pytest.fixture
def offers_of_north(tmp_path):
    """What a site answers when it is invited to secure sums of three sites, of which so many must finish."""
    ask, invitation = asked_of_north(tmp_path, NAMES)
    return partial(ask, "offer"), invitation


@pytest.mark.slow
@pytest.mark.parametrize("named", [[], [0, 1, 3]])
def test_shares_are_of_sums_of_the_runs_sites(tmp_path, named):
    ask, invitation = asked_of_north(tmp_path, NAMES)
    assert ask("offer", payload=invitation()).code == Code.NONE
    assert ask("reveal", payload=write_survivors(named)).code == Code.NAMES


@pytest.mark.slow
def test_a_sum_of_few_of_the_runs_sites_does_not_hold_its_noise(tmp_path):
    """Each of six adds the share of four, and three are invited."""
    private = ("federation/privacy=distributed", "federation.privacy.epsilon=8")
    ask, invitation = asked_of_north(tmp_path, [*NAMES, "a", "b", "c"], *private)
    assert ask("offer", payload=invitation()).code == Code.NONE
    reply = ask("reveal", payload=write_survivors([0, 1, 2]))
    assert (reply.code, reply.numbers) == (Code.NOISE, [3, 4])


@pytest.mark.slow
def test_a_coordinator_asks_for_no_sum_of_two_sites(offers_of_north):
    offer, invitation = offers_of_north
    reply = offer(payload=invitation(2))
    assert (reply.code, reply.numbers) == (Code.QUORUM, [2, 3])


@pytest.mark.slow
def test_a_site_accepts_an_invitation_once(offers_of_north):
    """Shares of two sums under the same keys would unmask both."""
    offer, invitation = offers_of_north
    invited = invitation()
    assert [offer(payload=invited).code for _ in range(2)] == [Code.NONE, Code.INVITED]


@pytest.mark.slow
def test_a_run_of_secure_sums_keeps_its_sites_in_their_order(offers_of_north):
    offer, invitation = offers_of_north
    assert offer(payload=invitation()).code == Code.NONE
    assert offer(payload=invitation(), names=("north", "south", "east")).code == Code.NAMES


class Summed:
    """Four sites, which a coordinator asks for sums as it likes."""

    def __init__(self, folder):
        paint(folder, FOUR)
        enrol_in_sums(folder, FOUR)
        self.sites = sites(folder, secure=True, names=FOUR)
        self.products = [next((folder / name / "images").iterdir()).name for name in FOUR]
        for client in range(4):
            self.ask(client, "hello")
        self.session = self.sites[0]._session[1]

    def ask(self, client, kind, **given):
        words = ["method=federated_subspace", "federation=secure", *DEBUG, "rounds=1"]
        request = Request(kind, "0123456789abcdef", words, client, products=self.products, **given)
        return reply_of(self.sites[client], request)

    def masked(self, round, blob=b""):
        """All four mask what they send in a round, from their first state."""
        gathering = Gathering("place", dict.fromkeys(range(4), self.session.facts.size), 3)
        invited = gathering.invitation.to_bytes()
        offers = {c: self.ask(c, "offer", names=list(FOUR), payload=invited).payload for c in range(4)}
        envelopes, _ = gathering.take_offers(offers)
        for c, own in envelopes.items():
            sent = self.ask(c, "play", round=round, step=1 + round, sealed=len(own), payload=own + blob)
            assert not sent.code

    def revealed(self, survivors):
        """What north answers when it is asked to unmask their sum."""
        return self.ask(0, "reveal", payload=write_survivors(survivors)).code

    def zeros(self, exchange):
        """A message of zeros in the form of an exchange."""
        spec = exchange.broadcast_spec(self.session.client)
        sizes = {name: [d if isinstance(d, int) else 1 for d in form.shape] for name, form in spec.items()}
        return save({name: torch.zeros(sizes[name], dtype=form.dtype) for name, form in spec.items()})


@pytest.mark.slow
def test_a_part_of_one_round_is_not_given_as_that_of_another(tmp_path):
    """A site that is asked in between for something else still knows which message its shares would unmask."""
    summed = Summed(tmp_path)
    summed.masked(round=0)
    assert summed.revealed([0, 1, 2, 3]) == Code.NONE
    summed.masked(round=0)
    exchanges = summed.session.method.exchanges
    for exchange, sums, code in (
        (exchanges.rounds[0], False, Code.FAILED),
        (exchanges.leave_out, True, Code.NONE),
    ):
        blob = summed.zeros(exchange)
        assert summed.ask(0, "play", round=1, step=2, sums=sums, payload=blob).code == code
    assert summed.revealed([0, 1, 2]) == Code.CLAIMED


@pytest.mark.slow
def test_moments_that_are_asked_for_again_go_to_the_same_sites(tmp_path):
    """From its first state a site sends them in a later round too; the difference of both sums would be west's."""
    summed = Summed(tmp_path)
    summed.masked(round=0)
    assert summed.revealed([0, 1, 2, 3]) == Code.NONE
    blob = summed.zeros(summed.session.method.exchanges.rounds[0])
    for survivors, code in (([0, 1, 2], Code.CLAIMED), ([0, 1, 2, 3], Code.NONE)):
        summed.masked(round=1, blob=blob)
        assert summed.revealed(survivors) == code
