"""A database and a run's tracking files that were changed by hand: told in one line, in bounded time, nothing lost."""

import json
import shutil
import sqlite3

import pytest
from helpers.refusals import refusal

from lit_fedad.tracking import sender
from lit_fedad.tracking.journal import read_record
from lit_fedad.tracking.reading import find_run_folder, metric_history, tracked_runs
from lit_fedad.tracking.sender import Delivery, deliver
from lit_fedad.tracking.server import ServerRun
from lit_fedad.tracking.tracker import Tracker


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr(sender, "_PAUSES_S", (0.0,))


@pytest.fixture
def run(tmp_path, client):
    """A tracked run: its folder, and its MLflow id."""
    tracker = Tracker(tmp_path / "run", "forged", "run")
    tracker.metrics({"loss": 1.0}, 1)
    return tmp_path / "run", tracker.close(timeout_s=120).run_id


def add(folder, *lines):
    with (folder / "tracking/journal.jsonl").open("ab") as file:
        file.writelines(line + b"\n" for line in lines)


RECORD = {"kind": "metrics", "scope": 2, "values": {"loss": 0.5}, "time": 1 << 42}
RECORD_LINE = json.dumps(RECORD).encode()


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "other"},
        {"kind": []},
        {"scope": {}},
        {"time": "now"},
        {"time": 1 << 70},
        {"values": [1]},
        {"values": {"loss": "x"}},
        {"values": {"loss": float("nan")}},
        {"kind": "tags", "values": {"a": 1}},
        {"kind": "start", "values": {"journal": "a"}},
        {"kind": "end", "values": {}},
        {"more": [[]] * (1 << 22)},
    ],
    ids=lambda changed: str(changed)[:40],
)
def test_a_line_that_is_no_record_is_not_read(changed):
    assert read_record(RECORD_LINE) == RECORD
    with pytest.raises(ValueError, match="^(it does not hold|it has|the number|NaN)"):
        read_record(json.dumps({**RECORD, **changed}).encode())


def test_of_many_refused_records_each_further_one_is_sent_once(run, monkeypatch):
    """A journal may hold any number of them, and three attempts take most of a second."""
    folder, probes = run[0], []
    monkeypatch.setattr(ServerRun, "probe", lambda self: probes.append(self))
    add(folder, *[b"{}"] * 6)
    assert deliver(folder).refused == 6
    assert len(probes) == 3 + 5


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (b"garbage", "Expecting value"),
        (b"[]", "it does not hold what a run writes"),
        (RECORD_LINE, "it does not begin a run"),
        (
            b'{"kind": "start", "scope": null, "time": 1,'
            b' "values": {"experiment": "a", "run_name": "b", "journal": "x\' OR 1=1 --"}}',
            "it does not begin a run",
        ),
    ],
    ids=["garbage", "list", "other record", "search expression"],
)
def test_a_journal_that_begins_otherwise_is_told_with_its_file(run, changed, said):
    folder, _ = run
    journal = folder / "tracking/journal.jsonl"
    journal.write_bytes(b"\n".join([changed, *journal.read_bytes().split(b"\n")[1:]]))
    (folder / "tracking/sent.json").unlink()
    delivery = deliver(folder)
    assert delivery.pending > 0
    assert delivery.error.startswith(f"{journal}: its first line cannot be read ({said}")


@pytest.mark.parametrize(
    "account", [{"delivered": 10_000}, {"delivered": 1 << 70}, {"run_id": "a' OR 1=1\0"}], ids=str
)
def test_a_forged_account_of_what_was_sent_hides_no_record(run, history, account):
    folder, run_id = run
    sent = folder / "tracking/sent.json"
    sent.write_text(json.dumps({**json.loads(sent.read_text()), **account}))
    add(folder, RECORD_LINE)
    assert deliver(folder) == Delivery(run_id, 0, None)
    assert history(run_id, "loss") == [(1, 1.0), (2, 0.5)]


def test_refused_records_in_any_bytes_are_kept(run):
    folder, run_id = run
    rejected = folder / "tracking/rejected.jsonl"
    rejected.write_bytes(b"\xff\xfe\n[]\n" + b"[" * 100_000 + b"\n")
    before = rejected.read_bytes()
    delivery = deliver(folder)
    assert (delivery.run_id, delivery.pending, delivery.refused) == (run_id, 0, 3)
    assert rejected.read_bytes() == before


def test_a_folder_in_the_place_of_a_database_is_told_at_once(tmp_path, monkeypatch):
    """MLflow would try to open it for two minutes."""
    (tmp_path / "mlflow.db").mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    folder = tmp_path / "run"
    delivery = Tracker(folder, "forged", "run").close(timeout_s=120)
    assert delivery.error == f"{tmp_path}/mlflow.db: is no file of a database; set MLFLOW_TRACKING_URI"


@pytest.fixture
def forge(run, database, tmp_path, monkeypatch):
    """Changes a copy of the database, which is then that of the user; `:run` stands for the run's id."""

    def change(statement):
        shutil.copy(database / "mlflow.db", tmp_path / "mlflow.db")
        connection = sqlite3.connect(tmp_path / "mlflow.db")
        connection.executescript(statement.replace(":run", f"'{run[1]}'"))
        connection.close()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
        return run[1]

    return change


def test_a_run_without_name_has_its_id(forge):
    run_id = forge(
        "update runs set name = null where run_uuid = :run; delete from tags where key = 'mlflow.runName'"
    )
    (run,) = [run for run in tracked_runs(["forged"]) if run.run_id == run_id]
    assert run.name == run_id


def test_a_tag_without_value_is_none(forge):
    run_id = forge("update tags set value = null where run_uuid = :run")
    (run,) = [run for run in tracked_runs(["forged"]) if run.run_id == run_id]
    assert run.folder is None
    with refusal("has no tag lit_fedad.out"):
        find_run_folder(run_id)


def test_a_folder_with_a_name_of_any_length_is_one_short_line(forge):
    name = "/" + "x" * 7000
    with refusal("is too long for a path") as caught:
        find_run_folder(forge(f"update tags set value = '{name}' where run_uuid = :run and key like '%.out'"))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", ["'text'", "1e308", "9e999"])
def test_a_history_holds_what_a_figure_can_show(forge, value):
    run_id = forge(f"update metrics set value = {value} where run_uuid = :run")
    assert metric_history(run_id, "loss") == []


def test_an_error_that_mlflow_raises_is_not_printed_too(forge, capfd):
    forge("drop table latest_metrics")
    with refusal("no such"):
        tracked_runs(["forged"])
    assert "Traceback" not in capfd.readouterr().err
