from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.refusals import refusal

from lit_fedad.core.errors import UserError
from lit_fedad.tracking import reading
from lit_fedad.tracking.reading import fetch_artifacts, find_run_folder, metric_history, tracked_runs
from lit_fedad.tracking.registry import fetch_version, register_files
from lit_fedad.tracking.server import one_line


def test_runs_without_a_folder_here_are_refused_in_one_line(tmp_path, monkeypatch, client):
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


@pytest.mark.parametrize(
    "read",
    [
        lambda uri, into: tracked_runs(uri=uri),
        lambda uri, into: metric_history("0" * 32, "loss", uri),
        lambda uri, into: fetch_artifacts("0" * 32, ["result.json"], into, uri),
    ],
    ids=["runs", "history", "artifacts"],
)
def test_a_server_that_fails_is_one_line(failing_server, tmp_path, read):
    with refusal(f"^{failing_server}: "):
        read(failing_server, tmp_path)


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (
            "ProtocolError('Connection aborted.', RemoteDisconnected('Remote end closed connection without response'))",
            "does not work: Remote end closed connection without response",
        ),
        ("ResponseError('too many 500 error responses')", "does not work: too many 500 error responses"),
        (
            "ReadTimeoutError(\"HTTPConnectionPool(host='h', port=1): Read timed out. (read timeout=20)\")",
            "does not work: Read timed out. (read timeout=20)",
        ),
        (
            "NewConnectionError(\"HTTPConnection(host='h', port=1): Failed: [Errno 111] Connection refused\")",
            "cannot be reached: Connection refused",
        ),
    ],
    ids=["closed", "500", "late", "refused"],
)
def test_of_a_request_that_failed_the_cause_is_told_alone(cause, said):
    pool = "API request to http://h:1/api failed with exception HTTPConnectionPool(host='h', port=1)"
    error = ConnectionError(f"{pool}: Max retries exceeded with url: /api?run_id=1 (Caused by {cause})")
    assert one_line(error, "http://h:1") == said


@pytest.mark.parametrize(
    "read",
    [
        lambda: tracked_runs(),
        lambda: find_run_folder("0" * 32),
        lambda: register_files([], "bottle"),
        lambda: fetch_version("models:/bottle/1", [], Path("into")),
    ],
    ids=["runs", "folder", "registering", "version"],
)
def test_a_database_that_cannot_be_opened_is_one_line(tmp_path, monkeypatch, read):
    """As one that is locked, or that a newer MLflow made."""
    file = tmp_path / "mlflow.db"
    file.write_bytes(b"no database" * 100)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{file}")
    with refusal(f"{file}.*file is not a database"):
        read()


@pytest.mark.parametrize("place", ["elsewhere/run", "outputs/../elsewhere/run", "outputs_of_others/run"])
def test_a_server_is_not_believed_outside_of_outputs(tmp_path, monkeypatch, place):
    """Who may write to a shared server could name any folder as a run's."""
    monkeypatch.chdir(tmp_path)
    for folder in (place, "outputs/run"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    named = {"bad": str(tmp_path / place), "good": str(tmp_path / "outputs" / "run")}
    run = lambda key: SimpleNamespace(data=SimpleNamespace(tags={"lit_fedad.out": named[key]}))  # noqa: E731
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setattr(reading, "connect_existing", lambda *_: SimpleNamespace(get_run=run))
    with pytest.raises(UserError, match=f"which is not in outputs/; .* run={tmp_path / place}$"):
        find_run_folder("bad")
    assert find_run_folder("good") == tmp_path / "outputs" / "run"


def folder_in_itself(run_id, path=""):
    return [SimpleNamespace(path=f"{path}figures", is_dir=True, file_size=None)]


def large_file(run_id, path=""):
    return [SimpleNamespace(path="figures", is_dir=False, file_size=2**40)]


@pytest.mark.parametrize("listed", [folder_in_itself, large_file])
def test_artifacts_without_end_are_not_fetched(tmp_path, monkeypatch, listed):
    monkeypatch.setattr(reading, "connect", lambda _: SimpleNamespace(list_artifacts=listed))
    with refusal("cannot be fetched: run r: more than 10000 files or 1073741824 bytes"):
        fetch_artifacts("r", ["figures"], tmp_path)
