"""CIFAR as distributed: small files of the official form."""

import hashlib
import pickle

import numpy as np
import pytest
import torch
from helpers.refusals import refusal
from torchvision.datasets import CIFAR10, CIFAR100

from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.data.class_sets import SOURCES, class_set
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
