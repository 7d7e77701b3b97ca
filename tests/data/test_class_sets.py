"""Class sets of arrays as distributed: small files of the official forms, whose checksums torchvision accepts."""

import hashlib
import pickle

import numpy as np
import pytest
import torch
from helpers.refusals import refusal, refused
from PIL import Image
from scipy.io import savemat
from torchvision.datasets import CIFAR10, CIFAR100, SVHN, Places365
from torchvision.transforms.v2.functional import InterpolationMode, resize

from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.data.class_sets import SOURCES, STL10_CLASSES, LabelledSTL10, class_set, places365
from lit_fedad.data.labelled import LabelledDataset


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a tiny set whose rows count upwards and makes torchvision accept its checksums."""

    def write(source, parts: dict[str, int], test: dict[str, int], labels: str, names: int):
        folder = tmp_path / source.base_folder
        folder.mkdir()

        def dump(name: str, content: dict) -> str:
            (folder / name).write_bytes(pickle.dumps(content))
            return hashlib.md5((folder / name).read_bytes()).hexdigest()

        def listed(counts: dict[str, int]) -> list[list[str]]:
            return [
                [
                    name,
                    dump(
                        name,
                        {
                            "data": np.arange(rows * 3072).reshape(rows, 3072).astype(np.uint8) + rows,
                            "coarse_labels": [names] * rows,  # only CIFAR-100 has them; never read
                            labels: [(rows + i) % names for i in range(rows)],
                        },
                    ),
                ]
                for name, rows in counts.items()
            ]

        monkeypatch.setattr(source, "train_list", listed(parts))
        monkeypatch.setattr(source, "test_list", listed(test))
        meta = {source.meta["key"]: [f"class {i}" for i in range(names)], "coarse_label_names": ["coarse"]}
        monkeypatch.setattr(source, "meta", {**source.meta, "md5": dump(source.meta["filename"], meta)})
        return tmp_path

    return write


@pytest.fixture
def small_cifar10(written):
    return written(CIFAR10, {"data_batch_1": 4, "data_batch_2": 3}, {"test_batch": 5}, "labels", 3)


def test_cifar10_is_read(small_cifar10):
    images = class_set(small_cifar10, "cifar10")
    assert images.name == "cifar10"
    assert images.classes == ("class 0", "class 1", "class 2")
    assert images.train_labels.tolist() == [1, 2, 0, 1, 0, 1, 2]
    assert images.test_labels.tolist() == [2, 0, 1, 2, 0]
    # A row holds 1,024 red values, then green, then blue, each row by row (description of the format).
    rows = np.concatenate([np.arange(n * 3072).reshape(n, 3072).astype(np.uint8) + n for n in (4, 3)]).astype(
        np.uint8
    )
    assert images.train_images.dtype == torch.uint8
    assert np.array_equal(images.train_images.numpy(), rows.reshape(7, 3, 32, 32))
    assert (images.mean, images.std) == (SOURCES["cifar10"].mean, SOURCES["cifar10"].std)


@pytest.fixture
def small_cifar100(written):
    return written(CIFAR100, {"train": 6}, {"test": 2}, "fine_labels", 4)


def test_cifar100_is_read_with_fine_labels(small_cifar100):
    images = class_set(small_cifar100, "cifar100")
    assert images.name == "cifar100"
    assert images.classes == ("class 0", "class 1", "class 2", "class 3")
    assert images.train_labels.tolist() == [2, 3, 0, 1, 2, 3]
    assert images.test_labels.tolist() == [2, 3]
    rows = (np.arange(6 * 3072).reshape(6, 3072) + 6).astype(np.uint8)
    assert np.array_equal(images.train_images.numpy(), rows.reshape(6, 3, 32, 32))
    assert (images.mean, images.std) == (SOURCES["cifar100"].mean, SOURCES["cifar100"].std)
    assert sorted(class_set(small_cifar100, "cifar100", train_per_class=1).train_labels.tolist()) == [
        0,
        1,
        2,
        3,
    ]


def test_the_configuration_builds_what_the_function_gives(small_cifar10):
    config = compose(["data=cifar10", f"data.root={small_cifar10}", "data.train_per_class=1"])
    images, expected = build(config["data"]), class_set(small_cifar10, "cifar10", train_per_class=1)
    assert torch.equal(images.train_images, expected.train_images)
    assert (tuple(images.mean), tuple(images.std)) == (expected.mean, expected.std)
    batch = LabelledDataset(images.test_images, images.test_labels, images.mean, images.std)[0]
    assert batch["image"].shape == (3, 32, 32)


@pytest.mark.parametrize(("classes", "source"), [(10, CIFAR10), (100, CIFAR100)])
def test_missing_files_say_where_to_get_them(classes, source, tmp_path):
    with refusal(f"{source.base_folder}.*missing or damaged.*https://") as caught:
        class_set(tmp_path, f"cifar{classes}")
    assert source.filename in str(caught.value)


def test_damaged_files_are_refused(small_cifar10):
    file = small_cifar10 / CIFAR10.base_folder / "data_batch_2"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="missing or damaged"):
        class_set(small_cifar10, "cifar10")
    file.unlink()
    with pytest.raises(UserError, match="missing or damaged"):
        class_set(small_cifar10, "cifar10")


LABELS = {"train": [3, 1, 10, 1], "test": [2, 3]}


def pixels(part: str) -> np.ndarray:
    count = len(LABELS[part])
    return np.random.default_rng(count).integers(0, 256, (count, 3, 96, 96), dtype=np.uint8)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Labels count from 1, images lie column by column; there is no file of unlabelled images."""
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    for part, labels in LABELS.items():
        contents = {"X": pixels(part).transpose(0, 1, 3, 2).tobytes(), "y": bytes(labels)}
        for kind, content in contents.items():
            (folder / f"{part}_{kind}.bin").write_bytes(content)
        listed = [
            [f"{part}_{kind}.bin", hashlib.md5(content).hexdigest()] for kind, content in contents.items()
        ]
        monkeypatch.setattr(LabelledSTL10, f"{part}_list", listed)
    return tmp_path


