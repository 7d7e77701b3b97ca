"""The coordinator's end, on a grid that loses messages."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.task_identity import TaskIdentity

from lit_fedad.core.errors import UserError
from lit_fedad.flower import messages
from lit_fedad.flower.grid import GridCarrier
from lit_fedad.flower.messages import TooLongError, limited, unwrapped, wrapped
from lit_fedad.sites.remote import NoReply

KEYS = {0: b"north's key", 1: b"east's key"}


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """What Flower tells the process of a ServerApp."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Grid:
    """Nodes by number; each pull answers what was pushed, as the script says. It is the SuperLink's API, too."""

    node, run = Node(node_id=1), SimpleNamespace(run_id=1)

    def __init__(self, nodes, *script):
        self.nodes, self.script = nodes, list(script)
        self.pushed, self.waiting, self.signals = [], {}, []
        self.objects, self.read, self.confirmed, self.held = {}, 0, 0, {}
        self._runtime_client = self

    def get_nodes(self):
        return [
            SimpleNamespace(public_key=key, node_id=node, name="north") for node, key in self.nodes.items()
        ]

    def push_messages(self, messages):
        names = []
        for message in messages:
            name = f"m{len(self.pushed)}"
            self.pushed.append((message.metadata.dst_node_id, unwrapped(message)))
            message.metadata.__dict__["_message_id"] = name
            self.waiting[name] = message
            names.append(name)
        return names

    def PullMessages(self, request):  # noqa: N802
        headers, trees = [], []
        for name in request.message_ids:
            what = self.script.pop(0) if self.script else "answer"
            if what == "wait":
                continue
            waiting = self.waiting[name]
            if isinstance(what, int):
                reply = Message(Error(what, "gone"), reply_to=waiting)
            else:
                reply = Message(
                    what if isinstance(what, RecordDict) else wrapped(unwrapped(waiting).upper()),
                    reply_to=waiting,
                )
            with no_object_id_recompute():
                reply.metadata.__dict__["_message_id"] = reply.object_id
                self.objects |= {key: part.deflate() for key, part in get_all_nested_objects(reply).items()}
                trees.append(get_object_tree(reply))
                headers.append(message_to_proto(remove_content_from_message(reply)))
        return SimpleNamespace(messages_list=headers, message_object_trees=trees)

    def PullObject(self, request):  # noqa: N802
        content = self.objects[request.object_id]
        if self.held.get(content, 0):
            self.held[content] -= 1
            return PullObjectResponse(object_found=True, object_available=False)
        self.read += len(content)
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request):  # noqa: N802
        self.confirmed += 1


BOTH = {0: b"to north", 1: b"to east"}


def carrier_of(grid, timeout=60.0, gone=lambda key: False, keys=KEYS, note=print):
    """The carrier of a coordinator's folder, whose sites are north and east."""
    settings = SimpleNamespace(sites=["north", "east"], public_keys=lambda: keys)
    folder = SimpleNamespace(path=Path(), file="federation.yaml", timeout=timeout, again=lambda: settings)
    carrier = GridCarrier(grid, folder, SimpleNamespace(note=note))
    carrier.signals = SimpleNamespace(send=lambda most: grid.signals.append(len(grid.pushed)), gone=gone)
    return carrier


def carry(grid, timeout=60.0, most=1000):
    return dict(carrier_of(grid, timeout).carry(BOTH, most))


def test_requests_go_to_keys_not_to_names():
    grid = Grid({7: KEYS[1], 8: KEYS[0], 9: b"a stranger who calls itself north"})
    assert carry(grid) == {0: b"TO NORTH", 1: b"TO EAST"}
    assert sorted(grid.pushed) == [(7, b"to east"), (8, b"to north")]
    assert {request.metadata.ttl for request in grid.waiting.values()} == {60.0}  # not Flower's 12 hours


def test_sites_are_told_when_all_their_requests_are_there():
    grid = Grid({7: KEYS[1], 8: KEYS[0]}, 3)
    carry(grid)
    assert grid.signals == [2, 3]  # one request got lost, and was sent again
    nobody = Grid({}, "wait")
    carry(nobody, 0.1)
    assert nobody.signals == []


