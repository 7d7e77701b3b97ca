"""What is added to a tracked run after its end."""

import json

import mlflow
import pytest

from lit_fedad.tracking.tracker import Delivery, Tracker, amend


def test_run_that_is_not_tracked_is_left_alone(tmp_path):
    assert amend(tmp_path, {"auc": 0.5}, 1, [], "privacy") == Delivery(None, 0, None)
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow  # MLflow makes its database
def test_later_numbers_and_files_join_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder, file = tmp_path / "run", tmp_path / "run" / "lira.json"
    tracker = Tracker(folder, "audit", "run", uri=f"sqlite:///{tmp_path / 'a.db'}")
    tracker.metrics({"loss": 1.0}, step=3)
    before = tracker.close()
    file.write_text("1")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # the run's own server, wherever the command is given
    assert amend(folder, {"auc": 0.75}, 3, [file], "privacy") == Delivery(before.run_id, 0, None)
    file.write_text("other")
    amend(folder, {"auc": 0.5, "lost": float("nan")}, 3, [file], "privacy")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'a.db'}")
    run = client.get_run(before.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.metrics == {"loss": 1.0, "auc": 0.5}
    assert [item.path for item in client.list_artifacts(before.run_id, "privacy")] == ["privacy/lira.json"]
    records = [json.loads(line) for line in (folder / "tracking" / "journal.jsonl").read_text().splitlines()]
    assert next(record["values"] for record in records if record["kind"] == "artifact").keys() == {
        "lira.json"
    }
