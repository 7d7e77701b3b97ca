"""What a run leaves in MLflow can be read back."""

from __future__ import annotations

import time

import pytest

from lit_fedad.deployment.export import export
from lit_fedad.experiment.claim import LOCK

pytest.importorskip("mlflow")

TRACKED = ("tracking=mlflow", "tracking.experiment=e2e", "method=feddymem_literal", "evaluation.pictures=1")


def the_run(folder):
    """MLflow's client and the one run in a folder's database."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("e2e")
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def files(client, run_id, folder=None):
    found = client.list_artifacts(run_id, folder)
    return {f for a in found for f in (files(client, run_id, a.path) if a.is_dir else {a.path})}


def check(folder, result, rounds):
    client, run = the_run(folder)
    assert run.info.status == "FINISHED"
    assert run.data.params["method.name"] == "feddymem_literal"
    assert run.data.params["rounds"] == str(rounds)
    assert run.data.tags["method"] == "feddymem_literal"
    assert run.data.tags["weights"] == "random"
    assert run.data.tags["lit_fedad.out"] == str(folder / "run")
    note = run.data.tags["mlflow.note.content"]
    assert "higher is better" in note
    assert f"figures%2Fheatmaps.png&run_uuid={run.info.run_id}" in note
    assert f"clients/i_auroc/{len(result['partition']['sizes']) - 1}" in run.data.metrics
    curve = client.get_metric_history(run.info.run_id, "i_auroc/mean")
    assert [(p.step, p.value) for p in sorted(curve, key=lambda p: p.step)] == [
        (int(number), values["i_auroc"]) for number, values in result["metrics"].items()
    ]
    sent = client.get_metric_history(run.info.run_id, "bytes/up")
    assert sorted((p.step, p.value) for p in sent) == list(
        zip(result["exchanges"], result["bytes_up"], strict=True)
    )
    (dataset,) = run.inputs.dataset_inputs
    assert dataset.dataset.name == "textures"
    stored = files(client, run.info.run_id)
    wanted = {"config.yaml", "partition.json", "calibration.json", "result.json", "figures/heatmaps.png"}
    assert wanted <= stored
    assert f"checkpoints/round_{100_000 + rounds}/server.pt" in stored
    assert f"checkpoints/round_{100_000 + rounds}/client_00000.pt" in stored


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A working directory without any tracking of the surroundings."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_killed_and_resumed_run_is_one_run_without_duplicates_and_keeps_its_export(lab, desk):
    settings = (*TRACKED, "rounds=6")
    for target in (1, 4):
        process = lab.start(desk / "run", *settings, cwd=desk)
        while process.poll() is None and not list((desk / "run").glob(f"checkpoints/round_10000{target}")):
            time.sleep(0.002)
        assert process.poll() is None
        process.kill()
        process.communicate()
    check(desk, lab.train(desk / "run", *settings), rounds=6)
    out = export(str(desk / "run"), format=("pt2",))
    client, run = the_run(desk)
    assert files(client, run.info.run_id, f"export/{out.name}") == {
        f"export/{out.name}/{path.name}" for path in out.iterdir() if path.name != LOCK
    }
