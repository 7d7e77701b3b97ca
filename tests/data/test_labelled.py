"""Labelled sets take part in partitions, subsets and loaders."""

from collections import Counter

import numpy as np
import pytest
import torch
from torchvision.transforms.v2.functional import normalize

from lit_fedad.core.errors import UserError
from lit_fedad.data.datamodule import FederatedDataModule
from lit_fedad.data.labelled import LabelledDataset, LabelledSet
from lit_fedad.data.strategies import IID, ByProduct, Dirichlet, Pooled

CLASSES = ("ant", "bee", "cow", "dog")


def labelled_set(train=160, test=40, size=6, **overrides) -> LabelledSet:
    """Random images; class 3 (a tenth of the images) is rare."""
    random = np.random.default_rng(0)
    parts = {}
    for part, count in (("train", train), ("test", test)):
        parts[f"{part}_images"] = torch.from_numpy(
            random.integers(0, 256, (count, 3, size, size), dtype=np.uint8)
        )
        parts[f"{part}_labels"] = torch.from_numpy(random.choice(4, count, p=[0.3, 0.3, 0.3, 0.1]))
    return LabelledSet("animals", CLASSES, **{**parts, **overrides})


def test_images_are_described_by_their_class():
    images = labelled_set()
    assert [image.category for image in images.train] == [CLASSES[label] for label in images.train_labels]
    assert [image.category for image in images.test] == [CLASSES[label] for label in images.test_labels]
    assert images.categories == list(CLASSES)
    assert images.kind == "classification"
    assert not images.has_masks


@pytest.mark.parametrize("strategy", [Dirichlet(clients=4, min_size=2), IID(3), ByProduct(), Pooled()])
def test_partitions_deal_every_image_once(strategy):
    images = labelled_set()
    partition = strategy(images, 5)
    assert sorted(i for indices in partition.clients for i in indices) == list(range(160))
    counts = partition.counts(images)
    for client, indices in enumerate(partition.clients):
        labels = images.train_labels[list(indices)].numpy()
        assert counts[client].tolist() == np.bincount(labels, minlength=4).tolist()


def test_dataset_normalises_as_torchvision():
    images = labelled_set()
    mean, std = (0.1, 0.5, 0.7), (0.2, 0.3, 0.4)
    dataset = LabelledDataset(images.train_images, images.train_labels, mean, std)
    batch = dataset.__getitems__([7, 3, 7])
    expected = normalize(images.train_images[[7, 3, 7]] / 255, list(mean), list(std))
    torch.testing.assert_close(batch["image"], expected, rtol=0, atol=1e-6)
    assert batch["image"].dtype == torch.float32
    assert batch["label"].tolist() == images.train_labels[[7, 3, 7]].tolist()
    assert batch["index"].tolist() == [7, 3, 7]


def test_batches_leave_the_images_as_they_are():
    images = labelled_set()
    before = images.train_images.clone()
    dataset = LabelledDataset(images.train_images, images.train_labels)
    dataset.__getitems__([0, 1])["image"].zero_()
    assert torch.equal(images.train_images, before)


def test_the_data_module_deals_labelled_batches():
    images = labelled_set()
    partition = ByProduct()(images, 0)
    module = FederatedDataModule(
        LabelledDataset(images.train_images, images.train_labels),
        LabelledDataset(images.test_images, images.test_labels),
        partition.clients,
        batch_size=16,
    )
    seen = [batch["label"] for batch in module.client_loader(1, torch.Generator())]
    assert max(map(len, seen)) == 16
    own = images.train_labels[list(partition.clients[1])]
    assert torch.cat(seen).tolist() == own.tolist()
    assert len(own.unique()) == 1
    assert torch.equal(torch.cat([b["label"] for b in module.test_dataloader()]), images.test_labels)


def test_a_subset_takes_so_many_of_each_class():
    images = labelled_set()
    whole = Counter(images.train_labels.tolist())
    part = images.subset(train_per_class=25)
    assert Counter(part.train_labels.tolist()) == {label: min(n, 25) for label, n in whole.items()}
    assert whole[3] < 25 < whole[0]
    assert torch.equal(part.test_images, images.test_images)
    assert (part.name, part.classes) == (images.name, images.classes)


def test_a_subset_keeps_order_and_images_with_their_labels():
    images = labelled_set()
    part = images.subset(train_per_class=5, test_per_class=2, seed=3)
    for some, labels, everything, all_labels in (
        (part.train_images, part.train_labels, images.train_images, images.train_labels),
        (part.test_images, part.test_labels, images.test_images, images.test_labels),
    ):
        places = [int((everything == image).flatten(1).all(1).nonzero()) for image in some]
        assert places == sorted(set(places))
        assert torch.equal(all_labels[places], labels)


def test_subsets_follow_the_seed_and_grow():
    images = labelled_set()
    draws = [images.subset(train_per_class=5, seed=seed).train_images for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    larger = {image.numpy().tobytes() for image in images.subset(train_per_class=9).train_images}
    assert {image.numpy().tobytes() for image in draws[0]} < larger


@pytest.mark.parametrize("key", ["train_per_class", "test_per_class"])
def test_empty_subsets_are_refused(key):
    with pytest.raises(UserError, match=f"{key}=0 must be at least 1"):
        labelled_set().subset(**{key: 0})


@pytest.mark.parametrize(
    "wrong", [{"mean": (0.5,) * 4}, {"std": (0.5, 0.5)}, {"std": (0.5, 0.5, 0)}, {"std": ()}]
)
def test_wrong_normalisation_is_refused(wrong):
    with pytest.raises(UserError, match="animals mean=.*one number or 3 each"):
        labelled_set(**wrong)


def test_one_number_is_that_of_every_channel():
    images = labelled_set(mean=[0.25], std=(0.1, 0.2, 1))
    assert (images.mean, images.std) == ((0.25, 0.25, 0.25), (0.1, 0.2, 1.0))
    dataset = LabelledDataset(images.train_images, images.train_labels, [0.25], images.std)
    expected = normalize(images.train_images[:4] / 255, [0.25] * 3, [0.1, 0.2, 1])
    torch.testing.assert_close(dataset.__getitems__(range(4))["image"], expected, rtol=0, atol=1e-5)


def test_grey_images_keep_one_channel():
    colour = labelled_set()
    grey = labelled_set(train_images=colour.train_images[:, :1], mean=(0.2,), std=(0.4,))
    assert grey.channels == grey.subset(train_per_class=3).channels == 1
    dataset = LabelledDataset(grey.train_images, grey.train_labels, grey.mean, grey.std)
    image = dataset[5]["image"]
    assert image.shape == (1, 6, 6)
    torch.testing.assert_close(image, (grey.train_images[5] / 255 - 0.2) / 0.4)
    with pytest.raises(UserError, match="animals mean=.*one number each"):
        labelled_set(train_images=colour.train_images[:, :1], mean=(0.2, 0.2, 0.2))
    with pytest.raises(UserError, match="animals: its images have 2 channels; give 3, or 1"):
        labelled_set(train_images=colour.train_images[:, :2])
