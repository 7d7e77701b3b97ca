"""LiRA on what each kind of method sends: banks, moments, sums, noised sums, weights; some clients, and stages."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.shadowed import OVERFIT, TINY

from lit_fedad.audits.membership import LiraOptions, infer
from lit_fedad.audits.shadow_runs import ShadowRuns
from lit_fedad.audits.shadow_splits import split, trained_on
from lit_fedad.cli import main as cli
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.experiment.finished_run import reopen
from lit_fedad.experiment.train import train

SMALL = ("debug=seconds", "evaluation.pictures=0", "tracking=off", "fabric.accelerator=cpu")


@pytest.fixture(scope="module")
def textures(tmp_path_factory):
    """Overrides of small runs on textures, whose images and features these tests share."""
    home = tmp_path_factory.mktemp("textures")
    return (*SMALL, "data.size=64", f"data.root={home / 'data'}", f"cache.folder={home / 'cache'}")


def attack(folder, *overrides, shadows=6, **options):
    """Trains a run in a folder, attacks it, and returns what is written of the attack."""
    train(compose([*overrides, f"out={folder}"]), quiet=True)
    return infer(reopen(str(folder)), LiraOptions(shadows=shadows, **options)).content


def reports_of(content):
    """What an attack says, by the side and the statistic."""
    return {f"{found['side']} {found['statistic']}": found["report"] for found in content["findings"]}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*RANDOM weights")
def test_banks_and_moments_of_feddymem_are_attacked(tiny_run, tmp_path):
    content = infer(reopen(str(tiny_run)), LiraOptions(shadows=6, share=1.0, out=str(tmp_path))).content
    named = reports_of(content).keys()
    assert {"sent bank: mean distance", "sent moments: largest residual", "sent all", "received all"} <= named
    assert {"sent bank: together", "received bank: together", "received subspace: mean residual"} <= named
    assert all(0 <= found["report"]["auc"]["value"] <= 1 for found in content["findings"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*RANDOM weights")
def test_of_summed_uploads_the_sum_is_attacked(tmp_path, textures):
    overrides = ["method=federated_subspace", *textures]
    overrides += ["federation=secure", "partition=iid", "partition.clients=3"]
    attack(tmp_path / "run", *overrides, share=1.0)
    written = json.loads((tmp_path / "run" / "privacy" / "lira.json").read_text())
    assert written["uploads"] == "their sum"
    assert {found["side"] for found in written["findings"]} == {"sent", "received"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*RANDOM weights")
@pytest.mark.parametrize("where", ["central", "distributed"])
def test_of_noised_runs_the_released_sums_are_attacked(tmp_path, textures, where):
    overrides = ["method=federated_subspace", *textures]
    overrides += [f"federation/privacy={where}", "federation.privacy.epsilon=1e6", "calibration.share=0"]
    overrides += ["partition=iid", "partition.clients=3"] + ["federation=secure"] * (where == "distributed")
    # Fewer shadow runs weigh the statistics of three exchanges too unevenly.
    named = reports_of(attack(tmp_path / "run", *overrides, share=1.0, shadows=12))
    assert {"sent sum: product with the sum", "sent sum: 3 exchanges", "received all"} <= named.keys()
    # With hardly any noise the products, of which every image's own length is a part, tell who was there.
    assert named["sent all"]["auc"]["low"] > named["sent all"]["auc"]["chance_high"]
    written = json.loads((tmp_path / "run" / "privacy" / "lira.json").read_text())
    assert written["uploads"] == "their noised sum"
    assert not [*(tmp_path / "run" / "privacy").rglob("noise.key")]
    assert cli.main(["privacy", f"run={tmp_path / 'run'}", "attack=inversion"]) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*RANDOM weights")
def test_fedavg_shares_no_bank_to_score_with(tmp_path, textures):
    overrides = ["method=fedavg", *textures, "calibration.share=0", f"out={tmp_path / 'run'}"]
    train(compose(overrides), quiet=True)
    with pytest.raises(UserError, match="FedAvgClient: what its clients send scores no image"):
        infer(reopen(str(tmp_path / "run")), LiraOptions())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_methods_that_share_weights(tmp_path, method):
    findings = attack(tmp_path, *TINY, f"method={method}", "rounds=2")["findings"]
    assert set(findings[-1]["report"]["clients"]) == {0, 1}


CLASSES = ("data=motif_classes", "data.train_per_class=8", "features=frozen", "task=classifier")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*RANDOM weights")
@pytest.mark.parametrize("federation", ["default", "secure"])
def test_class_means_of_frozen_features_tell_who_is_in_them(tmp_path, federation):
    overrides = ["method=prototype_statistics", "experiment=cifar10", *CLASSES, *SMALL]
    overrides += [f"federation={federation}", "partition.clients=3", f"cache.folder={tmp_path / 'cache'}"]
    content = attack(tmp_path / "run", *overrides, share=1.0)
    named = reports_of(content)
    assert {"sent moments: Mahalanobis distance", "received all"} <= named.keys()
    for name in ("sent prototypes: prototype score", "sent all"):
        assert named[name]["auc"]["low"] > named[name]["auc"]["chance_high"]
    assert content["not_read"] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*RANDOM weights")
def test_prototypes_of_trained_features_tell_who_is_in_them(tmp_path):
    overrides = ["method=gldp", "experiment=gldp_frozen", *CLASSES, *SMALL]
    overrides += [f"cache.folder={tmp_path / 'cache'}"]
    content = attack(tmp_path / "run", *overrides, share=1.0)
    named = reports_of(content)
    for name in ("sent prototypes: prototype score", "sent all"):
        assert named[name]["auc"]["low"] > named[name]["auc"]["chance_high"]
    assert content["not_read"] == []


@pytest.mark.slow
def test_what_no_statistic_reads_of_uploads_is_named(tmp_path):
    """FedMix's mean images: the weights that are attacked say nothing of them."""
    content = attack(tmp_path, *TINY, "method=fedmix", "rounds=1")
    assert content["not_read"] == ["averages: mean_images, mean_labels"]


