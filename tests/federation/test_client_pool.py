"""Kept states of clients: in memory, on disk and in checkpoints."""

import errno

import pytest
import torch

from lit_fedad.contracts.state import same, size_of
from lit_fedad.federation import client_pool as module
from lit_fedad.federation.checkpoint import Checkpoints
from lit_fedad.federation.client_pool import ClientPool
from lit_fedad.memory.prototypes import Prototypes


def test_personal_states_that_do_not_fit_go_to_disk(tmp_path):
    pool = ClientPool({"x": torch.zeros(0)}, tmp_path / "personal", memory_bytes=100)
    for client in range(5):
        pool.put(client, {"x": torch.full((20,), float(client))})
    assert len(list((tmp_path / "personal").glob("*.pt"))) >= 3
    assert [float(pool.get(c)["x"][0]) for c in range(5)] == [0, 1, 2, 3, 4]
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    pool.save(checkpoints.begin(1), None)
    complete = checkpoints.commit(1, {"server": {}, "history": []})
    other = ClientPool({}, tmp_path / "elsewhere")
    other.restore(complete, {1, 3})
    assert [float(other.get(c)["x"][0]) for c in (1, 3)] == [1, 3]
    assert other.get(2) == {}


def test_unchanged_states_are_linked_not_written(tmp_path):
    pool = ClientPool({}, tmp_path / "personal")
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    pool.put(0, {"x": torch.ones(1)})
    pool.put(1, {"x": torch.ones(1)})
    pool.save(folders[0], None)
    pool.put(1, {"x": torch.zeros(1)})
    pool.save(folders[1], folders[0])
    same = [(f / "client_00000.pt").stat().st_ino for f in folders]
    changed = [(f / "client_00001.pt").stat().st_ino for f in folders]
    assert same[0] == same[1]
    assert changed[0] != changed[1]


def test_classes_of_tensors_are_compared_counted_and_copied(tmp_path):
    """GLDP's clients keep prototypes: one that never trained has equal ones, built anew."""
    initial, number = Prototypes.none(3, 2), 4 * 3 * 2 + 3
    pool = ClientPool({"old": initial}, tmp_path)
    assert size_of({"old": initial}) == number
    pool.put(0, {"old": Prototypes.none(3, 2)})
    live = Prototypes(torch.ones(3, 2), initial.known)
    pool.put(1, {"old": live})
    live.vectors.zero_()
    assert same(pool.get(0), {"old": initial})
    assert torch.equal(pool.get(1)["old"].vectors, torch.ones(3, 2))


def test_unchanged_states_are_copied_where_files_cannot_be_linked(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError("no hard links here")

    monkeypatch.setattr("os.link", refuse)
    pool, checkpoints = ClientPool({}, tmp_path / "personal"), Checkpoints(tmp_path / "checkpoints")
    pool.put(0, {"x": torch.ones(1)})
    for round in (1, 2):
        pool.save(checkpoints.begin(round), checkpoints.latest())
        complete = checkpoints.commit(round, {"server": {}, "history": []})
    other = ClientPool({}, tmp_path / "elsewhere")
    other.restore(complete, {0})
    assert float(other.get(0)["x"]) == 1


def test_a_full_disk_loses_no_state(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_state", refuse)
    pool = ClientPool({}, tmp_path / "personal", memory_bytes=100)
    for client in range(4):
        pool.put(client, {"x": torch.full((20,), float(client))})
    assert [float(pool.get(client)["x"][0]) for client in range(4)] == [0, 1, 2, 3]
    with pytest.raises(OSError, match="No space left"):
        pool.save(tmp_path, None)


def test_a_stored_state_does_not_follow_the_live_model(tmp_path):
    live = torch.ones(3)
    pool = ClientPool({"x": live}, tmp_path)
    pool.put(0, {"x": live})
    live.zero_()
    assert pool.get(0)["x"].sum() == 3 == pool.get(7)["x"].sum()


@pytest.mark.parametrize("memory", [100, 1 << 20], ids=["on disk", "in memory"])
def test_what_a_turn_leaves_becomes_the_state_only_where_it_counts(tmp_path, memory):
    def values(pool):
        return [float(pool.get(client)["x"][0]) for client in range(4)]

    pool = ClientPool({"x": torch.zeros(20)}, tmp_path / "personal", memory_bytes=memory)
    for client in range(3):
        pool.put(client, {"x": torch.full((20,), 1.0 + client)})
    for client in range(4):
        pool.hold(client, {"x": torch.full((20,), 10.0 + client)})
    assert values(pool) == [1, 2, 3, 0]
    pool.settle({0, 3})
    assert values(pool) == [10, 2, 3, 13]
    pool.settle({1, 2})
    assert values(pool) == [10, 2, 3, 13]
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    pool.save(checkpoints.begin(1), None)
    complete = checkpoints.commit(1, {"server": {}, "history": []})
    assert sorted(path.name for path in complete.glob("client_*")) == [f"client_{c:05d}.pt" for c in range(4)]
    other = ClientPool({}, tmp_path / "elsewhere")
    other.restore(complete, {0, 1, 2, 3})
    assert values(other) == [10, 2, 3, 13]
