"""The protocol of one sum: masks cancel, drop-outs are recovered, and a party gives away no more than it must."""

import json
from itertools import combinations

import numpy as np
import pytest

from lit_fedad.core.errors import UserError
from lit_fedad.privacy.keys import KeyPair
from lit_fedad.privacy.messages import (
    Invitation,
    Offer,
    Revealed,
    read_envelopes,
    read_survivors,
    write_envelopes,
    write_survivors,
)
from lit_fedad.privacy.protocol import Gathering, Party

SIZES = {3: 10, 5: 20, 6: 1, 8: 7, 11: 4}


def numbers(client: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(client)
    return {
        "a": draw.integers(0, 2**32, (3, 2), dtype=np.uint32),
        "b": draw.integers(0, 2**64, 5, dtype=np.uint64),
        "c": np.array(client, dtype=np.uint64),
    }


def total(clients) -> dict[str, np.ndarray]:
    return {
        name: np.sum([numbers(c)[name] for c in clients], axis=0, dtype=numbers(0)[name].dtype)
        for name in "abc"
    }


@pytest.fixture
def parties():
    keys = {client: KeyPair() for client in SIZES}
    registry = {client: pair.public for client, pair in keys.items()}
    return {client: Party(client, pair, registry) for client, pair in keys.items()}


def begin(parties, members=SIZES, quorum=3):
    """Plays up to the envelopes."""
    server = Gathering("run/1/0", members, quorum)
    offers = {c: parties[c].offer(server.invitation.to_bytes()) for c in members}
    envelopes, refused = server.take_offers(offers)
    assert not refused
    return server, envelopes


def masked(parties, envelopes, clients):
    words = {client: numbers(client) for client in clients}
    for client, own in words.items():
        parties[client].mask(own, envelopes[client])
    return words


@pytest.mark.parametrize("gone", [(), *combinations(SIZES, 1), *combinations(SIZES, 2)])
def test_the_sum_of_the_survivors_is_exact(parties, gone):
    server, envelopes = begin(parties)
    left = [client for client in SIZES if client not in gone]
    for client, words in masked(parties, envelopes, left).items():
        server.add(client, words)
    asked = server.name_survivors()
    found = server.unmask({client: parties[client].reveal(asked) for client in left[-3:]})  # the quorum
    for name, expected in total(left).items():
        np.testing.assert_array_equal(found[name], expected)


def test_before_it_is_unmasked_neither_a_client_nor_the_sum_is_what_was_added(parties):
    server, envelopes = begin(parties)
    for client, words in masked(parties, envelopes, SIZES).items():
        for name in "ab":
            assert not (words[name] == numbers(client)[name]).any()
        server.add(client, words)
    assert not (server.total["b"] == total(SIZES)["b"]).any()
    assert not {id(part) for part in vars(server).values()} & {id(words) for words in (envelopes,)}


def test_masks_are_uniform_and_differ_between_sums(parties):
    drawn = []
    for _ in range(2):
        _, envelopes = begin(parties)
        words = {"a": np.zeros(4096, dtype=np.uint32)}
        parties[3].mask(words, envelopes[3])
        drawn.append(words["a"])
    assert not (drawn[0] == drawn[1]).all()
    for words in drawn:  # 131,072 bits: six deviations are 1,087
        assert abs(int(np.unpackbits(words.view(np.uint8)).sum()) - 65_536) < 1_087


def test_three_of_five_gone_leave_the_sum_masked(parties):
    server, envelopes = begin(parties)
    for client, words in masked(parties, envelopes, [3, 5]).items():
        server.add(client, words)
    with pytest.raises(UserError, match="asks for the sum of 2 clients, of 3 that must finish"):
        parties[3].reveal(server.name_survivors())
    with pytest.raises(
        UserError, match="0 clients have revealed their shares, of 3 that must: the sum stays masked"
    ):
        server.unmask({})


def test_a_party_reveals_once_and_never_both_secrets_of_a_client(parties):
    _, envelopes = begin(parties)
    masked(parties, envelopes, SIZES)
    shares = Revealed.from_bytes(parties[3].reveal(write_survivors([3, 5, 6, 8])))
    assert set(shares.seeds) == {3, 5, 6, 8}
    assert set(shares.keys) == {11}
    with pytest.raises(UserError, match="or a second time"):
        parties[3].reveal(write_survivors([3, 5, 6, 11]))


def test_a_party_masks_once_for_an_invitation(parties):
    _, envelopes = begin(parties)
    masked(parties, envelopes, [3])
    with pytest.raises(UserError, match="has invited to none"):
        masked(parties, envelopes, [3])


@pytest.mark.parametrize("named", [[5, 6, 8], [3, 5, 6, 7]])
def test_survivors_that_had_no_part_are_refused(parties, named):
    _, envelopes = begin(parties)
    masked(parties, envelopes, SIZES)
    with pytest.raises(UserError, match="had no part"):
        parties[3].reveal(write_survivors(named))


@pytest.mark.parametrize(
    "blob",
    [b"{}", *(b'{"survivors":%s}' % who for who in (b"[]", b"[3,3,3]", b"[-1,3,5]", b"[3,5,6,6]"))],
)
def test_shares_are_not_revealed_to_survivors_that_are_none(parties, blob):
    _, envelopes = begin(parties)
    masked(parties, envelopes, SIZES)
    with pytest.raises(UserError):
        parties[3].reveal(blob)


@pytest.mark.parametrize(
    ("members", "quorum"),
    [
        (SIZES, 2), (SIZES, 1), (SIZES, 0), (SIZES, 6), ({3: 9, 5: 9}, 2), ({3: 9, 5: 9, 7: 9}, 2),
        ({5: 9, 6: 9, 8: 9}, 2), ({}, 1), ({3: 0, 5: -1, 6: 9}, 2),
    ],
)  # fmt: skip
def test_sums_of_few_are_not_agreed_to(parties, members, quorum):
    content = {"place": "run/0", "members": [*members.items()], "quorum": quorum}
    with pytest.raises(UserError):
        parties[3].offer(json.dumps(content).encode())


def test_a_client_that_is_not_on_the_roster_is_not_masked_with(parties):
    stranger = Invitation("run/1/0/x", {**SIZES, 12: 3}, 4)
    with pytest.raises(UserError, match="client 12, whose key is not in the key registry"):
        parties[3].offer(stranger.to_bytes())


@pytest.mark.parametrize("sender", [3, 12])
def test_an_envelope_of_the_client_itself_or_of_a_stranger_is_refused(parties, sender):
    _, envelopes = begin(parties)
    given = read_envelopes(envelopes[3])
    with pytest.raises(UserError, match="envelopes of clients that it has not invited"):
        parties[3].mask(numbers(3), write_envelopes({**given, sender: given[5]}))


def test_an_envelope_of_another_key_is_refused(parties):
    """The server, or a client in another's name, cannot seal what a party opens."""
    imposter = Party(5, KeyPair(), {client: parties[client]._identity.public for client in SIZES})
    server = Gathering("run/1/0", SIZES, 3)
    invitation = server.invitation.to_bytes()
    offers = {c: (imposter if c == 5 else parties[c]).offer(invitation) for c in SIZES}
    envelopes, _ = server.take_offers(offers)
    with pytest.raises(UserError, match="client 5 was not sealed with the key that it is registered with"):
        parties[3].mask(numbers(3), envelopes[3])


def test_envelopes_of_another_sum_are_refused(parties):
    _, older = begin(parties)
    begin(parties)
    with pytest.raises(UserError, match="not sealed with the key"):
        parties[3].mask(numbers(3), older[3])


def test_too_few_envelopes_are_refused(parties):
    _, envelopes = begin(parties)
    few = dict(list(read_envelopes(envelopes[3]).items())[:1])
    with pytest.raises(UserError, match="only 2 clients take part, of 3 that must"):
        parties[3].mask(numbers(3), write_envelopes(few))


def test_false_shares_lose_the_round_in_one_line(parties):
    server, envelopes = begin(parties)
    for client, words in masked(parties, envelopes, [3, 5, 6, 8]).items():
        server.add(client, words)
    asked = server.name_survivors()
    shares = {client: Revealed.from_bytes(parties[client].reveal(asked)) for client in (3, 5, 6)}
    for spoilt in ("seeds", "keys"):
        entries = {**getattr(shares[5], spoilt)}
        entries[max(entries)] = bytes(32) + b"\x07"
        forged = Revealed(**{"seeds": shares[5].seeds, "keys": shares[5].keys, spoilt: entries})
        messages = {client: (forged if client == 5 else own).to_bytes() for client, own in shares.items()}
        with pytest.raises(UserError, match=rf"client {max(entries)}'s secrets are not those"):
            server.unmask(messages)
        del entries[max(entries)]  # shares of other clients than were asked for are none
        few = Revealed(**{"seeds": shares[5].seeds, "keys": shares[5].keys, spoilt: entries})
        with pytest.raises(UserError, match="2 clients have revealed their shares, of 3 that must"):
            server.unmask({**messages, 5: few.to_bytes()})


def test_two_clients_and_minorities_are_refused():
    with pytest.raises(UserError, match="at least 3"):
        Gathering("run", {0: 1, 1: 1}, 2)
    with pytest.raises(UserError, match="give more than half"):
        Gathering("run", {0: 1, 1: 1, 2: 1, 3: 1}, 2)


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"[]",
        b"{}",
        b'{"public":1,"commitment":2,"envelopes":3}',
        b"\xff",
        b'{"place":[],"members":[[1]],"quorum":1}',
        b'{"place":5,"members":[[1,5],[2,5],[3,5]],"quorum":3}',
        b'{"public":"00","commitment":"%s","envelopes":{}}' % (b"00" * 32),
        b'{"seeds":{"3":"00"},"keys":{}}',
        b'{"seeds":[],"keys":[]}',
        b'{"envelopes":{"3":"00"}}',
        b'{"envelopes":[]}',
        b'{"place":"x","members":[[1,5],[2,5],[3,5],[3,6]],"quorum":3}',
    ],
)
@pytest.mark.parametrize(
    "read", [Invitation.from_bytes, Offer.from_bytes, Revealed.from_bytes, read_envelopes]
)
def test_what_is_no_letter_is_refused_in_one_line(read, blob):
    with pytest.raises(UserError, match=r"cannot be read|should be"):
        read(blob)


@pytest.mark.parametrize("read", [read_envelopes, read_survivors, Revealed.from_bytes, Offer.from_bytes])
def test_letters_that_are_too_long_are_not_parsed(read):
    with pytest.raises(UserError, match="cannot be read"):
        read(b"[" + b"0," * (1 << 23) + b"0]")


def test_letters_are_read_as_they_were_written(parties):
    invitation = Invitation("run/1/0/x", SIZES, 3)
    assert Invitation.from_bytes(invitation.to_bytes()) == invitation
    blob = parties[3].offer(invitation.to_bytes())
    assert Offer.from_bytes(blob).to_bytes() == blob


def test_the_server_refuses_offers_that_leave_a_client_out(parties):
    server = Gathering("run/1/0", SIZES, 3)
    offers = {c: parties[c].offer(server.invitation.to_bytes()) for c in SIZES}
    offer = Offer.from_bytes(offers[6])
    less = {client: message for client, message in offer.envelopes.items() if client != 3}
    offers[6] = Offer(offer.public, offer.commitment, less).to_bytes()
    envelopes, refused = server.take_offers(offers)
    assert set(refused) == {6}
    assert set(envelopes) == {3, 5, 8, 11}