@pytest.mark.slow
@pytest.mark.nightly
def test_class_sums_without_noise_are_attacked_by_products(tmp_path):
    named = reports_of(attack(tmp_path, "method=fedvck_sums", *SMALL, share=1.0))
    assert {"sent sum: product with the sum", "received all"} <= named.keys()


@pytest.mark.slow
@pytest.mark.nightly
def test_some_clients_in_some_rounds(tmp_path):
    """The same clients upload last in every shadow run."""
    some = ("federation.sampler.fraction=0.5", "rounds=3", "partition.clients=4", "data.train_per_class=8")
    attack(tmp_path, *TINY, *OVERFIT, *some, share=1.0)
    seen = [torch.load(file)["seen"]["sent"] for file in sorted(tmp_path.rglob("seen.pt"))]
    uploaded = [{exchange: sorted(clients) for exchange, clients in one.items()} for one in seen]
    assert all(one == uploaded[0] for one in uploaded)
    assert {len(clients) for clients in uploaded[0].values()} == {2}


@pytest.mark.slow
@pytest.mark.nightly
def test_images_that_come_task_after_task(tmp_path, spy):
    """An example leaves its stages, and comes with them."""
    stream = [
        *(
            "method=gldp",
            "experiment=gldp_small",
            "data.train_per_class=6",
            "data.test_per_class=3",
            "data.size=16",
            "image.size=16",
        ),
        *("partition.clients=2", "partition.stages=2", "partition.imbalance=2", "rounds=2", "batch_size=8"),
        *("method.client.base_epochs=2", "method.client.head_epochs=3", "encoder.channels=4"),
        *("evaluation.pictures=0", "tracking=off", "fabric.accelerator=cpu"),
    ]
    findings = attack(tmp_path, *stream, share=1.0)["findings"]
    assert set(findings[-1]["report"]["clients"]) == {0, 1}
    tasks = json.loads((tmp_path / "partition.json").read_text())["stages"]
    attacked = reopen(str(tmp_path))
    shadows = ShadowRuns(attacked, tmp_path / "privacy" / "lira", 1.0, 0)
    for shadow in range(4):
        now = trained_on(tasks, shadows.cells, split(shadows.cells, shadow, 0))
        assert [sorted({i for task in own for i in task}) for own in now] == [
            sorted(own) for own in spy.held[f"shadow_{shadow}"]
        ]
