"""Partitions whose images arrive in stages."""

from collections import Counter
from decimal import ROUND_FLOOR, Decimal

import numpy as np
import pytest
import torch
from helpers.images import image_set
from helpers.refusals import refusal
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.data.labelled import LabelledSet
from lit_fedad.data.partition import FromFile, Partition
from lit_fedad.data.sample import ImageSet
from lit_fedad.data.stage_strategies import LongTailedStages, ProductsInTurn, long_tail

# Worked out with a pocket calculator: 5000 / 10^(c / 9), 5000 / 50^(c / 9), 5000 / 100^(c / 9).
BY_HAND = {
    10: [5000, 3871, 2997, 2320, 1796, 1391, 1077, 834, 645, 500],
    50: [5000, 3237, 2096, 1357, 878, 568, 368, 238, 154, 100],
    100: [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50],
}


@pytest.mark.parametrize(("imbalance", "kept"), BY_HAND.items())
def test_profiles_of_cifar10(imbalance, kept):
    assert long_tail([5000] * 10, imbalance) == kept


@given(
    largest=st.integers(100, 6000),
    classes=st.integers(2, 120),
    imbalance=st.integers(1, 100) | st.floats(1, 100),
)
@pytest.mark.slow
def test_profile_agrees_with_decimal_arithmetic(largest, classes, imbalance):
    kept = long_tail([largest] * classes, imbalance)
    for number, count in enumerate(kept):
        exact = largest / Decimal(imbalance) ** (Decimal(number) / (classes - 1))
        assert count == int((exact + Decimal("1e-9")).to_integral_value(ROUND_FLOOR))


@pytest.mark.parametrize("base", [3, 5, 6, 7])
def test_whole_profiles_lose_nothing_to_round_off(base):
    assert long_tail([10 * base**5] * 6, base**5) == [10 * base**power for power in range(5, -1, -1)]


def test_an_imbalance_of_one_keeps_every_image():
    assert long_tail([7, 3, 5], 1) == [7, 3, 5]
    assert long_tail([4], 100) == [4]
    assert long_tail([200, 200], 100) == [200, 2]


def test_no_class_keeps_more_than_it_has():
    # The profile of n_max = 100, which is the second class's size, is 100, 31.6, 10.
    assert long_tail([60, 100, 4], 10) == [60, 31, 4]


@pytest.mark.parametrize(
    ("sizes", "imbalance", "message"),
    [
        ([5, 5], 0.5, r"imbalance=0\.5 must be at least 1"),
        ([5, 5], float("nan"), "imbalance=nan must be at least 1"),
        ([30, 9, 20], 50, r"partition\.imbalance=50: class 2 of size 20 .* lower imbalance to at most 30"),
        ([30, 0, 20], 1, "class 1 of size 0 is left without images; give it some or leave it out"),
    ],
)
def test_tails_that_cannot_be_are_one_line(sizes, imbalance, message):
    with refusal(message):
        long_tail(sizes, imbalance)


def test_the_advised_imbalance_is_the_largest_that_works():
    assert long_tail([30, 20, 20], 30)[-1] == 1
    with pytest.raises(UserError):
        long_tail([30, 20, 20], 30.1)


