"""Strategies without stages: every image has one owner, and each strategy deals as it says."""

from pathlib import Path

import numpy as np
import pytest
from helpers.images import image_set
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from lit_fedad.core.errors import UserError
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.data.strategies import IID, ByGroup, ByProduct, Dirichlet, Pooled

counts = st.lists(st.integers(1, 60), min_size=1, max_size=6)
seeds = st.integers(0, 2**40)
strategies = st.one_of(
    st.builds(
        Dirichlet,
        clients=st.integers(1, 8),
        alpha=st.sampled_from([1e-4, 0.02, 0.1, 1.0, 100.0]),
        min_size=st.integers(0, 3),
        balance=st.booleans(),
    ),
    st.builds(ByProduct, clients=st.none() | st.integers(1, 6)),
    st.builds(IID, clients=st.integers(1, 12)),
    st.just(Pooled()),
)


@settings(max_examples=80)
@given(counts=counts, strategy=strategies, seed=seeds)
def test_every_image_has_one_owner_and_the_seed_decides_alone(counts, strategy, seed):
    images = image_set(*counts)
    np.random.seed(1)  # noqa: NPY002
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lit_fedad.data.strategies._MAX_DRAWS", 500)
            partition = strategy(images, seed)
    except UserError:  # too many clients for so few images
        reject()
    np.random.seed(2)  # noqa: NPY002
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    assert strategy(images, seed) == partition
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002

    assert sorted(index for indices in partition.clients for index in indices) == list(range(sum(counts)))
    assert all(list(indices) == sorted(indices) for indices in partition.clients)
    assert all(type(index) is int for indices in partition.clients for index in indices)
    assert sum(partition.sizes) == sum(counts)


@settings(max_examples=40)
@given(
    counts=st.lists(st.integers(20, 60), min_size=3, max_size=6),
    clients=st.integers(1, 5),
    seed=seeds,
    balance=st.booleans(),
)
def test_dirichlet_gives_every_client_min_size(counts, clients, seed, balance):
    partition = Dirichlet(clients, alpha=0.3, min_size=4, balance=balance)(image_set(*counts), seed)
    assert len(partition.sizes) == clients
    assert min(partition.sizes) >= 4


@pytest.mark.slow
def test_dirichlet_shares_have_the_moments_of_the_distribution():
    # q_j of Dir(alpha 1_N) has mean 1/N and variance (N - 1) / (N^2 (N alpha + 1)).
    clients, alpha, total = 4, 0.7, 1000
    strategy = Dirichlet(clients, alpha, min_size=0)
    images = image_set(total)
    shares = np.array([strategy(images, seed).sizes for seed in range(800)]) / total
    assert shares.mean(axis=0) == pytest.approx(1 / clients, abs=0.03)
    variance = (clients - 1) / (clients**2 * (clients * alpha + 1))
    assert shares.var(axis=0).mean() == pytest.approx(variance, rel=0.1)


def test_small_alpha_is_more_skewed_than_large_alpha():
    images = image_set(100, 100, 100)

    def largest_share(alpha):
        partitions = [Dirichlet(4, alpha, min_size=0)(images, seed) for seed in range(20)]
        return np.mean([partition.counts(images).max(axis=0) / 100 for partition in partitions])

    assert largest_share(0.05) > 0.8
    assert largest_share(1000) < 0.3


def test_images_of_a_category_are_shuffled_before_they_are_cut():
    partition = Dirichlet(2, alpha=1000, min_size=0)(image_set(200), seed=0)
    runs = np.sum(np.diff(partition.clients[0]) > 1)
    assert runs > 20


def test_balance_closes_full_clients():
    images = image_set(100, 100, 100, 100)
    spread = {}
    for balance in (False, True):
        sizes = [Dirichlet(4, 0.1, 0, balance)(images, seed).sizes for seed in range(40)]
        spread[balance] = np.std(sizes, axis=1).mean()
    assert spread[True] < 0.8 * spread[False]
    # A client is closed once it holds its even share (100): it had less before the last category it got.
    for seed in range(20):
        counts = Dirichlet(4, 0.1, 0, balance=True)(images, seed).counts(images)
        held = np.cumsum(counts, axis=1)
        assert np.all((held[:, :-1] < 100) | (counts[:, 1:] == 0))


