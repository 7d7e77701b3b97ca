import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from lit_fedad.data.partition import IID, ByProduct, Dirichlet, FromFile, Partition, Pooled
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.errors import UserError


def image_set(*counts: int) -> ImageSet:
    """So many training images of the types a, b, ...; the types interleaved."""
    samples = [
        Sample(Path(f"{product}/{i:03}.png"), product)
        for product, count in zip("abcdefgh", counts, strict=False)
        for i in range(count)
    ]
    return ImageSet("toy", tuple(sorted(samples, key=lambda sample: sample.path.name)), ())


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


def test_counts_agree_with_counting_by_hand():
    images = image_set(30, 50, 20)
    partition = Dirichlet(clients=4, alpha=0.5, min_size=5)(images, seed=3)
    counts = partition.counts(images)
    assert counts.shape == (4, 3)
    for client, indices in enumerate(partition.clients):
        by_hand = Counter(images.train[index].product for index in indices)
        assert [by_hand[product] for product in images.products] == counts[client].tolist()
    assert counts.sum(axis=0).tolist() == [30, 50, 20]


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


def test_images_of_a_type_are_shuffled_before_they_are_cut():
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
    # A client is closed once it holds its even share (100): it had less before the last type it got.
    for seed in range(20):
        counts = Dirichlet(4, 0.1, 0, balance=True)(images, seed).counts(images)
        held = np.cumsum(counts, axis=1)
        assert np.all((held[:, :-1] < 100) | (counts[:, 1:] == 0))


def test_different_seeds_differ():
    images = image_set(50, 50)
    for strategy in (Dirichlet(3, 1.0, 0), IID(3)):
        assert strategy(images, 0) != strategy(images, 1)


@pytest.mark.parametrize(("clients", "min_size"), [(5, 21), (5, 20)])
def test_an_impossible_min_size_says_what_to_lower(clients, min_size):
    with pytest.raises(UserError, match=rf"min_size={min_size} of the 100 images; lower min_size or clients"):
        Dirichlet(clients, 0.1, min_size)(image_set(100), 0)


def test_by_product_deals_types_in_turn():
    images = image_set(3, 4, 5)
    assert ByProduct()(images, 0).counts(images).tolist() == [[3, 0, 0], [0, 4, 0], [0, 0, 5]]
    assert ByProduct(2)(images, 0).counts(images).tolist() == [[3, 0, 5], [0, 4, 0]]
    with pytest.raises(UserError, match="4 clients but 3 product types"):
        ByProduct(4)(images, 0)


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


def test_save_and_load_round_trip(tmp_path):
    images = image_set(40, 40)
    partition = Dirichlet(3, 0.5, 5)(images, 0)
    partition.save(tmp_path / "new" / "partition.json")
    assert Partition.load(tmp_path / "new" / "partition.json") == partition
    assert FromFile(tmp_path / "new" / "partition.json")(images, 99) == partition


def test_without_stages_a_client_has_one_task():
    partition = Partition(((0, 2), (1,)))
    assert partition.stages is None
    assert partition.reserved == ()
    assert partition.tasks == (((0, 2),), ((1,),))
    images = image_set(2, 1)
    assert [counts.tolist() for counts in partition.stage_counts(images)] == [[[2, 0]], [[0, 1]]]


def test_in_stages_orders_images_and_unites_them():
    partition = Partition.in_stages([[[5, 2], np.array([0])], [[4, 1]]], reserved=[7, 3])
    assert partition.stages == (((2, 5), (0,)), ((1, 4),))
    assert partition.tasks == partition.stages
    assert partition.clients == ((0, 2, 5), (1, 4))
    assert partition.reserved == (3, 7)
    assert partition.sizes == (3, 2)
    numbers = [*partition.clients[0], *partition.stages[0][1], *partition.reserved]
    assert {type(number) for number in numbers} == {int}


def test_counts_of_stages_agree_with_counting_by_hand():
    images = image_set(12, 9, 6)
    order = np.random.default_rng(0).permutation(27)
    partition = Partition.in_stages([np.split(order[:15], [4, 5]), [order[15:17]], np.split(order[17:], [8])])
    counts = partition.stage_counts(images)
    assert [rows.shape for rows in counts] == [(3, 3), (1, 3), (2, 3)]
    assert all(rows.dtype == np.int64 for rows in counts)
    for rows, tasks in zip(counts, partition.stages, strict=True):
        for row, task in zip(rows, tasks, strict=True):
            by_hand = Counter(images.train[index].product for index in task)
            assert [by_hand[product] for product in images.products] == row.tolist()
    assert partition.counts(images).tolist() == [rows.sum(axis=0).tolist() for rows in counts]


