import json
from pathlib import Path

import mlflow
import pytest

from lit_fedad.tracking.tracker import Tracker


def test_default_uri_is_the_database_of_the_working_directory(tmp_path, database, client):
    (tmp_path / "a.txt").write_text("a")
    tracker = Tracker(tmp_path, "default", "run")
    tracker.artifact(tmp_path / "a.txt")
    run_id = tracker.close(timeout_s=120).run_id
    artifacts = Path(client.get_run(run_id).info.artifact_uri.removeprefix("file://"))
    assert artifacts.is_relative_to(database / "mlruns")
    sent = json.loads((tmp_path / "tracking/sent.json").read_text())
    assert sent["uri"] == f"sqlite:///{database}/mlflow.db"


def test_environment_names_the_server_and_an_argument_overrides_it(
    tmp_path, monkeypatch, failing_server, database
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", failing_server)
    assert failing_server in Tracker(tmp_path / "a", "uri", "run").close(timeout_s=120).error
    explicit = f"sqlite:///{database}/mlflow.db"
    assert Tracker(tmp_path / "b", "uri", "run", uri=explicit).close(timeout_s=120).error is None


@pytest.mark.slow
@pytest.mark.nightly
def test_first_use_by_several_runs_at_once(tmp_path, start_python, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = """
        import sys
        from pathlib import Path
        from lit_fedad.tracking.tracker import Tracker
        tracker = Tracker(Path(sys.argv[1]), "together", sys.argv[1])
        for step in range(50):
            tracker.metrics({f"metric {k}": float(k) for k in range(20)}, step)
        print(tracker.close(timeout_s=240))
        """
    names = [f"run-{k}" for k in range(4)]
    processes = [start_python(code, name) for name in names]
    for process in processes:
        output, errors = process.communicate(timeout=480)
        assert "pending=0, error=None" in output, errors
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("together").experiment_id])
    assert sorted(run.info.run_name for run in runs) == names
    for run in runs:
        assert run.info.status == "FINISHED"
        assert len(client.get_metric_history(run.info.run_id, "metric 3")) == 50


@pytest.mark.slow
def test_a_kill_while_the_database_is_made_leaves_no_broken_one(tmp_path):
    """What a killed process left of the draft is thrown away, not taken for a database."""
    (tmp_path / "mlflow.db-draft").write_bytes(b"half a database")
    tracker = Tracker(tmp_path / "run", "drafts", "run", uri=f"sqlite:///{tmp_path}/mlflow.db")
    tracker.metrics({"loss": 1.0}, step=0)
    assert tracker.close(timeout_s=240).pending == 0
    assert not (tmp_path / "mlflow.db-draft").exists()