def test_files_are_read_and_scaled(root):
    images = build(compose(["data=stl10", f"data.root={root}"])["data"])
    assert (images.name, images.classes) == ("stl10", STL10_CLASSES)
    assert images.train_labels.tolist() == [2, 0, 9, 0]
    assert images.test_labels.tolist() == [1, 2]
    for part, scaled in (("train", images.train_images), ("test", images.test_images)):
        assert scaled.shape == (len(LABELS[part]), 3, 32, 32)
        expected = resize(
            torch.from_numpy(pixels(part)), [32, 32], InterpolationMode.BILINEAR, antialias=True
        )
        assert torch.equal(scaled, expected)
    assert (images.mean, images.std) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def test_subsets_at_the_original_size(root):
    images = class_set(root, "stl10", size=96, train_per_class=1)
    assert images.train_labels.tolist() in ([2, 0, 9], [2, 9, 0])
    assert np.array_equal(images.test_images.numpy(), pixels("test"))


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """SVHN's two files with a few images, whose checksums torchvision accepts."""
    rng = np.random.default_rng(0)
    written = {}
    for split, labels in (("train", [1, 10, 2, 10]), ("test", [9, 10])):
        file = tmp_path / f"{split}_32x32.mat"
        written[split] = rng.integers(0, 256, (32, 32, 3, len(labels)), np.uint8)
        savemat(file, {"X": written[split], "y": np.array(labels, np.uint8)[:, None]})
        address = SVHN.split_list[split][0]
        monkeypatch.setitem(SVHN.split_list, split, [address, file.name, md5(file)])
    return tmp_path, written