@pytest.mark.parametrize(
    ("partition", "content"),
    [
        (Partition(((0, 2), (1,))), {"clients": [[0, 2], [1]]}),
        (Partition(((0,), (1,)), reserved=(3, 4)), {"clients": [[0], [1]], "reserved": [3, 4]}),
        (Partition.in_stages([[[0], [2]], [[1]]]), {"stages": [[[0], [2]], [[1]]]}),
        (Partition.in_stages([[[2], [0]]], [1, 3]), {"stages": [[[2], [0]]], "reserved": [1, 3]}),
    ],
)
def test_what_a_file_holds(tmp_path, partition, content):
    partition.save(tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text()) == content
    assert Partition.load(tmp_path / "p.json") == partition
    assert FromFile(tmp_path / "p.json")(image_set(5), 0) == partition


def test_from_file_reads_fedvcks_split_files_and_takes_clients_without_images(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"client_idx": [[3, 0], [], [4]], "client_classes": [[0, 1], [], [1]]}))
    partition = FromFile(path)(image_set(5), 0)
    assert partition.clients == ((0, 3), (), (4,))
    partition.save(path)
    assert FromFile(path, clients=3)(image_set(5), 1) == partition


def test_from_file_reads_a_plain_list_and_may_leave_images_out(tmp_path):
    path = tmp_path / "p.json"
    path.write_text("[[4, 0], [2]]")
    assert FromFile(path, clients=2)(image_set(5), 0).clients == ((0, 4), (2,))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([[0], [5]], "client 1 lists image 5.* 0 to 4"),
        ([[-1], [2]], "client 0 lists image -1"),
        ([[0, 1], [1]], "image 1 is listed for client 0 and again for client 1"),
        ([[0, 0]], "image 0 is listed for client 0 and again for client 0"),
        ([[], []], "no client has an image"),
        ({"client_idx": [[0], [5]]}, "client 1 lists image 5.* 0 to 4"),
        ({"client_idx": [0]}, "client 0 is not a list of whole numbers"),
        ({"client_idx": 3}, "holds no list of clients"),
        ([], "holds 0 clients"),
        ([[0], ["1"]], "client 1 is not a list of whole numbers"),
        ([[0], [True]], "client 1 is not a list of whole numbers"),
        ([[0], [1.0]], "client 1 is not a list of whole numbers"),
        ([0, 1], "client 0 is not a list of whole numbers"),
        ({"client": [[0]]}, "holds no list of clients"),
        ("nonsense", "holds no list of clients"),
        (
            {"stages": [[[0], [1]], [[2], [1]]]},
            "1 is listed for stage 1 of client 0 .* for stage 1 of client 1",
        ),
        (
            {"stages": [[[0], [0]]]},
            "image 0 is listed for stage 0 of client 0 and again for stage 1 of client 0",
        ),
        (
            {"stages": [[[0, 0]]]},
            "image 0 is listed for stage 0 of client 0 and again for stage 0 of client 0",
        ),
        ({"stages": [[[0]], [[1], [5]]]}, "stage 1 of client 1 lists image 5.* 0 to 4"),
        ({"stages": [[[0]], [[-1]]]}, "stage 0 of client 1 lists image -1"),
        ({"stages": [[[0]], [[1], []]]}, "stage 1 of client 1 has no images"),
        ({"stages": [[[0]], []]}, "client 1 has no list of stages"),
        ({"stages": [[[0]], 1]}, "client 1 has no list of stages"),
        ({"stages": [[0]]}, "stage 0 of client 0 is not a list of whole numbers"),
        ({"stages": [[[0], [True]]]}, "stage 1 of client 0 is not a list of whole numbers"),
        ({"stages": 1}, "holds no list of clients"),
        ({"stages": []}, "holds 0 clients"),
        ({"stages": [[[0]]], "clients": [[0]]}, "holds both clients and stages"),
        ({"clients": [[[0]]]}, "client 0 is not a list of whole numbers"),
        (
            {"clients": [[0]], "reserved": [0]},
            r"image 0 is listed for client 0 and again for the server \(reserved",
        ),
        (
            {"stages": [[[0], [1]]], "reserved": [1]},
            "listed for stage 1 of client 0 and again for the server",
        ),
        ({"stages": [[[0]]], "reserved": [2, 2]}, "image 2 is listed for the server .* again for the server"),
        ({"stages": [[[0]]], "reserved": [5]}, r"the server \(reserved\) lists image 5.* 0 to 4"),
        ({"stages": [[[0]]], "reserved": 3}, "reserved is not a list of whole numbers"),
    ],
)
def test_from_file_faults_are_one_line(tmp_path, content, message):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message) as caught:
        FromFile(path)(image_set(5), 0)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_from_file_checks_the_number_of_clients(tmp_path):
    path = tmp_path / "p.json"
    path.write_text("[[0], [1]]")
    with pytest.raises(UserError, match="holds 2 clients, expected 3"):
        FromFile(path, clients=3)(image_set(5), 0)


def test_from_file_missing_or_not_json(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        FromFile(tmp_path / "none.json")(image_set(5), 0)
    (tmp_path / "bad.json").write_text("[[0,")
    with pytest.raises(UserError, match="is not JSON"):
        FromFile(tmp_path / "bad.json")(image_set(5), 0)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not JSON"):
        FromFile(tmp_path / "binary.json")(image_set(5), 0)
