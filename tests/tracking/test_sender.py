import json
import logging
import os
import threading

import mlflow
import pytest

from lit_fedad.core.errors import UserError
from lit_fedad.tracking import sender
from lit_fedad.tracking.sender import Delivery, deliver
from lit_fedad.tracking.tracker import Tracker


@pytest.mark.slow
def test_progress_lost_in_a_crash_repeats_nothing_on_the_server(tmp_path, client, history):
    tracker = Tracker(tmp_path, "crash", "run")
    tracker.params({"seed": 0})
    tracker.metrics({"loss": 1.0}, 1)
    tracker.dataset("bottle", "/data", "d", {}, "training")
    run_id = tracker.close(timeout_s=120).run_id
    (tmp_path / "tracking/sent.json").unlink()
    assert deliver(tmp_path) == Delivery(run_id, 0, None)
    assert history(run_id, "loss") == [(1, 1.0)]
    run = client.get_run(run_id)
    assert len(run.inputs.dataset_inputs) == 1
    assert len(client.search_runs([run.info.experiment_id])) == 1


def test_run_deleted_on_the_server_is_sent_anew(tmp_path, client, history):
    tracker = Tracker(tmp_path, "deleted", "run")
    tracker.metrics({"loss": 1.0}, 1)
    first = tracker.close(timeout_s=120).run_id
    client.delete_run(first)
    again = deliver(tmp_path)
    assert again.pending == 0
    assert again.run_id != first
    assert history(again.run_id, "loss") == [(1, 1.0)]


def test_a_folder_that_names_another_run_changes_nothing_of_that_run(tmp_path, client, history):
    trackers = [Tracker(tmp_path / name, "own", name) for name in ("victim", "foreign")]
    for number, tracker in enumerate(trackers):
        tracker.metrics({"loss": 1.0 + number}, 1)
    victim, foreign = (tracker.close(timeout_s=120).run_id for tracker in trackers)
    sent = tmp_path / "foreign/tracking/sent.json"
    sent.write_text(json.dumps({**json.loads(sent.read_text()), "run_id": victim, "delivered": 0}))
    assert deliver(tmp_path / "foreign") == Delivery(foreign, 0, None)
    assert history(victim, "loss") == [(1, 1.0)]
    assert client.get_run(victim).info.run_name == "victim"


@pytest.mark.slow
def test_hanging_server_never_holds_training_up(
    tmp_path, client, journal, history, hanging_server, monkeypatch
):
    (tmp_path / "a.txt").write_text("a")
    tracker = Tracker(tmp_path, "hang", "run", uri=hanging_server)
    tracker.params({"seed": 0})
    for step in range(1, 21):
        tracker.metrics({f"metric {k}": float(k) for k in range(20)}, step)
    tracker.artifact(tmp_path / "a.txt")
    delivery = tracker.close(timeout_s=1)
    # The first request is still on its way: had a call waited for its end, there would be another error.
    assert delivery.error == f"{hanging_server} has not answered yet"
    # start, tags, params, 20 rounds, artifact, end
    assert delivery.pending == len(journal(tmp_path)) == 25
    assert delivery.run_id is tracker.run_id is None
    assert tracker.close() is delivery

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    delivery = deliver(tmp_path)
    assert delivery.pending == 0
    run = client.get_run(delivery.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"seed": "0"}
    assert history(delivery.run_id, "metric 7") == [(step, 7.0) for step in range(1, 21)]
    assert [file.path for file in client.list_artifacts(delivery.run_id)] == ["a.txt"]


def test_failing_server_is_reported_once_and_the_records_kept(
    tmp_path, history, failing_server, monkeypatch, caplog
):
    with caplog.at_level(logging.INFO):
        tracker = Tracker(tmp_path, "500", "run", uri=failing_server)
        tracker.metrics({"loss": 1.0}, 1)
        delivery = tracker.close(timeout_s=120)
    assert delivery.pending == 4
    assert failing_server in delivery.error
    assert "500" in delivery.error
    assert "\n" not in delivery.error
    (message,) = [record for record in caplog.records if record.name == "lit_fedad.tracking.sender"]
    assert message.levelno == logging.WARNING
    assert str(tmp_path) in message.getMessage()
    assert not (tmp_path / "tracking/rejected.jsonl").exists()
    assert failing_server in deliver(tmp_path).error  # the server of the run is the default

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    repaired = deliver(tmp_path)
    assert repaired.pending == 0
    assert history(repaired.run_id, "loss") == [(1, 1.0)]


