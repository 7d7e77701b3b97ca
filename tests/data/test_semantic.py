"""Semantic sets: the join, its batches, the partition with a dominant class, and their configurations."""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.refusals import refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.data.labelled import LabelledDataset, LabelledSet
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.data.semantic import SemanticSet, join
from lit_fedad.data.strategies import Dirichlet, DominantClass

ROOT = os.environ.get("LIT_FEDAD_DATA")


def labelled(name, classes, train, test, side=6, seed=0, **overrides) -> LabelledSet:
    """So many random images of each class, the classes in turn."""
    rng = np.random.default_rng(seed)
    parts = []
    for each in (train, test):
        images = rng.integers(0, 256, (each * len(classes), 3, side, side), np.uint8)
        parts += [torch.from_numpy(images), torch.arange(len(classes)).repeat(each)]
    return LabelledSet(name, tuple(classes), *parts, **overrides)


def joined(train=20, contaminating=15, **limits) -> SemanticSet:
    normal = labelled("letters", "abc", train, 4, mean=(0.1, 0.2, 0.3), std=(1, 1, 2))
    near = labelled("near", "xy", contaminating, 5, seed=1)
    far = labelled("far", "z", 0, 7, side=12, seed=2)
    return join(normal, {"near": near, "far": far}, "toy", **limits)


def test_normal_images_come_first_and_anomaly_sets_become_classes():
    images = joined()
    assert images.classes == ("a", "b", "c", "near", "far")
    assert (images.anomalies, images.normal_classes) == (("near", "far"), 3)
    assert (images.kind, images.has_masks, images.name) == ("anomaly", False, "toy")
    assert (images.mean, images.std) == ((0.1, 0.2, 0.3), (1, 1, 2))
    assert images.train_labels.bincount(minlength=5).tolist() == [20, 20, 20, 30, 0]
    assert images.test_labels.bincount().tolist() == [4, 4, 4, 10, 7]
    normal, near = labelled("letters", "abc", 20, 4), labelled("near", "xy", 15, 5, seed=1)
    assert torch.equal(images.train_images[:60], normal.train_images)
    assert torch.equal(images.train_images[60:], near.train_images)
    assert torch.equal(images.test_images[12:22], near.test_images)
    assert [item.category for item in images.test][11:13] == ["c", "near"]


def test_anomalies_are_scaled_to_the_normal_size():
    flat = labelled("flat", "z", 0, 2, side=12)
    flat.test_images[:] = torch.tensor([0, 100, 200], dtype=torch.uint8).view(3, 1, 1)
    flat.test_images[1, :, ::2] = 255  # rows of 255 and of the colour in turn: antialiasing blends them
    images = join(labelled("letters", "abc", 2, 2), {"flat": flat}, "toy")
    same, blended = images.test_images[6:].float()
    assert images.test_images.shape == (8, 3, 6, 6)
    assert images.test_images.dtype == torch.uint8
    assert same.flatten(1).unique(dim=1).flatten().tolist() == [0, 100, 200]
    assert torch.allclose(blended[:, 1:-1].mean((1, 2)), (255 + torch.tensor([0.0, 100, 200])) / 2, atol=8)
    assert blended.std((1, 2)).max() < 40  # nearest neighbours would leave 0 and 255


def test_limits_draw_at_random_and_grow():
    whole = joined()
    some = joined(test_per_set=3, contaminants=8)
    more = joined(test_per_set=4, contaminants=12)
    assert some.test_labels.bincount().tolist() == [4, 4, 4, 3, 3]
    assert some.train_labels.bincount(minlength=5).tolist() == [20, 20, 20, 8, 0]

    def content(images):
        return {image.numpy().tobytes() for image in images}

    assert content(some.test_images) < content(more.test_images) < content(whole.test_images)
    assert content(some.train_images) < content(more.train_images) < content(whole.train_images)
    assert torch.equal(some.train_images, joined(test_per_set=1, contaminants=8).train_images)
    assert content(some.train_images) != content(joined(contaminants=8, seed=1).train_images)
    assert joined(contaminants=0).train_labels.max() == 2
    assert len(joined(contaminants=10**6).train) == len(whole.train)


