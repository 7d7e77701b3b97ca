"""Partitions and the files that keep them."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from helpers.images import image_set
from helpers.refusals import refusal

from lit_fedad.core.errors import UserError
from lit_fedad.data.partition import FromFile, Partition, checked


def test_without_stages_a_client_has_a_single_one():
    partition = Partition(((0, 2), (1,)))
    assert partition.stages is None
    assert partition.reserved == ()
    assert partition.by_stage == (((0, 2),), ((1,),))
    images = image_set(2, 1)
    assert [counts.tolist() for counts in partition.stage_counts(images)] == [[[2, 0]], [[0, 1]]]


def test_what_clients_keep_for_calibration_is_dealt_to_them():
    given = Partition.in_stages([[[0, 3], [1]], [[2], [4, 5]]], reserved=[6])
    kept = replace(Partition.in_stages([[[0], [1]], [[2], [5]]], reserved=[6]), calibration=((3,), (4,)))
    assert given.deals(kept)
    assert given.deals(given)
    assert not given.deals(replace(kept, calibration=((), (4,))))
    assert not given.deals(replace(kept, calibration=((3,), (3, 4))))
    assert not given.deals(replace(kept, reserved=()))
    assert not given.deals(Partition.in_stages([[[0, 1], [3]], [[2], [4, 5]]], reserved=[6]))
    assert not given.deals(Partition.of_clients([[0, 1, 3]]))


def test_in_stages_orders_images_and_unites_them():
    partition = Partition.in_stages([[[5, 2], np.array([0])], [[4, 1]]], reserved=[7, 3])
    assert partition.stages == (((2, 5), (0,)), ((1, 4),))
    assert partition.by_stage == partition.stages
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
    for rows, stages in zip(counts, partition.stages, strict=True):
        for row, stage in zip(rows, stages, strict=True):
            by_hand = Counter(images.train[index].category for index in stage)
            assert [by_hand[category] for category in images.categories] == row.tolist()
    assert partition.counts(images).tolist() == [rows.sum(axis=0).tolist() for rows in counts]


@pytest.mark.parametrize(
    ("partition", "content"),
    [
        (Partition(((0, 2), (1,))), {"clients": [[0, 2], [1]]}),
        (Partition(((0,), (1,)), reserved=(3, 4)), {"clients": [[0], [1]], "reserved": [3, 4]}),
        (Partition.in_stages([[[0], [2]], [[1]]]), {"stages": [[[0], [2]], [[1]]]}),
        (Partition.in_stages([[[2], [0]]], [1, 3]), {"stages": [[[2], [0]]], "reserved": [1, 3]}),
        (
            Partition.in_stages([[[2], [0]]], schedule="literal"),
            {"stages": [[[2], [0]]], "schedule": "literal"},
        ),
    ],
)
def test_what_a_file_holds(tmp_path, partition, content):
    file = tmp_path / "new" / "p.json"
    partition.save(file)
    assert json.loads(file.read_text()) == content
    assert Partition.load(file) == partition
    assert FromFile(file)(image_set(5), 0) == partition


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
        ({"stages": [[[0]]], "reserved": [2, 2]}, "image 2 is listed for the server .* again for the server"),
        ({"stages": [[[0]]], "reserved": [5]}, r"the server \(reserved\) lists image 5.* 0 to 4"),
        ({"stages": [[[0]]], "reserved": 3}, "reserved is not a list of whole numbers"),
        (
            {"clients": [[0]], "calibration": [[True]]},
            "calibration of client 0 is not a list of whole numbers",
        ),
        ({"clients": [[0]], "calibration": [[1], [2]]}, "calibration is not one list a client"),
        ({"clients": [[0]], "calibration": "1"}, "calibration is not one list a client"),
    ],
)
def test_from_file_faults_are_one_line(tmp_path, content, message):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(content))
    with refusal(message) as caught:
        FromFile(path)(image_set(5), 0)
    assert str(path) in str(caught.value)


def test_from_file_checks_the_number_of_clients(tmp_path):
    path = tmp_path / "p.json"
    path.write_text("[[0], [1]]")
    with pytest.raises(UserError, match="holds 2 clients, expected 3"):
        FromFile(path, clients=3)(image_set(5), 0)


def test_from_file_missing_or_not_json(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        FromFile(tmp_path / "none.json")(image_set(5), 0)
    (tmp_path / "bad.json").write_text("[[0,")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        FromFile(tmp_path / "bad.json")(image_set(5), 0)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        FromFile(tmp_path / "binary.json")(image_set(5), 0)


@pytest.mark.parametrize(
    ("dealt", "said"),
    [
        ([[0, 1], [2]], "mine returns a list, no Partition"),
        (None, "mine returns a NoneType, no Partition"),
        (
            Partition.of_clients([[0, 1], [1, 2]]),
            "mine: image 1 is listed for client 0 and again for client 1;",
        ),
        (Partition.in_stages([[[0], [1]], [[2]]], reserved=[2]), "mine: image 2 is listed for"),
        (Partition.of_clients([[0], [3]]), "mine: client 1 lists image 3, but .* has images 0 to 2;"),
        (Partition.of_clients([[0], [-1]]), "mine: client 1 lists image -1,"),
    ],
)
def test_a_partition_of_any_strategy_deals_each_image_once(dealt, said):
    with pytest.raises(UserError, match=said):
        checked(dealt, image_set(2, 1), "mine")
