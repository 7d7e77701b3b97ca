"""A client whose images cannot be read."""

import json

import pytest
from helpers.sites import paint

from lit_fedad.cli.main import main

SETTINGS = (
    "data=mvtec_mixture", "method=local", "cache.enabled=false", "tracking=off", "backbone=own", "rounds=1",
    "partition=by_product", "image.size=32", "image.resize=null", "grid=4", "task.slots=8",
    "task.loss.neighbours=2", "federation.sampler.on_failure=skip",
)  # fmt: skip


@pytest.mark.slow
def test_is_left_out_of_run_and_evaluation_and_named_in_the_result(tmp_path, capsys):
    """Two products, each of one client; an image of the second is no image."""
    images, out = tmp_path / "all", tmp_path / "run"
    product = paint(tmp_path, ("first", "second"))[1]
    broken = sorted((images / product / "train" / "good").iterdir())[2]
    broken.write_bytes(b"no image")
    assert main(["train", *SETTINGS, f"data.root={images}", f"out={out}"]) == 0
    result = json.loads((out / "result.json").read_text())
    causes = [cause for failures in result["failures"].values() for cause in failures.values()]
    assert len(causes) == 2  # before round 1, and where the client tries again
    assert all(broken.name in cause for cause in causes)
    assert list(result["last"]["i_auroc"]["per_client"]) == ["0"]
    assert list(json.loads((out / "calibration.json").read_text())["clients"]) == ["0"]
    text = "".join(capsys.readouterr())
    assert "client 1 left out" in text
    assert "Traceback" not in text
    assert main(["predict", f"run={out}", f"images={images}", "client=1"]) == 2
    assert "client=1: the run has clients 0" in capsys.readouterr().err
