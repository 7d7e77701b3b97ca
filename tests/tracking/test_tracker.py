import contextlib
import json
import logging
import math
import os
import socket
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import mlflow
import pytest

from lit_fedad.errors import UserError
from lit_fedad.tracking.tracker import Delivery, Tracker, deliver, find_run_folder


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """A folder to work in, whose database is migrated once: that takes seconds."""
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture(autouse=True)
def working_directory(database, monkeypatch):
    monkeypatch.chdir(database)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    # The sender sets what is unset; undone after each test.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


@pytest.fixture
def client(database):
    return mlflow.MlflowClient(tracking_uri=f"sqlite:///{database}/mlflow.db")


@pytest.fixture
def hanging_server():
    """Accepts every connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted = []

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(server.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        for connection in accepted:
            connection.close()


@pytest.fixture
def failing_server():
    """Answers every request with 500."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(500)

        def do_POST(self):
            self.do_GET()

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def journal(folder):
    return [json.loads(line) for line in (folder / "tracking/journal.jsonl").read_text().splitlines()]


def history(client, run_id, name):
    return [(point.step, point.value) for point in client.get_metric_history(run_id, name)]


def test_everything_logged_is_read_back(tmp_path, client):
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
    tracker.tags({"best_round": "2"})
    delivery = tracker.close()

    assert delivery.pending == 0
    assert delivery.error is None
    run = client.get_run(delivery.run_id)
    assert run.info.run_name == "seed-0"
    assert run.info.status == "FINISHED"
    assert run.info.end_time >= run.info.start_time
    assert client.get_experiment(run.info.experiment_id).name == "read-back"
    assert run.data.tags["method"] == "feddymem"
    assert run.data.tags["best_round"] == "2"
    assert run.data.tags["mlflow.parentRunId"] == "a" * 32
    params = run.data.params
    assert len(params.pop("long")) == 6000
    assert params == {"seed": "0", "federation.rounds": "3", "federation.lr": "0.001", "layers": "['a', 'b']"}
    assert history(client, delivery.run_id, "image_auroc") == [(1, 0.5), (2, 0.75)]
    assert history(client, delivery.run_id, "client 1/pixel_auroc_0.3") == [(1, 0.25)]
    assert [file.path for file in client.list_artifacts(delivery.run_id)] == ["pictures", "report.html"]
    assert [file.path for file in client.list_artifacts(delivery.run_id, "pictures")] == ["pictures/roc.txt"]
    (used,) = run.inputs.dataset_inputs
    assert (used.dataset.name, used.dataset.digest) == ("bottle", "d" * 36)
    assert json.loads(used.dataset.source) == {"uri": "/data/bottle"}
    assert json.loads(used.dataset.profile) == {"images": 292}
    assert [(tag.key, tag.value) for tag in used.tags] == [("mlflow.data.context", "training")]
    assert find_run_folder(delivery.run_id) == tmp_path


def test_default_uri_is_the_database_of_the_working_directory(tmp_path, database, client):
    (tmp_path / "a.txt").write_text("a")
    tracker = Tracker(tmp_path, "default", "run")
    tracker.artifact(tmp_path / "a.txt")
    run_id = tracker.close().run_id
    assert Path(client.get_run(run_id).info.artifact_uri.removeprefix("file://")).is_relative_to(
        database / "mlruns"
    )
    assert (
        json.loads((tmp_path / "tracking/sent.json").read_text())["uri"] == f"sqlite:///{database}/mlflow.db"
    )


