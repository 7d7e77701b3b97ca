import json
import time
from pathlib import Path

import mlflow
import pytest

from lit_fedad.tracking.reading import find_run_folder
from lit_fedad.tracking.sender import Delivery, Sender, deliver
from lit_fedad.tracking.server import RUN_ID, destination
from lit_fedad.tracking.tracker import Tracker, amend


def test_the_id_of_a_run_is_waited_for(tmp_path, client):
    tracker = Tracker(tmp_path, "id", "run")
    run_id = tracker.wait_for_id()
    assert client.get_run(run_id).info.run_name == "run"
    assert tracker.close(timeout_s=120).run_id == tracker.wait_for_id() == run_id


def test_no_id_is_waited_for_that_a_server_refuses(tmp_path, failing_server):
    tracker = Tracker(tmp_path, "500", "run", uri=failing_server)
    tracker._patience_s = None  # no limit: it ends by the server's answer
    assert tracker.wait_for_id() is None
    tracker.close(timeout_s=0)


def test_everything_logged_is_read_back(tmp_path, client, history):
    (tmp_path / "report.html").write_text("<p>done</p>")
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures/roc.txt").write_text("curve")
    tracker = Tracker(tmp_path, "read-back", "seed-0", {"method": "feddymem"}, parent_run_id="a" * 32)
    tracker.params(
        {"seed": 0, "federation": {"rounds": 3, "lr": 1e-3}, "layers": ["a", "b"], "long": "x" * 9999}
    )
    tracker.metrics({"image_auroc": 0.5, "client 1/pixel_auroc@0.3": 0.25}, step=1)
    tracker.metrics({"image_auroc": 0.75}, step=2)
    tracker.artifact(tmp_path / "report.html")
    tracker.artifact(tmp_path / "figures", "pictures")
    tracker.dataset("bottle", "/data/bottle", "d" * 64, {"images": 292}, "training")
    tracker.tags({"best_round": "2", "picture": f"of {RUN_ID}"})
    delivery = tracker.close(timeout_s=120)

    assert delivery.pending == 0
    assert delivery.error is None
    run = client.get_run(delivery.run_id)
    assert run.info.run_name == "seed-0"
    assert run.info.status == "FINISHED"
    assert run.info.end_time >= run.info.start_time
    assert client.get_experiment(run.info.experiment_id).name == "read-back"
    assert run.data.tags["method"] == "feddymem"
    assert run.data.tags["best_round"] == "2"
    assert run.data.tags["picture"] == f"of {run.info.run_id}"
    assert run.data.tags["mlflow.parentRunId"] == "a" * 32
    params = run.data.params
    assert len(params.pop("long")) == 6000
    assert params == {"seed": "0", "federation.rounds": "3", "federation.lr": "0.001", "layers": "['a', 'b']"}
    assert history(delivery.run_id, "image_auroc") == [(1, 0.5), (2, 0.75)]
    assert history(delivery.run_id, "client 1/pixel_auroc_0.3") == [(1, 0.25)]
    assert [file.path for file in client.list_artifacts(delivery.run_id)] == ["pictures", "report.html"]
    assert [file.path for file in client.list_artifacts(delivery.run_id, "pictures")] == ["pictures/roc.txt"]
    (used,) = run.inputs.dataset_inputs
    assert (used.dataset.name, used.dataset.digest) == ("bottle", "d" * 36)
    assert json.loads(used.dataset.source) == {"uri": "/data/bottle"}
    assert json.loads(used.dataset.profile) == {"images": 292}
    assert [(tag.key, tag.value) for tag in used.tags] == [("mlflow.data.context", "training")]
    assert find_run_folder(delivery.run_id) == tmp_path


def test_one_request_for_each_call_of_metrics(tmp_path, monkeypatch):
    calls = []
    log_batch = mlflow.MlflowClient.log_batch

    def counted(self, run_id, metrics=(), **other):
        if metrics:
            calls.append(len(metrics))
        return log_batch(self, run_id, metrics=metrics, **other)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", counted)
    tracker = Tracker(tmp_path, "batches", "run")
    for step in range(3):
        tracker.metrics({f"client {k}/loss": float(k) for k in range(40)}, step)
    tracker.metrics({f"client {k}/loss": float(k) for k in range(1200)}, 3)
    assert tracker.close(timeout_s=120).pending == 0
    # MLflow takes at most 1000 in one request.
    assert calls == [40, 40, 40, 1000, 200]