@pytest.mark.parametrize("code", [3, 4, 5, 8])
def test_what_got_lost_with_its_node_is_sent_again(code):
    grid = Grid({7: KEYS[1], 8: KEYS[0]}, code, "wait", code)
    assert carry(grid) == {0: b"TO NORTH", 1: b"TO EAST"}
    assert len(grid.pushed) == 4


def test_a_request_that_flower_does_not_take_is_sent_anew(monkeypatch):
    """Flower refuses a request after an outage in which it arrived twice."""
    grid, push = Grid({7: KEYS[1], 8: KEYS[0]}), Grid.push_messages
    refused = iter([True, False, False])

    def pushed(messages):
        if next(refused):
            raise ObjectPushError("part", 1, "session")
        return push(grid, messages)

    monkeypatch.setattr(grid, "push_messages", pushed)
    assert carry(grid) == {0: b"TO NORTH", 1: b"TO EAST"}


def test_a_site_does_not_say_without_end_that_its_request_got_lost(monkeypatch):
    """Each repeated request takes up space on the coordinator's disk."""
    monkeypatch.setattr("lit_fedad.flower.grid._POLL_S", 0.0)
    grid = Grid({8: KEYS[0]}, *[3] * 6)
    assert dict(carrier_of(grid).carry({0: b"to north"}, 1000)) == {
        0: NoReply("has lost its request 6 times")
    }
    assert len(grid.pushed) == 6


def test_a_site_whose_key_is_taken_away_gets_nothing_from_then_on():
    grid, keys = Grid({7: KEYS[1], 8: KEYS[0]}, *["wait"] * 1000), dict(KEYS)
    carrier = carrier_of(grid, 0.5, keys=keys)
    carrier.signals.send = lambda most: keys.pop(1)  # after its request was pushed
    assert "its key was taken away" in dict(carrier.carry(BOTH, 1000))[1].cause
    del keys[0]
    found = carrier_of(grid, 3600.0, keys=keys).carry({0: b"to north"}, 1000)
    assert "its key was taken away" in dict(found)[0].cause  # at once


def test_a_site_that_has_signed_off_is_not_waited_for():
    carrier = carrier_of(Grid({7: KEYS[1]}), 3600.0, lambda key: key == KEYS[0])
    assert dict(carrier.carry(BOTH, 1000)) == {0: NoReply("has signed off"), 1: b"TO EAST"}
    assert carrier.present() == {1: "east"}


def test_the_operator_is_told_which_sites_are_waited_for_when_that_changes(monkeypatch):
    monkeypatch.setattr("lit_fedad.flower.grid._PATIENCE_S", 0.0)
    grid, told = Grid({}), []

    def note(line):
        told.append(line)
        grid.nodes[len(told)] = KEYS[len(told) - 1]  # one after the other connects

    assert len(dict(carrier_of(grid, note=note).carry(BOTH, 1000))) == 2
    assert [line.partition(";")[0] for line in told] == [
        f"sites that have not connected: {names}" for names in ("north, east", "east")
    ]


def test_a_site_that_is_away_or_late_gives_no_reply():
    grid = Grid({8: KEYS[0]}, *["wait"] * 1000)
    assert carry(grid, 0.5) == {
        0: NoReply("did not answer within 0.5 seconds"),
        1: NoReply("did not connect within 0.5 seconds"),
    }


@pytest.mark.parametrize("polls", [2, 1_000_000])
def test_a_reply_that_is_announced_and_not_sent_does_not_delay_the_others(polls):
    """For a site that is killed in between, or that lies, Flower would wait minutes or hours."""
    grid = Grid({7: KEYS[1], 8: KEYS[0]})
    part = next(iter(get_all_nested_objects(wrapped(b"TO NORTH")).values())).deflate()
    grid.held[part] = polls
    came = list(carrier_of(grid, 60 if polls == 2 else 1.5).carry(BOTH, 1000))
    north = b"TO NORTH" if polls == 2 else NoReply("did not answer within 1.5 seconds")
    assert came == [(1, b"TO EAST"), (0, north)]  # in the order in which they came