def test_environment_names_the_server_and_an_argument_overrides_it(
    tmp_path, monkeypatch, failing_server, database
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", failing_server)
    assert failing_server in Tracker(tmp_path / "a", "uri", "run").close(timeout_s=10).error
    explicit = f"sqlite:///{database}/mlflow.db"
    assert Tracker(tmp_path / "b", "uri", "run", uri=explicit).close().error is None


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
    assert tracker.close().pending == 0
    # MLflow takes at most 1000 in one request.
    assert calls == [40, 40, 40, 1000, 200]


def test_values_that_are_not_finite_are_dropped(tmp_path, client):
    tracker = Tracker(tmp_path, "finite", "run")
    tracker.metrics({"loss": math.nan, "score": math.inf, "kept": 1.0}, step=1)
    tracker.metrics({"loss": math.nan}, step=2)
    delivery = tracker.close()
    assert client.get_run(delivery.run_id).data.metrics == {"kept": 1.0}
    assert [record["values"] for record in journal(tmp_path) if record["kind"] == "metrics"] == [
        {"kept": 1.0}
    ]


def test_resumed_run_continues_without_duplicates(tmp_path, client):
    def log_round(tracker, step):
        tracker.metrics({"loss": 1 / step, "auroc": step / 10}, step)

    report = tmp_path / "report.html"
    report.write_text("first")
    first = Tracker(tmp_path, "resume", "run", {"state": "new"})
    first.params({"seed": 0, "rounds": 3})
    log_round(first, 1)
    log_round(first, 2)
    first.artifact(report)
    before = first.close("FAILED")
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
    after = second.close()

    assert after == Delivery(before.run_id, 0, None)
    run = client.get_run(after.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"seed": "0", "rounds": "3"}
    assert run.data.tags["state"] == "resumed"
    assert history(client, after.run_id, "loss") == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert history(client, after.run_id, "seconds") == [(2, 7.0)]
    assert Path(client.download_artifacts(after.run_id, "report.html")).read_text() == "second version"


def test_half_written_last_line_is_forgotten(tmp_path, client):
    tracker = Tracker(tmp_path, "kill", "run")
    tracker.metrics({"loss": 1.0}, 1)
    run_id = tracker.close().run_id
    with (tmp_path / "tracking/journal.jsonl").open("ab") as file:
        file.write(b'{"kind": "metrics", "scope": 2, "values": {"lo')
    assert deliver(tmp_path) == Delivery(run_id, 0, None)

    tracker = Tracker(tmp_path, "kill", "run")
    tracker.metrics({"loss": 0.5}, 2)
    assert tracker.close() == Delivery(run_id, 0, None)
    assert history(client, run_id, "loss") == [(1, 1.0), (2, 0.5)]


def test_progress_lost_in_a_crash_repeats_nothing_on_the_server(tmp_path, client):
    tracker = Tracker(tmp_path, "crash", "run")
    tracker.params({"seed": 0})
    tracker.metrics({"loss": 1.0}, 1)
    tracker.dataset("bottle", "/data", "d", {}, "training")
    run_id = tracker.close().run_id
    (tmp_path / "tracking/sent.json").unlink()
    assert deliver(tmp_path) == Delivery(run_id, 0, None)
    assert history(client, run_id, "loss") == [(1, 1.0)]
    run = client.get_run(run_id)
    assert len(run.inputs.dataset_inputs) == 1
    assert len(client.search_runs([run.info.experiment_id])) == 1


def test_run_deleted_on_the_server_is_sent_anew(tmp_path, client):
    tracker = Tracker(tmp_path, "deleted", "run")
    tracker.metrics({"loss": 1.0}, 1)
    first = tracker.close().run_id
    client.delete_run(first)
    again = deliver(tmp_path)
    assert again.pending == 0
    assert again.run_id != first
    assert history(client, again.run_id, "loss") == [(1, 1.0)]


def test_hanging_server_never_holds_training_up(tmp_path, client, database, hanging_server):
    (tmp_path / "a.txt").write_text("a")
    started = time.perf_counter()
    tracker = Tracker(tmp_path, "hang", "run", uri=hanging_server)
    tracker.params({"seed": 0})
    times = []
    for step in range(1, 21):
        before = time.perf_counter()
        tracker.metrics({f"metric {k}": float(k) for k in range(20)}, step)
        times.append(time.perf_counter() - before)
    tracker.artifact(tmp_path / "a.txt")
    delivery = tracker.close(timeout_s=1)
    assert time.perf_counter() - started < 2.5
    assert statistics.median(times) < 0.02
    # start, tags, params, 20 rounds, artifact, end
    assert delivery.pending == len(journal(tmp_path)) == 25
    assert delivery.run_id is tracker.run_id is None
    assert hanging_server in delivery.error
    assert tracker.close() is delivery

    delivery = deliver(tmp_path, uri=f"sqlite:///{database}/mlflow.db")
    assert delivery.pending == 0
    run = client.get_run(delivery.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"seed": "0"}
    assert history(client, delivery.run_id, "metric 7") == [(step, 7.0) for step in range(1, 21)]
    assert [file.path for file in client.list_artifacts(delivery.run_id)] == ["a.txt"]


def test_failing_server_is_reported_once_and_the_records_kept(tmp_path, client, failing_server, caplog):
    with caplog.at_level(logging.INFO):
        tracker = Tracker(tmp_path, "500", "run", uri=failing_server)
        tracker.metrics({"loss": 1.0}, 1)
        delivery = tracker.close()
    assert delivery.pending == 4
    assert failing_server in delivery.error
    assert "500" in delivery.error
    assert "\n" not in delivery.error
    (message,) = [record for record in caplog.records if record.name == "lit_fedad.tracking.tracker"]
    assert message.levelno == logging.WARNING
    assert str(tmp_path) in message.getMessage()
    assert not (tmp_path / "tracking/rejected.jsonl").exists()
    assert failing_server in deliver(tmp_path).error  # the server of the run is the default

    mended = deliver(tmp_path, uri="sqlite:///mlflow.db")
    assert mended.pending == 0
    assert history(client, mended.run_id, "loss") == [(1, 1.0)]


def test_server_that_comes_back_gets_everything_during_the_run(tmp_path, client, monkeypatch):
    search_runs, log_batch, down = mlflow.MlflowClient.search_runs, mlflow.MlflowClient.log_batch, [True]

    def answer(method):
        def call(*args, **kwargs):
            if down[0]:
                raise ConnectionError("nobody there")
            return method(*args, **kwargs)

        return call

    monkeypatch.setattr(mlflow.MlflowClient, "search_runs", answer(search_runs))
    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", answer(log_batch))
    tracker = Tracker(tmp_path, "back", "run")
    tracker.metrics({"loss": 1.0}, 1)
    time.sleep(0.2)
    assert json.loads((tmp_path / "tracking/sent.json").read_text())["run_id"] is None
    down[0] = False
    tracker.metrics({"loss": 0.5}, 2)
    delivery = tracker.close()
    assert delivery.error is None
    assert history(client, delivery.run_id, "loss") == [(1, 1.0), (2, 0.5)]


def test_refused_record_does_not_block_those_behind_it(tmp_path, client, monkeypatch, caplog):
    tracker = Tracker(tmp_path, "refused", "run")
    tracker.dataset("n" * 501, "/data", "d", {}, "training")  # MLflow allows 500 characters
    tracker.metrics({"loss": 1.0}, 1)
    delivery = tracker.close()
    assert delivery.pending == 0
    assert "rejected.jsonl" in delivery.error
    assert history(client, delivery.run_id, "loss") == [(1, 1.0)]
    assert client.get_run(delivery.run_id).info.status == "FINISHED"
    (line,) = (tmp_path / "tracking/rejected.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert "500" in entry["cause"]
    assert json.loads(entry["record"])["kind"] == "dataset"
    assert "refused a record" in caplog.text


def test_refused_record_is_tried_again_later(tmp_path, client, monkeypatch):
    (tmp_path / "a.txt").write_text("a")

    def full(*args):
        raise OSError("artifact store is full")

    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, "log_artifact", full)
        tracker = Tracker(tmp_path, "store", "run")
        tracker.artifact(tmp_path / "a.txt")
        tracker.metrics({"loss": 1.0}, 1)
        delivery = tracker.close()
        assert "rejected.jsonl" in delivery.error
        assert history(client, delivery.run_id, "loss") == [(1, 1.0)]
        assert "rejected.jsonl" in deliver(tmp_path).error
    assert deliver(tmp_path) == Delivery(delivery.run_id, 0, None)
    assert [file.path for file in client.list_artifacts(delivery.run_id)] == ["a.txt"]


def test_missing_artifact_is_skipped_with_a_warning(tmp_path, client, caplog):
    tracker = Tracker(tmp_path, "missing", "run")
    tracker.artifact(tmp_path / "never.png")
    delivery = tracker.close()
    assert delivery.error is None
    assert client.list_artifacts(delivery.run_id) == []
    assert f"{tmp_path / 'never.png'} is gone" in caplog.text


def test_folder_can_move_before_its_records_are_sent(tmp_path, client, hanging_server):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    (old / "a.txt").write_text("a")
    tracker = Tracker(old, "moved", "run", uri=hanging_server)
    tracker.artifact(old / "a.txt")
    tracker.close(timeout_s=0)
    old.rename(new)
    delivery = deliver(new, uri="sqlite:///mlflow.db")
    assert [file.path for file in client.list_artifacts(delivery.run_id)] == ["a.txt"]


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


def test_user_errors_are_one_line(tmp_path, monkeypatch, client):
    with pytest.raises(UserError, match=r"no tracking/journal\.jsonl to send"):
        deliver(tmp_path)
    with pytest.raises(UserError, match=r"^MLflow run nope was not found at sqlite.*$"):
        find_run_folder("nope")
    run_id = client.create_run("0").info.run_id
    with pytest.raises(UserError, match="no run of lit-fedad"):
        find_run_folder(run_id)
    client.set_tag(run_id, "lit_fedad.out", str(tmp_path / "gone"))
    with pytest.raises(UserError, match="which is not there"):
        find_run_folder(run_id)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no database"):
        find_run_folder(run_id)
    assert not (tmp_path / "mlflow.db").exists()


def run_python(code, *arguments, **environment):
    """Runs code in a fresh interpreter; returns its output and how long it took."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done, time.perf_counter() - started


def test_interpreter_exits_while_the_sender_hangs(tmp_path, hanging_server):
    done, _ = run_python(
        """
        import sys, time
        from pathlib import Path
        from lit_fedad.tracking.tracker import Tracker
        tracker = Tracker(Path(sys.argv[1]), "exit", "run", uri=sys.argv[2])
        tracker.metrics({"loss": 1.0}, 1)
        while "mlflow.tracking.client" not in sys.modules:
            time.sleep(0.05)
        time.sleep(0.5)  # in the request by now
        print(time.time())
        """,
        tmp_path,
        hanging_server,
    )
    assert time.time() - float(done.stdout) < 5
    assert done.stderr == ""
    assert [record["kind"] for record in journal(tmp_path)] == ["start", "tags", "metrics"]


def test_training_survives_a_broken_mlflow(tmp_path):
    (tmp_path / "mlflow.py").write_text("raise ImportError('mlflow is broken here')")
    done, _ = run_python(
        """
        import sys
        from pathlib import Path
        import lit_fedad.tracking.tracker as tracking
        assert "mlflow" not in sys.modules
        tracker = tracking.Tracker(Path(sys.argv[1]), "broken", "run")
        tracker.metrics({"loss": 1.0}, 1)
        print(tracker.close())
        """,
        tmp_path / "run",
        PYTHONPATH=str(tmp_path),
    )
    assert "pending=4" in done.stdout
    assert "mlflow is broken here" in done.stdout
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_first_use_by_several_runs_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = """
        import sys
        from pathlib import Path
        from lit_fedad.tracking.tracker import Tracker
        tracker = Tracker(Path(sys.argv[1]), "together", sys.argv[1])
        for step in range(50):
            tracker.metrics({f"metric {k}": float(k) for k in range(20)}, step)
        print(tracker.close(timeout_s=60))
        """
    names = [f"run-{k}" for k in range(4)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), name],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    for process in processes:
        output, errors = process.communicate(timeout=120)
        assert "pending=0, error=None" in output, errors
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("together").experiment_id])
    assert sorted(run.info.run_name for run in runs) == names
    for run in runs:
        assert run.info.status == "FINISHED"
        assert len(history(client, run.info.run_id, "metric 3")) == 50


def test_a_kill_while_the_database_is_made_leaves_no_broken_one(tmp_path):
    """What a killed process left of the draft is thrown away, not taken for a database."""
    (tmp_path / "mlflow.db-draft").write_bytes(b"half a database")
    tracker = Tracker(tmp_path / "run", "drafts", "run", uri=f"sqlite:///{tmp_path}/mlflow.db")
    tracker.metrics({"loss": 1.0}, step=0)
    assert tracker.close(timeout_s=60).pending == 0
    assert not (tmp_path / "mlflow.db-draft").exists()
