"""Runs on frozen features: every task, kept features and such that are computed anew, and pixels one key away."""

import pytest
import torch

from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.deployment.predict import evaluate, predict
from lit_fedad.experiment.build import build_model

MOTIFS = (
    "~data.train_per_product", "~data.test_per_product", "data.train_per_class=12", "data.test_per_class=3",
    "data.size=16", "image.size=16", "features.size=32", "partition.clients=2",
)  # fmt: skip
SEMANTIC = (
    "method=fadngs", "experiment=semantic_small", "data=motifs", *MOTIFS, "data.train_per_set=2", "data.test_per_set=5",
    "task.projection=8", "public.count=8", "distillation.queue=64", "task.warmup=1", "backbone=test_resnet",
)  # fmt: skip
RUNS = {
    "contrastive": SEMANTIC,
    "classifier": ("method=fedavg", "task=classifier", "features=frozen", "data=motif_classes", *MOTIFS),
    "patches": ("method=fedavg", "task=autoencoder", "features=frozen"),
    "whole images": ("method=fedavg", "task=autoencoder", "features=frozen", "grid=1", "features.size=32"),
    "turned, of files": (
        "method=fedavg",
        "task=csi",
        "features=frozen",
        "features.size=32",
        "features.views=8",
    ),
    "contrastive, of files": ("method=fedavg", "task=contrastive", "features=frozen", "features.size=32"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_kept_features_and_such_that_are_computed_anew_give_the_same(lab, tmp_path, outcome, name):
    """A run that fills the cache, one that reads it, and one without."""
    folder = f"cache.folder={tmp_path / 'cache'}"
    filled = lab.train(tmp_path / "filled", *RUNS[name], folder)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert files
    read = lab.train(tmp_path / "read", *RUNS[name], folder)
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert outcome(read) == outcome(filled)
    anew = lab.train(tmp_path / "anew", *RUNS[name], "cache.enabled=false")
    if name == "patches":  # feature maps are kept in half precision, and computed in single
        assert read["last"]["i_auroc"]["mean"] == pytest.approx(anew["last"]["i_auroc"]["mean"], abs=0.2)
        return
    assert anew["last"] == read["last"]
    assert (anew["scalars"], anew["bytes_up"]) == (read["scalars"], read["bytes_up"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["patches", "whole images", "contrastive, of files", "turned, of files"])
def test_runs_on_image_files_are_judged_again_and_predict(lab, tmp_path, name):
    out, result = lab.finished(*RUNS[name])
    evaluate(str(out))
    images = next(lab.shared.rglob("test/good"))
    scores = predict(str(out), str(images), out=str(tmp_path)).read_text().splitlines()
    assert len(scores) == 1 + len(list(images.glob("*.png")))
    located = "p_auroc" in result["last"] and result["last"]["p_auroc"]["mean"] is not None
    assert located == (name == "patches")


@pytest.mark.parametrize(
    ("given", "trained"),
    [
        (["method=fadngs"], "encoder.conv"),
        (["method=gldp"], "encoder.conv"),
        (["method=fedavg", "task=autoencoder", "features=frozen"], "encoder.conv"),
    ],
)
@pytest.mark.slow
def test_pixels_are_one_key_away(given, trained):
    frozen = build_model(compose([*given, "backbone=own"]), ["a", "b"]).task
    pixels = build_model(compose([*given, "backbone=own", "features=train"]), ["a", "b"]).task
    assert not any(
        name.startswith(trained) for name, _ in frozen.named_parameters() if "backbone" not in name
    )
    assert any(name.startswith(trained) for name, _ in pixels.named_parameters())


def test_an_encoder_that_would_not_be_trained_is_refused():
    for asked in ("encoder=resnet18", "encoder.channels=4"):
        with pytest.raises(UserError, match=f"{asked}: features are frozen.*give features=train"):
            compose(["method=fadngs", asked])
    compose(["method=fadngs", "features=train", "encoder=resnet18"])


def test_densities_are_of_frozen_features_or_of_the_projection_of_trained_ones():
    assert build_model(compose(["method=fadngs"]), ["a"]).task.score_from == "encoder"
    assert build_model(compose(["method=fadngs", "features=train"]), ["a"]).task.score_from == "projection"
    asked = compose(["method=fadngs", "task.score_from=projection"])
    assert build_model(asked, ["a"]).task.densities.mean.shape == torch.Size([0, 128])


@pytest.mark.parametrize("method", ["feddm", "fedvck_sums", "desa", "fedmix", "fedgan", "dfrd"])
def test_methods_that_make_images_need_an_encoder_of_pixels(method):
    with pytest.raises(UserError, match="give features=train"):
        build_model(compose([f"method={method}", "features=frozen", "backbone=own"]), ["a", "b"])