def test_svhn_is_read(digits):
    root, written = digits
    images = class_set(root, "svhn")
    assert images.classes == tuple("0123456789")
    assert images.train_labels.tolist() == [1, 0, 2, 0]  # its files call the digit 0 ten
    assert images.test_labels.tolist() == [9, 0]
    for number in range(4):
        assert np.array_equal(
            images.train_images[number].permute(1, 2, 0).numpy(), written["train"][..., number]
        )
    assert sorted(class_set(root, "svhn", train_per_class=1).train_labels.tolist()) == [0, 1, 2]


def test_svhn_missing_or_damaged(digits, tmp_path):
    refused("none/train_32x32.mat: is missing or damaged; unpack http", class_set, tmp_path / "none", "svhn")
    with (digits[0] / "test_32x32.mat").open("ab") as file:
        file.write(b"x")
    refused("test_32x32.mat: is missing or damaged", class_set, digits[0], "svhn")


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Places365's lists and pictures of one colour: six for validation, four for training."""
    lists = {
        "categories_places365.txt": "/b/beach 0\n/a/attic 1\n",
        "places365_val.txt": "".join(f"Places365_val_{i}.png {i % 2}\n" for i in range(6)),
        "places365_train_standard.txt": "".join(f"/a/attic/{i}.png 1\n" for i in range(4)),
    }
    sums = {}
    for name, content in lists.items():
        (tmp_path / name).write_text(content)
        sums[name] = md5(tmp_path / name)
    pictures = [tmp_path / f"val_256/Places365_val_{i}.png" for i in range(6)]
    pictures += [tmp_path / f"data_256_standard/a/attic/{i}.png" for i in range(4)]
    for i, path in enumerate(pictures):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (256, 256), (20 * i, 0, 255)).save(path)
    name = "categories_places365.txt"
    monkeypatch.setattr(Places365, "_CATEGORIES_META", (name, sums[name]))
    for split, name in (("val", "places365_val.txt"), ("train-standard", "places365_train_standard.txt")):
        monkeypatch.setitem(Places365._FILE_LIST_META, split, (name, sums[name]))
    return tmp_path


def test_places365_is_read_at_a_smaller_size(places):
    images = places365(places, size=8)
    assert images.classes == ("/b/beach", "/a/attic")  # by number, not by name
    assert images.test_labels.tolist() == [0, 1] * 3
    assert images.train_labels.tolist() == [1] * 4
    assert images.test_images[:, :, 4, 4].tolist() == [[20 * i, 0, 255] for i in range(6)]
    assert images.train_images[:, 0].flatten(1).unique(dim=1).flatten().tolist() == [120, 140, 160, 180]
    assert images.train_images.shape == (4, 3, 8, 8)


def test_places365_reads_only_what_is_drawn(places):
    drawn = places365(places, size=8, train_images=0, test_images=2, seed=5)
    assert len(drawn.train_images) == 0
    kept = {value // 20 for value in drawn.test_images[:, 0, 0, 0].tolist()}
    assert len(kept) == 2
    for i in set(range(6)) - kept:
        (places / f"val_256/Places365_val_{i}.png").unlink()
    assert torch.equal(
        places365(places, size=8, train_images=0, test_images=2, seed=5).test_images, drawn.test_images
    )
    refused("Places365_val_.*no such image file", places365, places, size=8)


def test_places365_without_its_training_part_is_only_tested_on(places):
    for path in sorted((places / "data_256_standard").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (places / "data_256_standard").rmdir()
    (places / "places365_train_standard.txt").unlink()
    images = places365(places, size=8)
    assert (len(images.train_images), len(images.train_labels), len(images.test_images)) == (0, 0, 6)


def test_places365_missing_or_damaged(places, tmp_path):
    refused(
        "categories_places365.txt or places365_val.txt is missing.*val_256.tar", places365, tmp_path / "x"
    )
    (places / "places365_train_standard.txt").write_text("changed")
    refused("places365_train_standard.txt is missing or damaged", places365, places)