def test_resumed_run_continues_without_duplicates(tmp_path, client, journal, history):
    def log_round(tracker, step):
        tracker.metrics({"loss": 1 / step, "auroc": step / 10}, step)

    report = tmp_path / "report.html"
    report.write_text("first")
    first = Tracker(tmp_path, "resume", "run", {"state": "new"})
    first.params({"seed": 0, "rounds": 3})
    log_round(first, 1)
    log_round(first, 2)
    first.artifact(report)
    before = first.close("FAILED", timeout_s=120)
    lines = len(journal(tmp_path))

    second = Tracker(tmp_path, "resume", "run", {"state": "resumed"})
    second.params({"seed": 0, "rounds": 5})
    log_round(second, 2)
    second.artifact(report)
    # Only the new start and the changed tag were added.
    assert [record["kind"] for record in journal(tmp_path)[lines:]] == ["start", "tags"]
    while json.loads((tmp_path / "tracking/sent.json").read_text())["delivered"] < lines + 2:
        time.sleep(0.01)
    assert client.get_run(before.run_id).info.status == "RUNNING"
    assert second.run_id == before.run_id
    # Training times differ in the repeated round; the points already drawn stay.
    second.metrics({"loss": 99.0, "seconds": 7.0}, 2)
    log_round(second, 3)
    report.write_text("second version")
    second.artifact(report)
    after = second.close(timeout_s=120)

    assert after == Delivery(before.run_id, 0, None)
    run = client.get_run(after.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"seed": "0", "rounds": "3"}
    assert run.data.tags["state"] == "resumed"
    assert history(after.run_id, "loss") == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert history(after.run_id, "seconds") == [(2, 7.0)]
    assert Path(client.download_artifacts(after.run_id, "report.html")).read_text() == "second version"


def test_disabled_tracker_does_nothing(tmp_path):
    tracker = Tracker(tmp_path, "off", "run", {"a": "b"}, enabled=False)
    tracker.params({"seed": 0})
    tracker.metrics({"loss": 1.0}, 1)
    tracker.artifact(tmp_path / "a.txt")
    tracker.dataset("bottle", "/data", "d", {}, "training")
    tracker.tags({"a": "c"})
    assert tracker.close() == Delivery(None, 0, None)
    assert tracker.run_id is None
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_wait_ends_and_leaves_the_records(tmp_path, journal, monkeypatch):
    waits = []

    def finish(sender, timeout_s):
        waits.append(timeout_s)
        if timeout_s:
            raise KeyboardInterrupt
        return Delivery(None, 3, "not sent")

    monkeypatch.setattr(Sender, "start", lambda sender: None)
    monkeypatch.setattr(Sender, "finish", finish)
    tracker = Tracker(tmp_path, "patience", "run")
    with pytest.raises(KeyboardInterrupt):
        tracker.close("KILLED")
    assert (tracker.close().pending, waits) == (3, [120, 0])
    assert [r["values"] for r in journal(tmp_path) if r["kind"] == "end"] == [{"status": "KILLED"}]


def test_run_that_is_not_tracked_is_not_amended(tmp_path):
    assert amend(tmp_path, {"auc": 0.5}, 1, [], "privacy") == Delivery(None, 0, None)
    assert not [*tmp_path.iterdir()]


def test_later_numbers_and_files_join_the_run(tmp_path, client, journal, monkeypatch):
    folder, file = tmp_path / "run", tmp_path / "run" / "lira.json"
    tracker = Tracker(folder, "audit", "run")
    tracker.metrics({"loss": 1.0}, step=3)
    before = tracker.close(timeout_s=120)
    file.write_text("1")
    (tmp_path / "elsewhere").mkdir()
    home = destination(None)
    monkeypatch.chdir(tmp_path / "elsewhere")  # what the folder says of its server is not believed
    assert "set MLFLOW_TRACKING_URI" in amend(folder, {"auc": 0.75}, 3, [file], "privacy").error
    monkeypatch.setenv("MLFLOW_TRACKING_URI", home)
    assert deliver(folder) == Delivery(before.run_id, 0, None)
    file.write_text("other")
    (tmp_path / "elsewhere" / "own.json").write_text("the user's")
    files = [file, tmp_path / "elsewhere" / "own.json"]
    assert amend(folder, {"auc": 0.5, "lost": float("nan")}, 3, files, "privacy").error is None
    run = client.get_run(before.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.metrics == {"loss": 1.0, "auc": 0.5}
    assert [item.path for item in client.list_artifacts(before.run_id, "privacy")] == ["privacy/lira.json"]
    artifact = next(record["values"] for record in journal(folder) if record["kind"] == "artifact")
    assert artifact.keys() == {"lira.json"}
