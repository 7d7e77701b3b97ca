import pytest

from lit_fedad.errors import UserError
from lit_fedad.tracking.reading import find_run_folder


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
