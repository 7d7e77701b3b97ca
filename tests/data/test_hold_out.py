"""Images that clients hold out for calibration: how many, of what, and what stays together."""

from pathlib import Path

import pytest

from lit_fedad.core.errors import UserError
from lit_fedad.data.hold_out import hold_out, image_groups
from lit_fedad.data.labelled import LabelledImage
from lit_fedad.data.partition import FromFile, Partition
from lit_fedad.data.sample import ImageSet, Sample


def images(*numbers):
    train = tuple(
        Sample(Path(f"/data/p{product}/patient{n // 3}_{n}.png"), f"p{product}")
        for product, count in enumerate(numbers)
        for n in range(count)
    )
    return ImageSet("drawn", train, ())


def everyone(partition):
    return [sorted((*own, *kept)) for own, kept in zip(partition.clients, partition.calibration, strict=True)]


def test_a_share_of_every_product_is_held_out():
    held = hold_out(Partition((tuple(range(40)), tuple(range(40, 60)))), images(30, 30), 0.2, seed=0)
    assert [len(own) for own in held.calibration] == [8, 4]
    assert sum(index < 30 for index in held.calibration[0]) == 6
    assert everyone(held) == [list(range(40)), list(range(40, 60))]


@pytest.mark.parametrize(("number", "held"), [(7, 1), (8, 2), (12, 2), (13, 3)])
def test_the_share_is_rounded_to_the_nearest_number_of_images(number, held):
    """A fifth of them: 1.4, 1.6, 2.4 and 2.6."""
    found = hold_out(Partition((tuple(range(number)),)), images(number), 0.2, seed=0)
    assert len(found.calibration[0]) == held


def test_images_that_are_there_from_the_start_come_in_no_stages_afterwards():
    whole = Partition((tuple(range(10)), tuple(range(10, 20))), reserved=(20, 21))
    held = hold_out(whole, images(22), 0.2, seed=0)
    assert held.stages is None
    assert held.reserved == (20, 21)
    assert whole.deals(held)


def test_a_client_with_few_images_holds_more_of_them_out():
    whole = Partition((tuple(range(60)), tuple(range(60, 80)), tuple(range(80, 90))))
    held = hold_out(whole, images(90), 0.2, seed=0, least=9)
    assert [len(own) for own in held.calibration] == [12, 9, 5]  # a fifth; nine; a half


def test_the_seed_draws_and_nothing_else_does():
    whole = Partition((tuple(range(40)),))
    first, again, other = (hold_out(whole, images(40), 0.2, seed) for seed in (0, 0, 1))
    assert first == again
    assert first.calibration != other.calibration


def test_every_product_keeps_an_image_in_training():
    held = hold_out(Partition((tuple(range(4)),)), images(1, 1, 2), 0.9, seed=0)
    assert len(held.calibration[0]) == 1
    assert held.calibration[0][0] in (2, 3)


def test_images_of_a_group_stay_together():
    held = hold_out(Partition((tuple(range(60)),)), images(60), 0.25, 0, group=r"patient\d+_")
    assert len(held.calibration[0]) == 15
    for start in range(0, 60, 3):
        assert len({start, start + 1, start + 2} & set(held.calibration[0])) in (0, 3)


@pytest.mark.parametrize("share", [0.2, 0.9])
@pytest.mark.parametrize(
    "whole",
    [
        Partition((tuple(range(120)),)),  # patients with two products
        Partition((tuple(range(0, 120, 2)), tuple(range(1, 120, 2)))),  # and at two clients
        Partition.in_stages([[range(0, 120, 2), range(1, 120, 2)]], schedule="literal"),
    ],
    ids=["products", "clients", "stages"],
)
def test_a_group_trains_everywhere_or_nowhere(whole, share):
    """Whoever has seen a patient has not calibrated with it, whichever product, client or stage shows it."""
    held = hold_out(whole, images(60, 60), share, 0, group=r"patient\d+_")
    kept = {index % 60 // 3 for own in held.calibration for index in own}
    training = {index % 60 // 3 for own in held.clients for index in own}
    assert kept
    assert not kept & training
    assert sum(map(len, held.calibration)) == pytest.approx(120 * share, abs=6)
    assert everyone(held) == [sorted(own) for own in whole.clients]


def test_stages_hold_out_images_of_their_own():
    staged = Partition.in_stages([[range(20), range(20, 40)], [range(40, 60)]], schedule="literal")
    held = hold_out(staged, images(20, 20, 20), 0.2, seed=0)
    assert [[len(stage) for stage in own] for own in held.stages] == [[16, 16], [16]]
    assert [len(own) for own in held.calibration] == [8, 4]
    assert held.schedule == "literal"


def test_no_share_holds_nothing_out_and_a_file_that_does_is_kept(tmp_path):
    whole = Partition((tuple(range(10)),))
    assert hold_out(whole, images(10), 0, seed=0) == whole
    held = hold_out(whole, images(10), 0.3, seed=0)
    held.save(tmp_path / "partition.json")
    again = FromFile(tmp_path / "partition.json")(images(10), seed=5)
    assert again == held
    assert hold_out(again, images(10), 0.9, seed=7) == held


def test_an_image_that_trains_cannot_calibrate(tmp_path):
    Partition(((0, 1), (2,)), calibration=((), (1,))).save(tmp_path / "partition.json")
    with pytest.raises(
        UserError, match="image 1 is listed for client 0 and again for client 1 .calibration."
    ):
        FromFile(tmp_path / "partition.json")(images(3), seed=0)


@pytest.mark.parametrize("root", ["/backup1/set", "set", "/"])
def test_groups_do_not_depend_on_where_the_set_lies(root):
    names = ("good/p7_0.png", "good/p7_1.png", "good/p8_0.png")
    samples = [Sample(Path(root, name), "set") for name in names]
    assert image_groups(samples, r"p\d+") == ["p7", "p7", "p8"]


def test_groups_may_be_named_above_all_images_and_one_group_is_told():
    samples = [Sample(Path(f"/clinic3/{number}.png"), "set") for number in range(2)]
    with pytest.warns(UserWarning, match="finds 'clinic3' in each of 2 paths, such as /clinic3/0.png"):
        assert image_groups(samples, r"clinic\d+") == ["clinic3"] * 2


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ("(", "is no regular expression"), ("(" * 900, "is no regular expression"),
        ("a{4294967296}", "is no regular expression"), ("lot", "is not found in /data/p0/patient0_0.png"),
        ("x" * 1001, "of at most 1000 characters"), (5, "give a regular expression"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("share", [0, 0.5])
def test_groups_that_are_none_are_refused(group, said, share):
    with pytest.raises(UserError, match=said):
        hold_out(Partition((tuple(range(3)),)), images(3), share, 0, group)
    with pytest.raises(UserError, match="these images are no files; leave it out"):
        image_groups([LabelledImage("cat")], "c")
    with pytest.raises(UserError, match=r"^partition\.group='c': .* no files; give another partition$"):
        image_groups([LabelledImage("cat")], "c", "partition.group")


def test_an_expression_that_is_searched_for_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("lit_fedad.data.hold_out._MAX_SECONDS", 0.1)
    with pytest.raises(UserError, match="is still searched for after"):
        hold_out(Partition((tuple(range(3)),)), images(3), 0.5, 0, r"([\w/.]+)+ ")