def test_contaminants_are_drawn_from_all_sets_together():
    normal = labelled("letters", "abc", 1, 1)
    sets = {"p": labelled("p", "x", 300, 1, seed=1), "q": labelled("q", "x", 100, 1, seed=2)}
    drawn = join(normal, sets, "toy", contaminants=200)
    numbers = drawn.train_labels.bincount()[3:].tolist()
    assert sum(numbers) == 200
    # Hypergeometric: mean 150, standard deviation 4.3.
    assert abs(numbers[0] - 150) < 25
    content = {name: {i.numpy().tobytes() for i in part.train_images} for name, part in sets.items()}
    for image, label in zip(drawn.train_images[3:], drawn.train_labels[3:].tolist(), strict=True):
        assert image.numpy().tobytes() in content["pq"[label - 3]]


def test_grey_and_coloured_sets_do_not_join():
    letters, other = labelled("letters", "ab", 2, 1), labelled("other", "x", 2, 1)
    grey = replace(
        other, train_images=other.train_images[:, :1], test_images=other.test_images[:, :1], mean=[0], std=[1]
    )
    with pytest.raises(UserError, match="toy: images of anomaly set 'd' have 1 channels, those of letters 3"):
        join(letters, {"d": grey}, "toy")


@pytest.mark.parametrize(
    ("sets", "limits", "message"),
    [
        ({}, {}, "toy: has no anomaly set; give at least one"),
        ({"b": ("x", 1, 1)}, {}, "toy: anomaly set 'b' has the name of a class of letters; rename"),
        ({"d": ("x", 3, 0)}, {}, "toy: anomaly set 'd' has no test image"),
        ({"d": ("x", 3, 1)}, {"test_per_set": 0}, "test_per_set=0 must be at least 1"),
        ({"d": ("x", 3, 1)}, {"test_per_set": -1}, "test_per_set=-1 must be at least 1"),
        ({"d": ("x", 3, 1)}, {"contaminants": -1}, "contaminants=-1 must be at least 0"),
    ],
)
def test_what_cannot_be_joined_is_one_line(sets, limits, message):
    parts = {name: labelled(name, *parts) for name, parts in sets.items()}
    with refusal(message):
        join(labelled("letters", "abc", 2, 2), parts, "toy", **limits)


def test_batches_carry_two_labels_and_the_class():
    images = joined()
    dataset = LabelledDataset(images.test_images, images.test_labels, images.mean, images.std, 3)
    batch = dataset.__getitems__([2, 12, 28, 0])
    assert batch["label"].tolist() == [0, 1, 1, 0]
    assert batch["category"].tolist() == [2, 3, 4, 0]
    assert batch["index"].tolist() == [2, 12, 28, 0]
    assert batch["label"].dtype == batch["category"].dtype == torch.int64
    mean, std = torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1), torch.tensor([1.0, 1, 2]).view(3, 1, 1)
    assert torch.allclose(batch["image"], (images.test_images[[2, 12, 28, 0]] / 255 - mean) / std, atol=1e-6)
    item = dataset[12]
    assert (item["label"].item(), item["category"].item()) == (1, 3)
    assert images.test_labels[12] == 3  # the set's labels are left alone


def test_other_partitions_and_subsets_take_a_semantic_set():
    images = joined()
    dealt = Dirichlet(clients=3, alpha=1, min_size=2)(images, 0)
    assert dealt.counts(images).sum(axis=0).tolist() == [20, 20, 20, 30, 0]
    part = images.subset(train_per_class=5)
    assert isinstance(part, SemanticSet)
    assert part.anomalies == images.anomalies
    assert part.train_labels.bincount().tolist() == [5, 5, 5, 5]


def many(classes=10, each=1100, contaminants=150) -> SemanticSet:
    """Images of one pixel."""
    normal = labelled("digits", [f"c{k}" for k in range(classes)], each, 1, side=1)
    return join(normal, {"other": labelled("other", "x", contaminants, 1, side=1)}, "toy")


