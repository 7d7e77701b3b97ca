"""Checkpoints: what was changed is refused in one line, what they name is never called, what is unchanged not read."""

import dataclasses
import json
import random
import shutil
import warnings
import zipfile
from collections import Counter

import pytest
import torch
from helpers.damage import DAMAGES, damage, plant
from helpers.refusals import refusal

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import sha256
from lit_fedad.federation import checkpoint as module
from lit_fedad.federation.checkpoint import Checkpoints, read_meta, read_state
from lit_fedad.federation.client_pool import ClientPool
from lit_fedad.federation.round_report import RoundReport


@dataclasses.dataclass
class Foreign:
    """A class that nobody declared."""

    x: int = 0


@pytest.fixture
def saved(toy, tmp_path):
    """The checkpoint of two rounds of the toy method."""
    toy(rounds=2).run()
    return Checkpoints(tmp_path / "checkpoints").latest()


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("name", ["server.pt", "client_00001.pt", "meta.json"])
def test_a_damaged_file_is_one_line_that_names_it(toy, saved, name, kind):
    swapped = "client_00000.pt" if name == "server.pt" else "server.pt"
    damage(saved / name, kind, random.Random(f"{name} {kind}"), other=saved / swapped)
    with refusal(f"{saved}/") as caught:
        toy(rounds=3).run()
    assert name in str(caught.value) or name == "meta.json"


def test_a_file_too_many_is_named(toy, saved):
    shutil.copy(saved / "client_00000.pt", saved / "client_00007.pt")
    with pytest.raises(UserError, match=r"client_00007\.pt: is not part of this checkpoint"):
        toy(rounds=3).run()


def test_what_is_no_file_is_neither_read_nor_copied(saved, tmp_path):
    """A copy of a device would fill the disk."""
    (saved / "client_00001.pt").unlink()
    (saved / "client_00001.pt").symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"client_00001\.pt: is a link and no file"):
        Checkpoints(tmp_path / "other").adopt(Checkpoints(saved.parent))


def test_a_list_of_files_is_one_of_hashes(saved):
    meta = json.loads((saved / "meta.json").read_text())
    (saved / "meta.json").write_text(json.dumps({**meta, "files": list(meta["files"])}))
    with pytest.raises(UserError, match="it is of another checkpoint"):
        read_meta(saved)


def test_what_file_systems_hide_in_a_folder_is_no_part_of_it(toy, saved):
    (saved / ".nfs0001").write_text("")
    assert [r.round for r in toy(rounds=3).run()] == [1, 2, 3]


def test_a_checkpoint_under_another_round_is_refused(toy, saved):
    saved.rename(saved.with_name("round_100007"))
    with pytest.raises(UserError, match=r"meta\.json: cannot be read \(it is of another checkpoint\)"):
        toy(rounds=9).run()


@pytest.mark.parametrize("name", ["server.pt", "client_00001.pt"])
def test_a_planted_file_runs_no_code(toy, saved, tmp_path, name):
    """Also where whoever planted it wrote down its hash."""
    plant(saved, name, f"touch {tmp_path}/owned")
    with refusal(f"{name}: cannot be read") as caught:
        toy(rounds=3).run()
    assert "weights_only" not in str(caught.value)
    assert not (tmp_path / "owned").exists()


