"""What each client reaches alone, beside all together."""

from __future__ import annotations

import math
import shutil

import numpy as np
import pytest
import torch

import lit_fedad.experiment.alone
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.data.textures import textures
from lit_fedad.evaluation.anomaly import AnomalyEvaluator
from lit_fedad.evaluation.decisions import EvaluatedImages
from lit_fedad.experiment.alone import found_defects
from lit_fedad.experiment.train import train
from lit_fedad.report.closing import in_words


def test_the_share_of_defects_that_are_found_at_five_false_alarms_in_100():
    draw = np.random.default_rng(0)
    normal, defects = draw.normal(0, 1, 60), draw.normal(1, 1, 40)
    products = ["nut"] * 30 + ["bolt"] * 30 + ["nut"] * 20 + ["bolt"] * 20
    images = EvaluatedImages(
        torch.tensor([0] * 60 + [1] * 40), products, held={0: {"nut": 3, "bolt": 1}}, known=True
    )
    scores = torch.from_numpy(np.concatenate([normal, defects]))

    def share(good, bad):
        return (bad > np.sort(good)[::-1][int(0.05 * len(good))]).mean()

    found = found_defects({0: scores}, images)
    own = 3 * share(normal[:30], defects[:20]) + share(normal[30:], defects[20:])
    assert found["all"] == pytest.approx(share(normal, defects))
    assert found["own"] == pytest.approx(own / 4)


@pytest.mark.slow
def test_clients_alone_are_measured_beside_all_together(tmp_path):
    given = ["method=federated_bank", "debug=seconds", "evaluation.alone=true", "tracking=off"]
    result = train(compose([*given, f"out={tmp_path / 'run'}"]), quiet=True)
    assert set(result["alone"]["metrics"]["i_auroc"]["per_client"]) == {"0", "1"}
    assert {who: set(found) for who, found in result["alone"]["found"].items()} == {
        "alone": {"all", "own"},
        "together": {"all", "own"},
    }


@pytest.mark.slow
def test_a_folder_of_normal_images_is_enough_for_a_run(tmp_path):
    """What a newcomer has first: no defect, nothing to compare with, few images of one product."""
    folder = tmp_path / "mine"
    folder.mkdir()
    painted = textures(tmp_path / "painted", size=64, train_per_product=6, test_per_product=2)
    for number, sample in enumerate(painted.train):
        shutil.copy(sample.path, folder / f"{number}.png")
    given = ["method=federated_bank", "debug=seconds", "data=auto", f"data.root={folder}", "tracking=off"]
    with pytest.raises(UserError, match="deal evenly: partition=iid partition.clients=2$"):
        train(
            compose([*given, "partition=dirichlet", "partition.clients=3"]),
            quiet=True,
        )
    evenly = ["partition=iid", "partition.clients=2", "evaluation.alone=true", f"out={tmp_path / 'run'}"]
    result = train(compose([*given, *evenly]), quiet=True)
    assert "alone" not in result
    (said,) = in_words(result)
    assert said.startswith("as shipped, ")
    assert "defects" not in said


def test_products_without_a_normal_test_image_have_no_part_in_what_is_found():
    scores, labels = torch.tensor([1.0, 2.0, 3.0, 9.0]), torch.tensor([0, 0, 1, 1])
    images = EvaluatedImages(
        labels, ["nut", "nut", "nut", "bolt"], held={0: {"nut": 1, "bolt": 9}, 1: {"bolt": 1}}, known=True
    )
    assert found_defects({0: scores}, images) == {"all": 1.0, "own": 1.0}
    assert math.isnan(found_defects({1: scores}, images)["own"])


def refuse_client_1(monkeypatch, holder, name):
    """Has a function of a client's number, its last argument but for a folder, fail for client 1."""
    whole = getattr(holder, name)

    def failing(*arguments):
        if 1 in [one for one in arguments if isinstance(one, int)]:
            raise UserError("its disk is broken")
        return whole(*arguments)

    monkeypatch.setattr(holder, name, failing)


@pytest.mark.slow
def test_a_client_that_cannot_be_measured_does_not_cost_the_run(tmp_path, monkeypatch):
    refuse_client_1(monkeypatch, AnomalyEvaluator, "score")
    given = ["method=feddymem", "debug=seconds", "evaluation.alone=true", "tracking=off"]
    given += ["partition.clients=3", "federation.sampler.on_failure=skip", f"out={tmp_path / 'run'}"]
    result = train(compose(given), quiet=True)
    assert set(result["last"]["i_auroc"]["per_client"]) == {"0", "2"}
    assert set(result["alone"]["metrics"]["i_auroc"]["per_client"]) == {"0", "2"}


@pytest.mark.slow
def test_a_client_that_fails_alone_is_named_with_what_does_without(tmp_path, monkeypatch):
    refuse_client_1(monkeypatch, lit_fedad.experiment.alone, "_score")
    given = ["method=feddymem", "debug=seconds", "tracking=off", f"out={tmp_path / 'run'}"]
    with pytest.raises(UserError, match="^client 1 alone: its disk is broken; evaluation.alone=false"):
        train(compose([*given, "evaluation.alone=true"]), quiet=True)
    assert "alone" not in train(compose(given), quiet=True)


def test_a_task_that_learns_by_training_alone_is_not_measured_without(tmp_path):
    given = ["method=fedavg", "task=autoencoder", "debug=seconds", "tracking=off", f"out={tmp_path / 'run'}"]
    with pytest.raises(UserError, match="task Autoencoder has learned nothing then; leave it out"):
        train(compose([*given, "evaluation.alone=true"]), quiet=True)


@pytest.mark.slow
def test_a_client_without_others_is_measured_once(tmp_path):
    given = ["method=federated_bank", "debug=seconds", "evaluation.alone=true", "tracking=off"]
    config = compose([*given, "partition.clients=1", f"out={tmp_path / 'run'}"])
    assert "alone" not in train(config, quiet=True)