def test_the_papers_mix_is_exact():
    images = many()
    partition = DominantClass()(images, 0)
    counts = partition.counts(images)
    assert partition.sizes == (1000,) * 10
    assert counts[:, :10].diagonal().tolist() == [891] * 10
    assert (counts[:, :10].sum(axis=1) - 891).tolist() == [99] * 10
    assert counts[:, 10].tolist() == [10] * 10
    assert len({i for indices in partition.clients for i in indices}) == 10_000


def test_without_contaminants_the_rest_grows():
    images = many(contaminants=0)
    counts = DominantClass(contamination=0)(images, 0).counts(images)
    assert counts[:, :10].diagonal().tolist() == [900] * 10
    assert counts.sum(axis=1).tolist() == [1000] * 10
    with pytest.raises(
        UserError, match=r"needs 100 contaminants, toy has 0 left; change partition\.size, .*contamination"
    ):
        DominantClass()(images, 0)


def test_the_others_are_spread_evenly_at_random():
    images = many(classes=4, each=300, contaminants=0)
    deal = DominantClass(clients=4, size=60, dominant=0.5, contamination=0)
    counts = sum(deal(images, seed).counts(images)[:, :4] for seed in range(60))
    off_diagonal = counts[~np.eye(4, dtype=bool)].reshape(4, 3)
    # Draws without replacement vary less than the multinomial that the test supposes.
    assert all(stats.chisquare(row).pvalue > 1e-3 for row in off_diagonal)


@settings(max_examples=60)
@given(
    classes=st.integers(2, 5),
    clients=st.integers(1, 7),
    size=st.integers(1, 40),
    dominant=st.floats(0, 1),
    contamination=st.floats(0, 0.5),
    seed=st.integers(0, 2**40),
)
def test_every_client_gets_its_share_and_no_image_two_owners(
    classes, clients, size, dominant, contamination, seed
):
    images = many(classes, each=2 * clients * size, contaminants=clients * size)
    strategy = DominantClass(clients, size, dominant, contamination)
    partition = strategy(images, seed)
    assert strategy(images, seed) == partition
    dealt = [i for indices in partition.clients for i in indices]
    assert len(dealt) == len(set(dealt)) == clients * size
    hidden = round(contamination * size)
    own = round(dominant * (size - hidden))
    for client, row in enumerate(partition.counts(images).tolist()):
        assert row[classes] == hidden
        assert row[client % classes] == own


def test_the_seed_decides_and_any_image_may_be_drawn():
    images = many(classes=2, each=30, contaminants=10)
    deal = DominantClass(clients=2, size=20, dominant=0.8, contamination=0.1)
    assert deal(images, 0) != deal(images, 1)
    drawn = Counter(i for seed in range(60) for indices in deal(images, seed).clients for i in indices)
    assert len(drawn) == 70


def test_sets_of_files_have_dominant_products():
    train = tuple(Sample(Path(f"{product}{i}.png"), product) for i in range(30) for product in "ab")
    images = ImageSet("files", train, ())
    deal = DominantClass(clients=3, size=10, dominant=0.8, contamination=0)
    assert deal(images, 0).counts(images).tolist() == [[8, 2], [2, 8], [8, 2]]
    with pytest.raises(UserError, match="needs 3 contaminants, files has 0 left"):
        DominantClass(clients=3, size=100)(images, 0)


@pytest.mark.parametrize(
    ("deal", "message"),
    [
        (
            DominantClass(3, 12, 0.9, 0),
            "needs 22 images of class 'c0', toy has 20 left",
        ),
        (DominantClass(2, 20, 0.9, 0.1), "needs 4 contaminants, toy has 3"),
        (
            DominantClass(1, 30, 0.1, 0),
            "needs 27 images that are not of class 'c0' for client 0, toy has 20 left",
        ),
    ],
)
def test_too_few_images_say_what_is_missing(deal, message):
    with refusal(message):
        deal(many(classes=2, each=20, contaminants=3), 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"clients": 0}, {"size": 0}, {"dominant": 1.1}, {"dominant": -0.1}, {"contamination": 1},
        {"contamination": 1.1}, {"contamination": -0.01}, {"contamination": float("nan")},
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(UserError, match=f"partition.{next(iter(wrong))}="):
        DominantClass(**wrong)