def labelled_set(*counts: int) -> LabelledSet:
    """So many training images of the classes c0, c1, ..., shuffled: the first image is of any class."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    none = torch.zeros(0, 3, 1, 1, dtype=torch.uint8)
    classes = tuple(f"c{label}" for label in range(len(counts)))
    images = torch.zeros(len(labels), 3, 1, 1, dtype=torch.uint8)
    return LabelledSet("labelled", classes, images, torch.from_numpy(labels), none, torch.zeros(0).long())


def categories(images: ImageSet | LabelledSet, indices: tuple[int, ...]) -> list[str]:
    return [images.train[index].category for index in indices]


def listed(partition: Partition) -> list[int]:
    """Every index as often as it occurs."""
    held = [index for stages in partition.stages for stage in stages for index in stage]
    return [*held, *partition.reserved]


@settings(max_examples=80)
@given(
    counts=st.lists(st.integers(20, 60), min_size=2, max_size=8),
    strategy=st.builds(
        LongTailedStages,
        clients=st.integers(1, 6),
        classes=st.integers(1, 4),
        stages=st.just(3),
        imbalance=st.sampled_from([1, 3, 10]),
        min_stages=st.none() | st.integers(1, 3),
        shards=st.sampled_from(["of_class", "equal"]),
        equal_size=st.booleans(),
        server_labelled=st.integers(0, 4),
    ),
    seed=st.integers(0, 2**40),
)
def test_no_image_is_given_twice_and_the_seed_decides_alone(counts, strategy, seed):
    images = image_set(*counts)
    try:
        partition = strategy(images, seed)
    except UserError:  # more classes in a stage than there are, or a tail that is too thin
        reject()
    np.random.seed(2)  # noqa: NPY002
    assert strategy(images, seed) == partition
    assert len(set(listed(partition))) == len(listed(partition))
    assert set(listed(partition)) <= set(range(sum(counts)))
    fewest = strategy.min_stages or strategy.stages
    for own, stages in zip(partition.clients, partition.stages, strict=True):
        assert fewest <= len(stages) <= strategy.stages
        assert own == tuple(sorted(index for stage in stages for index in stage))
        if strategy.shards == "of_class":
            assert all(1 <= len(set(categories(images, stage))) <= strategy.classes for stage in stages)
    sizes = {len(stage) for stages in partition.stages for stage in stages}
    assert min(sizes) >= 1
    assert len(sizes) == 1 or (strategy.shards == "of_class" and not strategy.equal_size)
    reserved = Counter(categories(images, partition.reserved))
    assert [reserved[category] for category in images.categories] == [strategy.server_labelled] * len(counts)


@pytest.mark.parametrize("images", [image_set(*[500] * 10), labelled_set(*[500] * 10)])
def test_the_tail_follows_the_order_of_the_categories(images):
    # 500 / 50^(c / 9); five hands of four classes take each of the ten twice, so every kept image is held.
    partition = LongTailedStages(stages=1, clients=5)(images, 0)
    kept = [500, 323, 209, 135, 87, 56, 36, 23, 15, 10]
    assert partition.counts(images).sum(axis=0).tolist() == kept
    assert [counts.shape for counts in partition.stage_counts(images)] == [(1, 10)] * 5


def test_images_for_the_server_are_taken_before_the_tail_is_cut():
    images = image_set(104, 104, 104)
    partition = LongTailedStages(clients=3, classes=3, stages=2, imbalance=4, server_labelled=4)(images, 1)
    # 100 / 4^(c / 2)
    assert partition.counts(images).sum(axis=0).tolist() == [100, 50, 25]
    assert Counter(categories(images, partition.reserved)) == {"a": 4, "b": 4, "c": 4}


def test_images_for_the_server_depend_on_the_seed_alone():
    images = image_set(80, 80, 80)
    reserved = [
        LongTailedStages(clients=n, classes=s, stages=m, imbalance=imbalance, server_labelled=5)(
            images, 3
        ).reserved
        for n, s, m, imbalance in [(2, 1, 3, 1), (4, 3, 1, 2), (3, 2, 2, 4)]
    ]
    assert reserved[0] == reserved[1] == reserved[2]
    assert LongTailedStages(2, 1, 3, 1, server_labelled=5)(images, 4).reserved != reserved[0]


def test_a_longer_tail_is_part_of_a_shorter():
    images = image_set(90, 90, 90)
    held = [set(listed(LongTailedStages(3, 3, 1, imbalance)(images, 0))) for imbalance in (1, 3, 9)]
    assert held[0] > held[1] > held[2]


@pytest.mark.parametrize(
    ("clients", "classes", "categories"),
    [(20, 4, 10), (7, 3, 10), (5, 4, 6), (3, 2, 7), (4, 5, 5), (9, 1, 4)],
)
def test_classes_are_dealt_evenly_in_every_stage(clients, classes, categories):
    images = image_set(*[600] * categories)
    for seed in range(5):
        partition = LongTailedStages(clients, classes, stages=4, imbalance=1)(images, seed)
        # client, stage, class
        held = np.stack(partition.stage_counts(images)) > 0
        assert np.all(held.sum(axis=2) == classes)
        uses = held.sum(axis=0)
        assert uses.max() - uses.min() <= 1
        assert np.all(uses.min(axis=1) >= 1) == (clients * classes >= categories)


def test_hands_are_random():
    """Every pair of classes meets, and stages of a client differ."""
    images = image_set(*[200] * 4)
    partition = LongTailedStages(clients=6, classes=2, stages=5, imbalance=1)(images, 0)
    hands = [[frozenset(categories(images, stage)) for stage in stages] for stages in partition.stages]
    assert {hand for own in hands for hand in own} == {
        frozenset(pair) for pair in ("ab", "ac", "ad", "bc", "bd", "cd")
    }
    assert all(len(set(own)) > 1 for own in hands)


def test_shards_of_a_class_are_even_and_shuffled():
    images = image_set(203, 203, 203)
    counts = np.concatenate(LongTailedStages(4, 2, 3, imbalance=1)(images, 0).stage_counts(images))
    for column in counts.T:
        shards = column[column > 0]
        assert shards.sum() == 203
        assert shards.max() - shards.min() <= 1
    only = LongTailedStages(clients=2, classes=1, stages=1, imbalance=1)(image_set(200), 0)
    assert np.sum(np.diff(only.clients[0]) > 1) > 20


def test_a_short_class_reaches_all_stages():
    """Five images in 20 hands come to any stage and client, not to the first."""
    images = image_set(400, 5)
    met = np.zeros((4, 5))
    for seed in range(60):
        counts = np.stack(
            LongTailedStages(clients=4, classes=2, stages=5, imbalance=1)(images, seed).stage_counts(images)
        )
        assert counts[..., 1].sum() == 5
        assert counts[..., 1].max() == 1
        met += counts[..., 1]
    # Binomial of 60 draws with 1/4 each: 15, standard deviation 3.4.
    assert met.min() >= 3
    assert met.max() <= 29


def test_numbers_of_stages_are_uniform():
    images = image_set(2000, 2000)
    lengths = Counter(
        len(stages)
        for seed in range(30)
        for stages in LongTailedStages(20, 1, stages=4, imbalance=1, min_stages=2)(images, seed).stages
    )
    # 600 draws of 3: 200 each, standard deviation 11.5.
    assert sorted(lengths) == [2, 3, 4]
    assert min(lengths.values()) > 150


def test_equal_shards_make_equal_stages_of_neighbouring_images():
    """The long tail of 100, 46, 21 and 10 images, in order, is cut into twelve shards of 14: nine are left over."""
    images = labelled_set(100, 100, 100, 100)
    partition = LongTailedStages(3, 2, 2, imbalance=10, shards="equal")(images, 0)
    stages = [stage for own in partition.stages for stage in own]
    assert [len(stage) for stage in stages] == [28] * 6
    held = Counter(categories(images, [index for stage in stages for index in stage]))
    whole = {"c0": 100, "c1": 46, "c2": 21, "c3": 10}
    assert all(held[name] <= size for name, size in whole.items())
    assert sum(whole.values()) - held.total() == 9
    # Two shards of 14 span two classes each at most, but for the shard that holds the end of the tail.
    assert max(len(set(categories(images, stage))) for stage in stages) <= 5
    assert min(len(set(categories(images, stage))) for stage in stages) == 1


def test_equal_size_drops_at_random_what_is_too_much():
    images = image_set(300, 100, 40)
    whole = LongTailedStages(3, 2, 2, imbalance=5)(images, 0)
    cut = LongTailedStages(3, 2, 2, imbalance=5, equal_size=True)(images, 0)
    for before, after in zip(whole.clients, cut.clients, strict=True):
        assert set(after) <= set(before)
    full, left = (np.concatenate(partition.stage_counts(images)) for partition in (whole, cut))
    # Shards of 75, 25 and 10 images, two a stage.
    assert sorted(set(full.sum(axis=1))) == [35, 85, 100]
    assert np.all(left.sum(axis=1) == 35)
    # Hypergeometric, with standard deviations of at most 2.1 images.
    assert left == pytest.approx(full * 35 / full.sum(axis=1, keepdims=True), abs=7)


def test_different_seeds_differ():
    images = image_set(100, 100, 100)
    for strategy in (LongTailedStages(3, 2, 2, 1), ProductsInTurn()):
        assert strategy(images, 0) != strategy(images, 1)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (lambda: LongTailedStages(clients=0), "partition.clients=0 must be at least 1"),
        (lambda: LongTailedStages(classes=0), "classes=0 must be at least 1"),
        (lambda: LongTailedStages(stages=0), "stages=0 must be at least 1"),
        (lambda: LongTailedStages(server_labelled=-1), "server_labelled=-1 must be at least 0"),
        (lambda: LongTailedStages(min_stages=0), r"min_stages=0 must be in \[1, 5\]"),
        (lambda: LongTailedStages(min_stages=6), r"min_stages=6 must be in \[1, 5\]"),
        (
            lambda: LongTailedStages(classes=4),
            r"partition\.classes=4: toy has 3 classes; lower classes to that",
        ),
        (
            lambda: LongTailedStages(classes=2, imbalance=41),
            "class 2 of size 20 .*lower imbalance to at most 40",
        ),
        (
            lambda: LongTailedStages(classes=2, server_labelled=20),
            r"partition\.server_labelled=20 .* the 20 images of class 'c'; lower it below 20",
        ),
        (
            lambda: LongTailedStages(clients=20, classes=1, stages=5, imbalance=1),
            r"stage \d of client \d+ is left without an image.*lower partition.clients, stages or imbalance",
        ),
        (lambda: ProductsInTurn(clients=0), "clients=0 must be at least 1"),
        (
            lambda: ProductsInTurn(clients=21),
            "21 clients but 20 training images of category 'c'; lower partition.clients",
        ),
        (lambda: ProductsInTurn(order=["b", "x"]), "partition.order: no category 'x'; the nearest is"),
        (lambda: ProductsInTurn(order=["b", "a", "b"]), r"partition\.order: category 'b' is named twice"),
        (lambda: ProductsInTurn(order=[]), r"partition\.order=\[\]: name at least one category"),
    ],
)
def test_faults_are_one_line(strategy, message):
    with refusal(message):
        strategy()(image_set(40, 30, 20), 0)


def test_an_empty_stage_is_named_correctly():
    # Two images of the only class for three clients: whoever has none is named.
    images = image_set(2)
    named = set()
    for seed in range(30):
        with pytest.raises(UserError, match=r"stage 0 of client [012] is left") as caught:
            LongTailedStages(3, 1, 1, imbalance=1)(images, seed)
        named.add(str(caught.value).partition("client ")[2][0])
    assert named == {"0", "1", "2"}


@pytest.mark.parametrize("rotate", [False, True])
def test_categories_come_in_turn(rotate):
    images = image_set(31, 22, 13, 9)
    partition = ProductsInTurn(clients=3, rotate=rotate)(images, 5)
    assert sorted(listed(partition)) == list(range(31 + 22 + 13 + 9))
    for client, stages in enumerate(partition.stages):
        turned = "abcdabcd"[client : client + 4] if rotate else "abcd"
        assert [set(categories(images, stage)) for stage in stages] == [{category} for category in turned]
    counts = partition.counts(images)
    assert counts.sum(axis=0).tolist() == [31, 22, 13, 9]
    assert np.all(counts.max(axis=0) - counts.min(axis=0) <= 1)


def test_rotation_changes_the_order_alone():
    images = image_set(30, 30)
    straight, turned = (ProductsInTurn(5, rotate=rotate)(images, 2) for rotate in (False, True))
    assert straight.clients == turned.clients
    assert turned.stages[0] == straight.stages[0]
    assert turned.stages[1] == straight.stages[1][::-1]


def test_an_order_may_leave_categories_out():
    images = image_set(10, 10, 10)
    partition = ProductsInTurn(2, order=["c", "a"])(images, 0)
    assert [[set(categories(images, stage)) for stage in stages] for stages in partition.stages] == [
        [{"c"}, {"a"}]
    ] * 2
    assert partition.counts(images).tolist() == [[5, 0, 5], [5, 0, 5]]


def test_classes_of_a_labelled_set_come_in_their_order():
    images = labelled_set(6, 6, 6)
    first = [set(categories(images, stage)) for stage in ProductsInTurn(2)(images, 0).stages[0]]
    assert first == [{"c0"}, {"c1"}, {"c2"}]


def test_an_images_place_in_its_category_does_not_decide_its_client():
    partition = ProductsInTurn(2)(image_set(200), 0)
    assert np.sum(np.diff(partition.clients[0]) > 1) > 20


@pytest.mark.parametrize(
    "strategy",
    [
        LongTailedStages(3, 2, 3, 2, min_stages=1, server_labelled=2),
        LongTailedStages(3, 2, 3, 2, schedule="literal"),
        ProductsInTurn(),
        ProductsInTurn(schedule="literal"),
    ],
)
def test_save_and_load_round_trip(strategy, tmp_path):
    images = image_set(40, 40, 40)
    partition = strategy(images, 0)
    assert partition.schedule == strategy.schedule
    partition.save(tmp_path / "a.json")
    again = FromFile(tmp_path / "a.json")(images, 99)
    assert again == partition
    again.save(tmp_path / "b.json")
    assert (tmp_path / "b.json").read_bytes() == (tmp_path / "a.json").read_bytes()


def test_configurations_give_the_defaults():
    streams = {
        name: build(compose([f"partition={name}"])["partition"])
        for name in ("task_stream", "products_in_turn")
    }
    assert streams == {"task_stream": LongTailedStages(), "products_in_turn": ProductsInTurn()}
