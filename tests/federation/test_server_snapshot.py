"""The server's state before a merge: shared while nothing changes it in place, and whole again after a failure."""

import pytest
import torch

from lit_fedad.contracts import Server
from lit_fedad.federation.receiver import ServerSnapshot


class Sums(Server):
    state_names = ("weights", "banks")

    def __init__(self):
        self.weights, self.banks = {"a": torch.ones(3)}, {0: [torch.zeros(2)]}


def test_a_text_is_no_list_of_names():
    class Server(Sums):
        state_names = "weights"

    with pytest.raises(TypeError, match=r"Server: state_names='weights' must be a tuple, \('weights',\)"):
        ServerSnapshot(Server())


def test_entries_that_a_merge_put_in_place_of_others_are_gone_after_it():
    server = Sums()
    snapshot = ServerSnapshot(server)
    for _ in range(2):  # a merge is tried several times
        server.weights["a"] = server.weights["a"] + 1
        server.banks[0].append(torch.ones(2))
        server.banks[1] = []
        snapshot.restore()
        assert server.weights["a"].tolist() == [1, 1, 1]
        assert [len(bank) for bank in server.banks.values()] == [1]


def test_tensors_are_shared():
    server = Sums()
    snapshot = ServerSnapshot(server)
    assert snapshot.state["weights"]["a"] is server.weights["a"]
    snapshot.check()


def test_a_change_in_place_is_refused_by_the_name_of_what_changed():
    server = Sums()
    snapshot = ServerSnapshot(server)
    server.banks[0][0][1] = 5
    for look in (snapshot.check, snapshot.restore):
        with pytest.raises(TypeError, match=r"Sums: merging changes 'banks\.0\.0' in place"):
            look()