def write(folder: Path, name: str, labels, side=4, seed=0) -> None:
    images = np.random.default_rng(seed).integers(0, 256, (len(labels), side, side, 3), np.uint8)
    np.savez(folder / name, images=images, labels=np.array(labels))


@pytest.fixture
def archives(tmp_path):
    """The packed configuration's four files, small, the last without labels."""
    write(tmp_path, "cifar10_train_2000pc_jpeg.npz", [0, 1] * 30)
    write(tmp_path, "cifar10_test_jpeg.npz", [0, 1], seed=1)
    write(tmp_path, "cifar100_train_lt300_if10_jpeg.npz", [0, 1, 2], seed=2)
    write(tmp_path, "cifar100_test_50pc_jpeg.npz", [2, 1], seed=3)
    np.savez(tmp_path / "ood_imagenet1000_32_jpeg.npz", images=np.zeros((3, 8, 8, 3), np.uint8))
    return tmp_path


def test_the_packed_configuration_builds_and_is_dealt(archives):
    overrides = ["data=semantic_cifar10_packed", f"data.root={archives}", "partition=dominant"]
    config = compose([*overrides, "partition.clients=2", "partition.size=10", "partition.contamination=0.1"])
    images = build(config["data"])
    assert images.classes == ("0", "1", "cifar100", "imagenet")
    assert images.test_labels.tolist() == [0, 1, 2, 2, 3, 3, 3]
    assert (list(images.mean), list(images.std)) == ([0, 0, 0], [1, 1, 1])
    dealt = build(config["partition"])(images, config["seed"])
    assert dealt.counts(images).tolist() == [[8, 1, 1, 0], [1, 8, 1, 0]]


def test_anomaly_sets_are_exchanged_on_the_command_line(archives):
    config = compose(
        [
            "data=semantic_cifar10_packed",
            f"data.root={archives}",
            "~data.anomalies.cifar100",
            "data.anomalies.imagenet.test=cifar100_test_50pc_jpeg.npz",
            "+data.anomalies.own._target_=lit_fedad.data.packed.packed",
            "+data.anomalies.own._partial_=true",
            "+data.anomalies.own.train=null",
            "+data.anomalies.own.test=ood_imagenet1000_32_jpeg.npz",
        ]
    )
    images = build(config["data"])
    assert images.anomalies == ("imagenet", "own")
    assert images.test_labels.tolist() == [0, 1, 2, 2, 3, 3, 3]
    assert len(images.train) == 60


def test_the_torchvision_configuration_reaches_its_readers(tmp_path):
    config = compose(["data=semantic_cifar10", f"data.root={tmp_path}"])
    with refusal(r"cifar-10-batches-py: is missing"):
        build(config["data"])


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.skipif(ROOT is None, reason="LIT_FEDAD_DATA names no folder")
def test_real_cifar10_against_cifar100_and_imagenet():
    overrides = ["data=semantic_cifar10_packed", f"data.root={ROOT}/cifar", "partition=dominant"]
    config = compose(overrides)
    images = build(config["data"])
    assert images.train_labels.bincount().tolist() == [2_000] * 10 + [500]
    assert images.test_labels.bincount().tolist() == [1_000] * 10 + [5_000, 1_000]
    counts = build(config["partition"])(images, 0).counts(images)
    assert counts[:, :10].diagonal().tolist() == [891] * 10
    assert (counts[:, :10].sum(axis=1) - 891).tolist() == [99] * 10
    assert counts[:, 10:].tolist() == [[10, 0]] * 10


def test_images_count_as_of_no_product_that_a_task_tells_apart():
    """A hidden anomaly's label would tell it."""
    images = joined()
    dataset = LabelledDataset(images.train_images, images.train_labels, normal_classes=3, products=6)
    assert set(dataset.__getitems__(range(len(images.train)))["product"].tolist()) == {6}