def test_balance_deals_the_first_category_as_skewed_as_without_it():
    """Nobody holds an even share before it."""
    images = image_set(60, 60)
    for seed in range(20):
        plain, even = (
            Dirichlet(4, 0.1, 0, balance)(images, seed).counts(images)[:, 0] for balance in (False, True)
        )
        assert plain.tolist() == even.tolist()


def test_where_all_shares_fall_to_full_clients_the_others_share_evenly():
    """With so small an alpha one client gets all of a category: the same one again where it is full already."""
    images = image_set(40, 40)
    shared = [Dirichlet(4, 1e-4, 0, balance=True)(images, seed).counts(images)[:, 1] for seed in range(20)]
    assert any(sorted(counts.tolist()) == [0, 13, 13, 14] for counts in shared)
    assert all(counts.sum() == 40 and counts.min() >= 0 for counts in shared)


def test_different_seeds_differ():
    images = image_set(50, 50)
    for strategy in (Dirichlet(3, 1.0, 0), IID(3)):
        assert strategy(images, 0) != strategy(images, 1)


@pytest.mark.parametrize(("clients", "min_size"), [(5, 21), (5, 20)])
def test_an_impossible_min_size_says_what_to_lower(clients, min_size, monkeypatch):
    monkeypatch.setattr("lit_fedad.data.strategies._MAX_DRAWS", 100)
    said = rf"min_size={min_size} of the 100 images; lower them, or deal evenly: partition=iid partition.clients=5"
    with pytest.raises(UserError, match=said):
        Dirichlet(clients, 0.1, min_size)(image_set(100), 0)


def test_by_product_deals_categories_in_turn():
    images = image_set(3, 4, 5)
    assert ByProduct()(images, 0).counts(images).tolist() == [[3, 0, 0], [0, 4, 0], [0, 0, 5]]
    assert ByProduct(2)(images, 0).counts(images).tolist() == [[3, 0, 5], [0, 4, 0]]
    with pytest.raises(
        UserError, match="partition.clients=4: more than the products or classes, of which there are 3"
    ):
        ByProduct(4)(images, 0)


def test_as_many_clients_as_images_hold_one_each():
    assert IID(5)(image_set(5), 0).sizes == (1,) * 5


def test_iid_parts_are_even():
    assert sorted(IID(4)(image_set(10, 8), 0).sizes) == [4, 4, 5, 5]
    with pytest.raises(UserError, match="4 clients but 3 training images"):
        IID(4)(image_set(3), 0)


def test_pooled_is_one_client():
    assert Pooled()(image_set(2, 2), 7).clients == ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: Dirichlet(clients=0),
        lambda: Dirichlet(alpha=0),
        lambda: Dirichlet(alpha=float("nan")),
        lambda: Dirichlet(min_size=-1),
        lambda: ByProduct(0),
        lambda: IID(0),
    ],
)
def test_bad_parameters_are_refused(strategy):
    with pytest.raises(UserError):
        strategy()


def patients(images=24, each=3):
    """Images of patients, ``each`` of one, in one category."""
    samples = tuple(Sample(Path(f"p{i // each:02}_{i}.png"), "chest") for i in range(images))
    return ImageSet("chest", samples, ())


def test_groups_stay_whole_and_fill_the_smallest_client():
    images = patients()
    partition = ByGroup(r"p\d+", clients=3)(images, seed=0)
    assert sorted(i for own in partition.clients for i in own) == list(range(24))
    owners = [{images.train[i].name[:3] for i in own} for own in partition.clients]
    assert sum(map(len, owners)) == len(set.union(*owners)) == 8  # each patient has one owner
    assert sorted(partition.sizes) == [6, 9, 9]
    assert partition == ByGroup(r"p\d+", clients=3)(images, seed=0)
    assert partition != ByGroup(r"p\d+", clients=3)(images, seed=1)


def test_groups_that_cannot_be_dealt_are_refused():
    for group, clients, message in (
        (r"p\d+", 9, "9 clients but 8 groups of images"),
        (r"q\d+", 2, r"partition.group='q.*' is not found in p00_0.png"),
        ("(", 2, "partition.group='\\(' is no regular expression"),
    ):
        with pytest.raises(UserError, match=message):
            ByGroup(group, clients)(patients(), seed=0)
