"""The coordinator's end, on a grid that loses messages."""

from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from lit_fedad.errors import UserError
from lit_fedad.flower.grid import GridCarrier
from lit_fedad.flower.letters import unwrapped, wrapped
from lit_fedad.sites.remote import Lost

KEYS = {0: b"north's key", 1: b"east's key"}


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """What Flower tells the process of a ServerApp."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Grid:
    """Nodes by number; each pull answers what was pushed, as the script says."""

    def __init__(self, nodes, *script):
        self.nodes, self.script = nodes, list(script)
        self.pushed, self.waiting = [], {}

    def get_nodes(self):
        return [
            SimpleNamespace(public_key=key, node_id=node, name="north") for node, key in self.nodes.items()
        ]

    def push_messages(self, messages):
        names = []
        for message in messages:
            name = f"m{len(self.pushed)}"
            self.pushed.append((message.metadata.dst_node_id, unwrapped(message)))
            self.waiting[name] = unwrapped(message)
            names.append(name)
        return names

    def pull_messages(self, names):
        replies = []
        for name in names:
            what = self.script.pop(0) if self.script else "answer"
            if what == "wait":
                continue
            error = SimpleNamespace(code=what, reason="gone") if isinstance(what, int) else None
            content = what if isinstance(what, RecordDict) else wrapped(self.waiting[name].upper())
            replies.append(
                SimpleNamespace(
                    metadata=SimpleNamespace(reply_to_message_id=name),
                    has_error=lambda error=error: error is not None,
                    error=error,
                    content=content,
                )
            )
        return replies


def carry(grid, timeout=2.0):
    return dict(GridCarrier(grid, KEYS, timeout).carry({0: b"to north", 1: b"to east"}))


def test_orders_go_to_keys_not_to_names():
    grid = Grid({7: KEYS[1], 8: KEYS[0], 9: b"a stranger who calls itself north"})
    assert carry(grid) == {0: b"TO NORTH", 1: b"TO EAST"}
    assert sorted(grid.pushed) == [(7, b"to east"), (8, b"to north")]


@pytest.mark.parametrize("code", [3, 4, 5, 8])
def test_what_got_lost_with_its_node_is_sent_again(code):
    grid = Grid({7: KEYS[1], 8: KEYS[0]}, code, "wait", code)
    assert carry(grid) == {0: b"TO NORTH", 1: b"TO EAST"}
    assert len(grid.pushed) == 4


def test_who_is_away_or_late_is_lost():
    grid = Grid({8: KEYS[0]}, *["wait"] * 1000)
    assert carry(grid, 0.5) == {
        0: Lost("did not answer within 0.5 seconds"),
        1: Lost("did not connect within 0.5 seconds"),
    }


def test_other_errors_and_other_messages_are_not_taken():
    foreign = RecordDict({"letter": ConfigRecord({"letter": b"bytes"})})
    grid = Grid({7: KEYS[1], 8: KEYS[0]}, 7, foreign)
    found = carry(grid)
    assert found == {0: Lost("Flower: gone"), 1: Lost("a message holds something else than a letter")}


def test_a_letter_is_one_array_of_its_bytes():
    content = wrapped(b"\x00\x01letter")
    assert unwrapped(SimpleNamespace(content=content)) == b"\x00\x01letter"
    with pytest.raises(UserError, match="something else than a letter"):
        unwrapped(SimpleNamespace(content=RecordDict({})))
