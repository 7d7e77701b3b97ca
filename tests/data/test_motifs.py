"""The embedded motifs: drawn quickly, by seed, and told apart by form alone."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import RidgeClassifier
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors
from sklearn.svm import SVC

from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.data.motifs import ANOMALOUS, NORMAL, motif_classes, motifs
from lit_fedad.data.strategies import DominantClass


@pytest.fixture(scope="module")
def images():
    return motifs()


def test_the_set_has_ten_families_and_three_others(images):
    assert images.classes == (*NORMAL, *ANOMALOUS)
    assert (images.normal_classes, images.anomalies) == (10, tuple(ANOMALOUS))
    assert images.train_labels.bincount().tolist() == [120] * 10 + [20] * 3
    assert images.test_labels.bincount().tolist() == [40] * 10 + [130] * 3
    assert images.train_images.shape == (1260, 3, 32, 32)
    assert images.train_images.dtype == torch.uint8
    assert (tuple(images.mean), tuple(images.std)) == ((0, 0, 0), (1, 1, 1))
    everything = [*images.train_images, *images.test_images]
    assert len({image.numpy().tobytes() for image in everything}) == len(everything)


@pytest.mark.slow
def test_a_motif_depends_on_the_seed_and_on_no_other(images):
    again = motifs()
    assert torch.equal(again.train_images, images.train_images)
    assert torch.equal(again.test_images, images.test_images)
    assert not torch.equal(motifs(seed=1).train_images, images.train_images)
    fewer = motifs(train_per_set=0, test_per_set=5)
    assert torch.equal(fewer.train_images, images.train_images[:1200])
    assert torch.equal(fewer.test_images[:400], images.test_images[:400])


def test_the_classes_are_the_normal_families(images):
    classes = motif_classes(train_per_class=120, test_per_class=40)
    assert (classes.name, classes.kind, classes.classes) == ("motif_classes", "classification", tuple(NORMAL))
    normal = (images.train_labels < 10, images.test_labels < 10)
    assert torch.equal(classes.train_images, images.train_images[normal[0]])
    assert torch.equal(classes.train_labels, images.train_labels[normal[0]])
    assert torch.equal(classes.test_images, images.test_images[normal[1]])
    assert torch.equal(classes.test_labels, images.test_labels[normal[1]])


@pytest.mark.slow
def test_a_line_through_the_pixels_tells_classes_apart_poorly_but_above_chance():
    classes = motif_classes()
    assert classes.train_labels.bincount().tolist() == [200] * 10
    assert classes.test_labels.bincount().tolist() == [50] * 10
    train, test = (part.flatten(1).numpy() / 255 for part in (classes.train_images, classes.test_images))
    learnt = RidgeClassifier(alpha=1000).fit(train, classes.train_labels)
    assert 0.13 < learnt.score(test, classes.test_labels) < 0.3


def colours(pixels):
    values = pixels.float() / 255
    return torch.cat([values.mean((2, 3)), values.std((2, 3))], dim=1).numpy()


def test_neither_colours_nor_pixels_give_anomalies_away(images):
    train = images.train_labels < 10
    anomalous = (images.test_labels >= 10).numpy()
    for feature in (colours, lambda pixels: pixels.float().flatten(1).numpy()):
        neighbours = NearestNeighbors(n_neighbors=3).fit(feature(images.train_images[train]))
        distance = neighbours.kneighbors(feature(images.test_images))[0].mean(axis=1)
        assert 0.4 < roc_auc_score(anomalous, distance) < 0.65


@pytest.mark.slow
def test_form_tells_the_families_apart(images):
    """Amplitude spectra, which know neither colour nor place, do far better than one in thirteen."""

    def spectra(pixels):
        grey = pixels.float().numpy()
        grey = grey - grey.mean(axis=(2, 3), keepdims=True)
        amplitude = np.sqrt((np.abs(np.fft.rfft2(grey)) ** 2).sum(axis=1)).reshape(len(grey), -1)
        return amplitude / np.linalg.norm(amplitude, axis=1, keepdims=True)

    learnt = SVC(C=10).fit(spectra(images.train_images), images.train_labels)
    assert learnt.score(spectra(images.test_images), images.test_labels) > 0.6


def test_light_falls_from_above(images):
    """Upper and lower half differ in every family, so a turned picture is another picture."""
    brightness = images.train_images.float().mean(dim=(1, 3))
    falls = brightness[:, :16].mean(1) - brightness[:, 16:].mean(1)
    for label in range(13):
        assert (falls[images.train_labels == label] > 0).float().mean() > 0.8


def test_the_default_federation_of_the_paper_fits_in_small(images):
    counts = DominantClass(clients=10, size=100)(images, 0).counts(images)
    assert counts[:, :10].diagonal().tolist() == [89] * 10
    assert counts[:, 10:].sum(axis=1).tolist() == [1] * 10


def test_the_configuration_builds_what_the_function_gives():
    config = compose(["data=motifs", "data.train_per_class=3", "data.size=16", "data.test_per_set=2"])
    images, expected = build(config["data"]), motifs(size=16, train_per_class=3, test_per_set=2)
    assert torch.equal(images.train_images, expected.train_images)
    assert images.train_images.shape[2:] == (16, 16)


@pytest.mark.parametrize(
    ("draw", "key", "value"),
    [(motifs, "size", 7), (motifs, "train_per_set", -1), (motifs, "test_per_set", 0),
     (motif_classes, "train_per_class", 0), (motif_classes, "test_per_class", 0)],
)  # fmt: skip
def test_numbers_too_small_are_refused(draw, key, value):
    with pytest.raises(UserError, match=f"data.{key}={value} must be at least"):
        draw(**{key: value})


def test_the_configuration_of_the_classes_builds_what_the_function_gives():
    images, expected = build(compose(["data=motif_classes", "data.size=8"])["data"]), motif_classes(size=8)
    assert torch.equal(images.train_images, expected.train_images)
    assert torch.equal(images.test_images, expected.test_images)