def test_a_site_that_has_missed_a_request_is_waited_for_once_it_is_back():
    grid = Grid({8: KEYS[0]})
    carrier = carrier_of(grid, 0.3)
    assert dict(carrier.carry(BOTH, 1000))[1] == NoReply("did not connect within 0.3 seconds")
    carrier.timeout = 3600.0
    away = NoReply("has not connected since it missed a request")
    assert dict(carrier.carry(BOTH, 1000)) == {0: b"TO NORTH", 1: away}
    grid.nodes[9], grid.script = KEYS[1], ["answer", 3]  # it comes back, and loses a request
    assert dict(carrier.carry(BOTH, 1000)) == {0: b"TO NORTH", 1: b"TO EAST"}
    del grid.nodes[9]
    carrier.timeout = 0.3
    assert dict(carrier.carry(BOTH, 1000))[1] == NoReply("did not connect within 0.3 seconds")


def test_a_site_that_goes_away_with_a_request_is_not_waited_for_again():
    grid = Grid({8: KEYS[0]}, *["wait"] * 1000)
    carrier = carrier_of(grid, 0.3)
    assert dict(carrier.carry({0: b"x"}, 1000)) == {0: NoReply("did not answer within 0.3 seconds")}
    grid.nodes, carrier.timeout = {}, 3600.0
    assert dict(carrier.carry({0: b"x"}, 1000)) == {0: NoReply("has not connected since it missed a request")}


def test_other_errors_and_other_messages_are_not_taken():
    foreign = RecordDict({"payload": ConfigRecord({"payload": "text"})})
    grid = Grid({7: KEYS[1], 8: KEYS[0]}, 7, foreign)
    found = carry(grid)
    assert found == {
        0: NoReply("Flower's error 7"),  # its text may be a site's
        1: NoReply("a message holds something else than a payload", away=False),
    }


@pytest.mark.parametrize(("short", "record"), [(8, ConfigRecord), (7, ArrayRecord)])
def test_a_message_is_one_record_of_its_bytes(monkeypatch, short, record):
    monkeypatch.setattr(messages, "_SHORT", short)
    content = wrapped(b"\x00\x01abcdef")
    assert [type(found) for found in content.values()] == [record]
    assert unwrapped(SimpleNamespace(content=content)) == b"\x00\x01abcdef"


@pytest.mark.parametrize(
    "content", [{}, {"payload": ConfigRecord({"other": b"x"})}, {"payload": MetricRecord({"payload": 1.0})}]
)
def test_what_is_no_message_is_refused(content):
    with pytest.raises(UserError, match="something else than a payload"):
        unwrapped(SimpleNamespace(content=RecordDict(content)))


def test_a_reply_that_is_too_long_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr("flwr.app.message.array.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 1000)
    chunks = [bytes([number % 256, number // 256]) * 500 for number in range(4000)]
    long = wrapped(b"".join(chunks))
    grid = Grid({7: KEYS[1], 8: KEYS[0]}, long)
    found = carry(grid, most=100_000)
    assert found == {
        0: NoReply("sent more than 100000 bytes, the most that a reply may have", away=False),
        1: b"TO EAST",
    }
    assert grid.read < 1_000_000
    assert grid.confirmed == 2


def test_a_chunk_that_an_array_repeats_counts_each_time(monkeypatch):
    """Few bytes on the network would become many in memory."""
    monkeypatch.setattr("flwr.app.message.array.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 1000)
    grid = Grid({7: KEYS[1], 8: KEYS[0]}, wrapped(bytes(4_000_000)))
    found = carry(grid, most=100_000)
    assert found[0] == NoReply("sent more than 100000 bytes, the most that a reply may have", away=False)
    assert grid.read < 100_000


@pytest.mark.parametrize("parts", [(11,), (4, 6, 1)])
def test_no_part_of_a_message_that_is_too_long_is_passed_on(parts):
    read = limited(bytes, len, 10)
    passed = [len(read(part)) for part in parts[:-1]]
    assert passed == list(parts[:-1])
    with pytest.raises(TooLongError):
        read(parts[-1])