def test_server_that_comes_back_gets_everything_during_the_run(tmp_path, history, monkeypatch):
    search_runs, log_batch = mlflow.MlflowClient.search_runs, mlflow.MlflowClient.log_batch
    refused, back = threading.Event(), threading.Event()

    def answer(method):
        def call(*args, **kwargs):
            if not back.is_set():
                refused.set()
                raise ConnectionError("nobody there")
            return method(*args, **kwargs)

        return call

    monkeypatch.setattr(mlflow.MlflowClient, "search_runs", answer(search_runs))
    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", answer(log_batch))
    tracker = Tracker(tmp_path, "back", "run")
    tracker.metrics({"loss": 1.0}, 1)
    assert refused.wait(120)
    assert json.loads((tmp_path / "tracking/sent.json").read_text())["run_id"] is None
    back.set()
    tracker.metrics({"loss": 0.5}, 2)
    delivery = tracker.close(timeout_s=120)
    assert delivery.error is None
    assert history(delivery.run_id, "loss") == [(1, 1.0), (2, 0.5)]


def test_refused_record_does_not_block_those_behind_it(tmp_path, client, history, caplog):
    tracker = Tracker(tmp_path, "refused", "run")
    tracker.dataset("n" * 501, "/data", "d", {}, "training")  # MLflow allows 500 characters
    tracker.metrics({"loss": 1.0}, 1)
    delivery = tracker.close(timeout_s=120)
    assert delivery.pending == 0
    assert "rejected.jsonl" in delivery.error
    assert history(delivery.run_id, "loss") == [(1, 1.0)]
    assert client.get_run(delivery.run_id).info.status == "FINISHED"
    (line,) = (tmp_path / "tracking/rejected.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert "500" in entry["cause"]
    assert json.loads(entry["record"])["kind"] == "dataset"
    assert "refused a record" in caplog.text


def test_refused_record_is_tried_again_later(tmp_path, client, history, monkeypatch):
    (tmp_path / "a.txt").write_text("a")

    def full(*args):
        raise OSError("artifact store is full")

    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, "log_artifact", full)
        tracker = Tracker(tmp_path, "store", "run")
        tracker.artifact(tmp_path / "a.txt")
        tracker.metrics({"loss": 1.0}, 1)
        delivery = tracker.close(timeout_s=120)
        assert "rejected.jsonl" in delivery.error
        assert history(delivery.run_id, "loss") == [(1, 1.0)]
        assert "rejected.jsonl" in deliver(tmp_path).error
    assert deliver(tmp_path) == Delivery(delivery.run_id, 0, None)
    assert [file.path for file in client.list_artifacts(delivery.run_id)] == ["a.txt"]


def test_what_a_server_refuses_is_warned_of_once_and_counted(tmp_path, monkeypatch, caplog):
    """One that keeps no artifacts refuses each file."""

    def forbid(*args):
        raise PermissionError("no artifacts here")

    monkeypatch.setattr(mlflow.MlflowClient, "log_artifact", forbid)
    tracker = Tracker(tmp_path, "without artifacts", "run")
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
        tracker.artifact(tmp_path / name)
    delivery = tracker.close(timeout_s=120)
    assert (delivery.pending, delivery.refused, delivery.kept) == (0, 2, 2)
    assert caplog.text.count("refused a record") == 1


