"""A client whose images cannot be read."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_fedad.cli.main import main

SETTINGS = (
    *(
        "data=mvtec_mixture",
        "method=local",
        "cache.enabled=false",
        "tracking=off",
        "backbone=own",
        "rounds=1",
    ),
    *(
        "partition=by_product",
        "image.size=32",
        "image.resize=null",
        "grid=4",
        "task.slots=8",
        "task.loss.neighbours=2",
    ),
)


@pytest.fixture
def two_products(tmp_path: Path) -> Path:
    """Two products in MVTec's layout, each of one client; an image of the second is no image."""
    draw = np.random.default_rng(0)
    for product in ("bolt", "nut"):
        for part, kind in (("train", "good"), ("test", "good"), ("test", "bent"), ("ground_truth", "bent")):
            folder = tmp_path / "data" / product / part / kind
            folder.mkdir(parents=True)
            mask = part == "ground_truth"
            for number in range(4):
                pixels = draw.integers(0, 255, (32, 32, 3), dtype=np.uint8)
                if mask:
                    pixels = np.zeros((32, 32), np.uint8)
                    pixels[4:9, 4:9] = 255
                picture = Image.fromarray(pixels)
                picture.save(folder / f"{number}{'_mask' if mask else ''}.png")
    (tmp_path / "data" / "nut" / "train" / "good" / "2.png").write_bytes(b"no image")
    return tmp_path / "data"


@pytest.mark.slow
def test_is_left_out_of_run_and_evaluation_and_named_in_the_result(two_products, tmp_path, capsys):
    out = tmp_path / "run"
    settings = (f"data.root={two_products}", f"out={out}", "federation.sampler.on_failure=skip")
    assert main(["train", *SETTINGS, *settings]) == 0
    result = json.loads((out / "result.json").read_text())
    causes = [cause for failures in result["failures"].values() for cause in failures.values()]
    assert len(causes) == 2  # before round 1, and where the client tries again
    assert all("2.png" in cause for cause in causes)
    assert list(result["last"]["i_auroc"]["per_client"]) == ["0"]
    assert list(json.loads((out / "calibration.json").read_text())["clients"]) == ["0"]
    text = "".join(capsys.readouterr())
    assert "client 1 left out" in text
    assert "Traceback" not in text
    assert main(["predict", f"run={out}", f"images={two_products}", "client=1"]) == 2
    assert "client=1: the run has clients 0" in capsys.readouterr().err
