"""The hash of what clients hold follows images and partition, and nothing else."""

import shutil
from contextlib import contextmanager

import pytest
import torch
from helpers.images import picture

from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.data.labelled import LabelledSet
from lit_fedad.data.partition import Partition
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.experiment.build import build_images
from lit_fedad.experiment.datasets import data_digest
from lit_fedad.experiment.finished_run import images_of_run
from lit_fedad.report.console import Display

PARTITION = Partition(((0, 1), (2,)))


@pytest.fixture
def images(tmp_path):
    return _images(tmp_path / "data")


def _images(root):
    def sample(product, name, defect="good"):
        path = root / product / "train" / defect / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_bytes(b"x" * 10)
        return Sample(path, product, defect)

    train = (sample("tile", "000.png"), sample("tile", "001.png"), sample("wood", "000.png"))
    return ImageSet("set", train, (sample("tile", "000.png", "crack"),))


def test_the_same_images_in_another_place_are_the_same(images, tmp_path):
    shutil.copytree(tmp_path / "data", tmp_path / "deep" / "er" / "copy")
    assert data_digest(_images(tmp_path / "deep" / "er" / "copy"), PARTITION) == data_digest(
        images, PARTITION
    )


@pytest.fixture(scope="module")
def composed():
    return compose(["method=federated_bank"])


_MVTEC = {"_target_": "lit_fedad.data.mvtec.mvtec_mixture", "name": None}
_FOLDERS = {
    "_target_": "lit_fedad.data.folders.folders",
    "train_normal": ["tile/train"],
    "test_normal": [],
    "test_anomalous": ["tile/test"],
    "name": None,
    "train_share": 0.5,  # a split that is drawn by the product's name
}


@pytest.mark.parametrize(
    ("section", "root"), [(_MVTEC, "."), (_MVTEC, "tile"), (_FOLDERS, ".")], ids=["two", "one", "split"]
)
@pytest.mark.parametrize("link", [False, True], ids=["renamed", "a link in its place"])
def test_a_run_has_its_images_though_their_folder_has_another_name(composed, tmp_path, section, root, link):
    before, after = tmp_path / "before", tmp_path / "after"
    for product in ("tile", "wood"):
        for number in range(12):
            part = "train/good" if number < 8 else "test/crack"
            picture(before / product / part / f"{number}.png", number)

    def config(folder):
        return {**composed, "data": {**section, "root": str(folder)}}

    images = build_images(config(before / root))
    result = {"data": images.name, "partition": {"products": images.categories}}
    digest = data_digest(images, PARTITION)
    shutil.move(before / root, after)
    if link:
        (before / root).symlink_to(after)
        assert (
            data_digest(build_images(config(before / root)), PARTITION) == digest
        )  # of a run that is continued
    assert data_digest(images_of_run(config(before / root if link else after), result), PARTITION) == digest


@pytest.mark.parametrize(
    "change",
    [
        lambda images: images.train[0].path.write_bytes(b"x" * 11),
        lambda images: images.test[0].path.write_bytes(b""),
        lambda images: images.test[0].path.write_bytes(b"y" * 10),  # as large as before
    ],
)
def test_a_changed_file_is_noticed(images, change):
    before = data_digest(images, PARTITION)
    change(images)
    assert data_digest(images, PARTITION) != before


def test_other_images_or_another_partition_are_noticed(images):
    others = [
        (ImageSet("other", images.train, images.test), PARTITION),
        (ImageSet("set", images.train[::-1], images.test), PARTITION),
        (ImageSet("set", images.train, ()), PARTITION),
        (images, Partition(((0,), (1, 2)))),
        (images, Partition.in_stages([[[0], [1]], [[2]]])),
    ]
    digests = {data_digest(*pair) for pair in [(images, PARTITION), *others]}
    assert len(digests) == 1 + len(others)


def test_pixels_in_memory_are_hashed():
    pixels = torch.arange(3 * 3 * 4 * 4, dtype=torch.uint8).view(3, 3, 4, 4)
    labels = torch.tensor([0, 1, 0])
    one = LabelledSet("set", ("a", "b"), pixels, labels, pixels[:1], labels[:1])
    other = LabelledSet("set", ("a", "b"), pixels.roll(1), labels, pixels[:1], labels[:1])
    relabelled = LabelledSet("set", ("a", "b"), pixels, labels.roll(1), pixels[:1], labels[:1])
    assert len({data_digest(images, PARTITION) for images in (one, other, relabelled)}) == 3


def test_a_lost_image_is_one_line(images):
    images.train[2].path.unlink()
    with pytest.raises(UserError, match=f"^image {images.train[2].path} cannot be read"):
        data_digest(images, PARTITION)


def test_reading_the_images_shows_its_progress(images):
    """Of 50,000 photographs it takes minutes."""
    seen = []

    class Shown(Display):
        @contextmanager
        def progress(self, description, announced=True):
            yield lambda *numbers: seen.append((description, *numbers))

    data_digest(images, PARTITION, display=Shown())
    assert seen == [("Hashes of the images", done, 4) for done in (1, 2, 3, 4)]


def test_a_test_image_that_is_a_training_image_too_is_told(images):
    with pytest.warns(
        UserWarning, match=r"1 of 1 test images are training images too, .*crack.000\.png; lit-fedad"
    ):
        data_digest(images, PARTITION)