BOMBS = {
    "repeated": torch.zeros(1).expand(1 << 20, 1 << 20),
    "sparse": torch.sparse_coo_tensor(
        torch.zeros(2, 0, dtype=torch.long), torch.zeros(0), (1 << 30, 1 << 30)
    ),
    "nowhere": torch.zeros(3, device="meta"),
    "packed": torch.zeros(1 << 20),
    "behind a hole": torch.zeros(1),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_planted_file_fills_no_memory(tmp_path, kind):
    path = tmp_path / "server.pt"
    torch.save({"w": BOMBS[kind]}, path)
    if kind == "packed":
        with zipfile.ZipFile(path) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in parts.items():
                archive.writestr(name, content)
    if kind == "behind a hole":
        content = path.read_bytes()
        with path.open("wb") as file:
            file.seek(1 << 40)
            file.write(content)
    with pytest.raises(UserError, match="server.pt: cannot be read"):
        read_state(path, "0" * 64 if kind == "behind a hole" else None)


def test_what_a_killed_process_had_no_time_to_remove_is_removed_by_the_next(toy, saved):
    """Whole or in part: the newest alone is what a run stands on."""
    shutil.copytree(saved, saved.with_name("round_100000"))
    (saved.with_name("round_100001")).mkdir()
    toy(rounds=2).run()
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_other_images_are_refused(toy, saved):
    federation = toy(rounds=3)
    federation.checkpoints.images = "others"
    with pytest.raises(UserError, match="begun with other images"):
        federation.run()


@pytest.mark.parametrize(
    ("now", "named"),
    [({"own/a.py": "1"}, None), ({"own/a.py": "2"}, "own/a.py"), ({}, "own/a.py"), (None, None)],
)
def test_a_run_of_other_own_code_is_resumed_with_a_warning(tmp_path, now, named):
    checkpoints = Checkpoints(tmp_path / "run", code={"own/a.py": "1"})
    checkpoints.begin(1)
    folder = checkpoints.commit(1, {"server": {}, "history": []})
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert Checkpoints(tmp_path / "run", code=now).load(folder)[0] == 1
    assert [str(one.message) for one in seen] == (
        [f"{tmp_path}: {named} was changed after its last round"] if named else []
    )


def test_a_state_that_could_not_be_read_again_is_refused_when_it_is_written(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.begin(1)
    with pytest.raises(UserError, match=r"server\.pt: a .*Foreign is kept"):
        checkpoints.commit(1, {"server": {"w": Foreign()}, "history": []})


def test_unchanged_files_are_not_read_again(tmp_path, monkeypatch):
    read = Counter()
    monkeypatch.setattr(module, "sha256", lambda path: (read.update([path.name]), sha256(path))[1])
    pool, checkpoints = ClientPool({}, tmp_path / "personal"), Checkpoints(tmp_path / "checkpoints")
    for client in range(3):
        pool.put(client, {"x": torch.ones(4)})
    for round in (1, 2, 3):
        pool.put(0, {"x": torch.full((4,), float(round))})
        pool.save(checkpoints.begin(round), checkpoints.latest())
        complete = checkpoints.commit(round, {"server": {}, "history": []})
    assert read == {"server.pt": 3, "client_00000.pt": 3, "client_00001.pt": 1, "client_00002.pt": 1}
    files = json.loads((complete / "meta.json").read_text())["files"]
    assert files == {path.name: sha256(path) for path in complete.glob("*.pt")}


@pytest.mark.slow
def test_reports_of_earlier_rounds_are_written_once_and_those_of_the_set_up_may_change(tmp_path):
    setup, history = RoundReport(0, "set-up", [0]), [RoundReport(1, "train", [0, 1], {3: "gone"})]
    files = []
    for last in range(2, 3 * module._REPORTS_PER_FILE):
        checkpoints = Checkpoints(tmp_path)  # that of a run that was resumed in every round
        checkpoints.begin(last)
        history.append(RoundReport(last, "train", [0], per_client={0: {"loss": 1 / last}}))
        setup.participants.append(last)
        folder = checkpoints.commit(last, {"server": {}, "history": [setup, *history]})
        files.append({path.name: path.stat().st_ino for path in folder.glob("history_*")})
    assert checkpoints.load(folder)[1]["history"] == [setup, *history]
    assert files[-1].keys() == {"history_00000.pt", "history_00001.pt"}
    assert len({found["history_00000.pt"] for found in files if found}) == 1


def test_a_run_adopts_the_checkpoint_of_another_one_under_its_own_identity(saved, tmp_path):
    old, new = Checkpoints(saved.parent), Checkpoints(tmp_path / "new", "other", "images")
    folder, state = new.adopt(old)
    assert new.latest() == folder
    assert new.load(folder)[1].keys() == state.keys()
    assert {path.name for path in folder.iterdir()} == {path.name for path in saved.iterdir()}
    with pytest.raises(UserError, match="begun under another configuration"):
        Checkpoints(tmp_path / "new", "mine").load(folder)
    assert saved.exists()
    with pytest.raises(UserError, match="holds no checkpoint"):
        new.adopt(Checkpoints(tmp_path / "empty"))


def test_a_changed_file_is_found_in_the_run_that_adopted_it_too(saved, tmp_path):
    (saved / "client_00000.pt").write_bytes(b"changed")
    new = Checkpoints(tmp_path / "new")
    folder, _ = new.adopt(Checkpoints(saved.parent))
    with pytest.raises(UserError, match=r"client_00000\.pt"):
        ClientPool({}, tmp_path).restore(folder, {0})


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_write_that_is_interrupted_ends_as_the_interruption(tmp_path, monkeypatch, stop):
    """Torch's own error, of a zip file that it cannot close, would say nothing of it."""

    def interrupted(*_):
        try:
            raise stop
        finally:
            raise RuntimeError("unexpected pos")

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(stop):
        module.write_state({}, tmp_path / "state.pt")