def test_a_server_that_is_away_is_not_said_to_refuse_what_it_refused_before(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a")

    def away(*args, **kwargs):
        raise ConnectionError("nobody there")

    monkeypatch.setattr(mlflow.MlflowClient, "log_artifact", away)
    tracker = Tracker(tmp_path, "away", "run")
    tracker.artifact(tmp_path / "a.txt")
    assert "refused records" in tracker.close(timeout_s=120).error
    monkeypatch.setattr(mlflow.MlflowClient, "get_run", away)
    monkeypatch.setattr(sender, "_PAUSES_S", (0.0,))
    delivery = deliver(tmp_path)
    assert (delivery.pending, delivery.kept) == (0, 1)
    assert delivery.error.endswith(": nobody there")


def test_missing_artifact_is_skipped_with_a_warning(tmp_path, client, caplog):
    tracker = Tracker(tmp_path, "missing", "run")
    tracker.artifact(tmp_path / "never.png")
    delivery = tracker.close(timeout_s=120)
    assert delivery.error is None
    assert client.list_artifacts(delivery.run_id) == []
    assert f"{tmp_path / 'never.png'} is gone" in caplog.text


def test_folder_can_move_before_its_records_are_sent(tmp_path, client, hanging_server, monkeypatch):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    (old / "a.txt").write_text("a")
    tracker = Tracker(old, "moved", "run", uri=hanging_server)
    tracker.artifact(old / "a.txt")
    tracker.close(timeout_s=0)
    old.rename(new)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    delivery = deliver(new)
    assert [file.path for file in client.list_artifacts(delivery.run_id)] == ["a.txt"]


def test_folder_without_a_journal_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no tracking/journal\.jsonl to send"):
        deliver(tmp_path)


@pytest.mark.slow
def test_interpreter_exits_while_the_sender_hangs(tmp_path, journal, hanging_server, start_python):
    process = start_python(
        """
        import sys, time
        from pathlib import Path
        from lit_fedad.tracking.tracker import Tracker
        tracker = Tracker(Path(sys.argv[1]), "exit", "run", uri=sys.argv[2])
        tracker.metrics({"loss": 1.0}, 1)
        while "mlflow.tracking.client" not in sys.modules:
            time.sleep(0.05)
        time.sleep(0.5)  # in the request by now, which ends after ten minutes
        """,
        tmp_path,
        hanging_server,
    )
    assert process.communicate(timeout=600) == ("", "")
    assert [record["kind"] for record in journal(tmp_path)] == ["start", "tags", "metrics"]


@pytest.mark.slow
def test_training_survives_a_broken_mlflow(tmp_path, start_python):
    (tmp_path / "mlflow.py").write_text("raise ImportError('mlflow is broken here')")
    modules = filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])
    process = start_python(
        """
        import sys
        from pathlib import Path
        from lit_fedad.tracking.tracker import Tracker
        assert "mlflow" not in sys.modules
        tracker = Tracker(Path(sys.argv[1]), "broken", "run")
        tracker.metrics({"loss": 1.0}, 1)
        print(tracker.close(timeout_s=120))
        """,
        tmp_path / "run",
        PYTHONPATH=os.pathsep.join(modules),
    )
    output, errors = process.communicate(timeout=600)
    assert "pending=4" in output, errors
    assert "mlflow is broken here" in output
    assert errors.count("\n") == 1


def test_the_user_of_an_address_is_used_but_neither_said_nor_stored(
    tmp_path, failing_server, monkeypatch, caplog
):
    address = failing_server.replace("http://", "http://me:pl4nted@")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    tracker = Tracker(tmp_path, "secret", "run", tags={"stopped": f"no answer from {address}"})
    tracker.params({"address": address})
    delivery = tracker.close(timeout_s=120)
    assert failing_server.replace("http://", "http://***@") in delivery.error
    assert json.loads((tmp_path / "tracking/sent.json").read_text())["uri"] == failing_server
    texts = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any("pl4nted" in text for text in (*texts, delivery.error, caplog.text))


@pytest.mark.parametrize(
    "content", ["[]", "[" * 100_000, '{"uri": [], "delivered": "x"}', '{"delivered": -3}', "3"]
)
def test_a_damaged_account_of_what_was_sent_costs_no_more_than_sending_again(
    tmp_path, client, history, content
):
    tracker = Tracker(tmp_path, "damaged", "run")
    tracker.metrics({"loss": 1.0}, 1)
    run_id = tracker.close(timeout_s=120).run_id
    (tmp_path / "tracking/sent.json").write_text(content)
    assert deliver(tmp_path) == Delivery(run_id, 0, None)
    assert history(run_id, "loss") == [(1, 1.0)]


def test_a_journal_that_is_removed_meanwhile_hides_no_error_of_the_run(tmp_path, client):
    tracker = Tracker(tmp_path, "removed", "run")
    (tmp_path / "tracking/journal.jsonl").unlink()
    left = tracker.close("FAILED", timeout_s=0)
    assert left.pending == 0
    assert "journal.jsonl is gone" in left.error
