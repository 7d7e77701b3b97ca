"""What a site has given to sums and to runs holds over all runs, whatever their numbers, seeds and settings."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from lit_fedad.core.errors import UserError
from lit_fedad.sites.claims import Claims, TrainingImages
from lit_fedad.sites.refusals import Code, RefusalError

ALL, FEWER = ["east", "north", "south"], ["east", "south"]
ROUND = (0, 0, "moments")


@pytest.fixture
def claims(tmp_path):
    claims = Claims(tmp_path / "runs.jsonl")
    for run, images in (("a", ["one", "two"]), ("b", ["two", "three"]), ("c", ["four"])):
        claims.begin(run, "configuration", False, 20, TrainingImages({"": images}))
    claims.claim("a", ROUND, ALL)
    return Claims(tmp_path / "runs.jsonl")  # the site was started anew


@pytest.mark.parametrize(
    ("run", "place", "sites"),
    [
        ("a", ROUND, FEWER),
        ("b", ROUND, FEWER),
        ("b", (0, 1, "moments"), FEWER),
        ("b", (3, 0, "statistics"), FEWER),
        ("b", (-1, 0, "moments"), [*ALL, "west"]),
    ],
)
def test_no_two_sums_differ_by_a_site(claims, run, place, sites):
    with pytest.raises(RefusalError) as refused:
        claims.claim(run, place, sites)
    assert refused.value.code is Code.CLAIMED


def test_the_same_sites_and_other_images_and_noise_are_answered(claims):
    claims.claim("a", ROUND, ALL[::-1])  # after a coordinator has gone back to its checkpoint
    claims.claim("a", (1, 0, "train"), FEWER)  # a site dropped out of a later round
    claims.claim("b", ROUND, ALL)
    claims.claim("c", ROUND, FEWER)  # of images that are in no other run
    claims.claim("d", ROUND, FEWER, noised=True)
    claims.claim("b", (2, 0, "train"), ALL)
    with pytest.raises(RefusalError):  # the round in which a site dropped out of another run
        claims.claim("b", (1, 0, "train"), ALL)


@pytest.mark.parametrize("run", ["a", "c"])
def test_the_same_message_goes_to_no_sum_of_other_sites(claims, run):
    """A coordinator has a site start from its first state again, in a later round."""
    claims.claim("a", (1, 0, "moments"), ALL, message="means")
    claims.claim(run, (2, 0, "moments"), ALL, message="means")
    claims.claim(run, (3, 0, "moments"), FEWER, message="other means")
    for _ in range(2):  # of what tells nothing any sum
        claims.claim(run, (4, 0, "moments"), FEWER)
    with pytest.raises(RefusalError) as refused:
        claims.claim(run, (5, 0, "moments"), FEWER, message="means")
    assert refused.value.code is Code.CLAIMED


def test_an_invitation_is_accepted_once_over_all_runs(claims):
    claims.invite("a", "one")
    claims.invite("a", "other")
    with pytest.raises(RefusalError) as refused:
        Claims(claims.log.file).invite("b", "one")
    assert refused.value.code is Code.INVITED


def test_sites_are_told_apart_where_an_older_version_noted_no_images(claims):
    claims.log.append(run="old", configuration="configuration", noised=False)
    with pytest.raises(RefusalError):
        claims.claim("old", ROUND, FEWER)


def test_a_run_has_one_configuration_and_runs_without_noise_are_few(tmp_path):
    claims = Claims(tmp_path / "new" / "runs.jsonl")
    claims.begin("d", "configuration", noised=False, max_runs=2)
    claims.begin("d", "configuration", noised=False, max_runs=1)
    with pytest.raises(RefusalError) as refused:
        claims.begin("d", "another", noised=False, max_runs=2)
    assert refused.value.code is Code.REUSED
    claims.begin("b", "configuration", noised=True, max_runs=1)
    claims.answer("d", (1, 0, "play"), "message")
    with pytest.raises(RefusalError, match="has answered in 1 runs without noise"):
        claims.begin("c", "configuration", noised=False, max_runs=1)
    claims.begin("c", "configuration", noised=False, max_runs=2)


IMAGES = [f"{number:02d}" for number in range(70)]


def together(images):
    return TrainingImages({"": images})


def apart(images):
    """Five products, whose sums are told apart."""
    return TrainingImages(
        {product: [image for image in images if int(image) % 5 == product] for product in range(5)}
    )


@pytest.mark.parametrize(
    ("training", "sets", "few"),
    [
        (IMAGES[:60], together, 0), (IMAGES[:50], together, 0), (IMAGES[:65], together, 0),
        (IMAGES[60:], together, 0), (IMAGES[:59], together, 1), (IMAGES[:57], together, 3),
        (IMAGES[1:61], together, 1), (IMAGES[:61], together, 1),
        (IMAGES[:60] + IMAGES[:1], together, 1), (IMAGES[:60] + IMAGES[:2] * 2 + IMAGES[2:5], together, 2),
        (IMAGES[:60] * 2, together, 0), (IMAGES[:60] + IMAGES[:5], together, 0),
        (IMAGES[:50], apart, 2), (IMAGES[5:60], apart, 1), (IMAGES[:35], apart, 0),
    ],
)  # fmt: skip
def test_sums_of_two_runs_differ_by_many_images_or_none(tmp_path, training, sets, few):
    """Whether share, seed or new images differ, the difference of two sums is over the images in one sum alone.

    Of images that were removed since, the log knows the products.
    """
    claims = Claims(tmp_path / "runs.jsonl")
    claims.begin("a", "one", False, 20, sets(IMAGES[:60]), 5)
    claims.begin("noised", "two", True, 20, together(training), 5)
    if not few:
        claims.begin("b", "four", False, 20, sets(training), 5)
        return
    with pytest.raises(RefusalError, match=f"would be of {few} images, and its policy asks for 5"):
        claims.begin("b", "four", False, 20, sets(training), 5)


def test_a_run_goes_on_with_the_images_that_it_began_with(tmp_path):
    """This holds even if its states were removed."""
    claims = Claims(tmp_path / "runs.jsonl")
    for _ in range(2):
        claims.begin("a", "one", False, 20, together(IMAGES[:60]), 5)
    with pytest.raises(RefusalError) as refused:
        claims.begin("a", "one", False, 20, together(IMAGES[:59]), 5)
    assert refused.value.code is Code.IMAGES


def test_a_run_whose_noise_hides_nothing_any_more_is_counted(tmp_path):
    claims = Claims(tmp_path / "runs.jsonl")
    claims.begin("a", "one", True, 0, together(IMAGES[:60]), 5)
    with pytest.raises(RefusalError) as refused:
        claims.begin("a", "one", False, 0, together(IMAGES[:60]), 5)
    assert refused.value.code is Code.RUNS


@pytest.mark.parametrize(
    ("last", "few"), [(range(5, 10), 1), (range(3), 2), (range(5, 11), 0), (range(20, 25), 0)]
)
def test_sums_of_many_runs_tell_of_many_images_together(tmp_path, last, few):
    """Any two of all, all but 0 to 10, 0 to 4 and 5 to 9 differ by five or more; all four together tell image 10."""
    claims = Claims(tmp_path / "runs.jsonl")
    without = [range(0), range(11), range(5), last]
    trained = [together([image for place, image in enumerate(IMAGES) if place not in out]) for out in without]
    for number, own in enumerate(trained[:3]):
        claims.begin(str(number), "one", False, 20, own, 5)
    if not few:
        claims.begin("last", "one", False, 20, trained[3], 5)
        return
    with pytest.raises(RefusalError, match=f"would be of {few} images"):
        claims.begin("last", "one", False, 20, trained[3], 5)


def test_a_run_that_reveals_no_new_sum_of_few_images_is_let_in(tmp_path):
    """Few images that are a sum of their own, copies that all sums count alike, one run of means; a policy of one."""
    claims = Claims(tmp_path / "runs.jsonl")
    training = TrainingImages({"few": IMAGES[:3], "copies": IMAGES[10:20] + IMAGES[10:12]})
    means, others = replace(training, groups="seed 0"), replace(training, groups="seed 1")
    for run, (own, least) in enumerate([(training, 5), (means, 5), (training, 5), (others, 1)]):
        claims.begin(str(run), "one", False, 20, own, least)
    with pytest.raises(RefusalError) as refused:
        claims.begin("last", "one", False, 20, others, 2)
    assert refused.value.code is Code.GROUPS


def test_mean_images_are_of_the_same_groups_in_all_runs(tmp_path):
    claims = Claims(tmp_path / "runs.jsonl")
    claims.begin("a", "one", False, 20, TrainingImages({"": IMAGES[:20]}, "seed 0"), 5)
    claims.begin("b", "two", False, 20, TrainingImages({"": IMAGES[:20]}, "seed 0"), 5)
    claims.begin("c", "three", False, 20, TrainingImages({"": IMAGES[30:]}, "seed 1"), 5)  # of other images
    for training in (
        TrainingImages({"": IMAGES[:20]}, "seed 1"),
        TrainingImages({"": IMAGES[:30]}, "seed 0"),
    ):
        with pytest.raises(RefusalError) as refused:
            claims.begin("d", "four", False, 20, training, 5)
        assert refused.value.code is Code.GROUPS


@pytest.mark.parametrize(
    "change", [lambda lines: lines[1:], lambda lines: [*lines[:-1], lines[-1].replace("east", "west")]]
)
def test_a_log_that_was_changed_is_none(claims, change):
    claims.claim("a", (1, 0, "train"), ALL)
    lines = claims.log.file.read_text().splitlines(keepends=True)
    claims.log.file.write_text("".join(change(lines)) + " ")
    with pytest.raises(UserError, match="the file was changed"):
        Claims(claims.log.file).claim("a", (2, 0, "train"), ALL)


def test_a_line_that_a_crash_cut_off_is_written_again(claims):
    with claims.log.file.open("a") as file:
        file.write('{"entry": 2, "run"')
    again = Claims(claims.log.file)
    again.claim("a", (1, 0, "train"), FEWER)
    assert len(Claims(claims.log.file).log.entries()) == 5


def test_a_line_costs_no_reading_of_the_lines_before(claims, monkeypatch):
    claims.log.entries()
    monkeypatch.setattr(Path, "read_bytes", None)
    monkeypatch.setattr(
        os, "open", lambda *given, to=os.open: to(given[0], given[1] & ~os.O_RDWR | os.O_WRONLY, 0o600)
    )
    for run in "def":
        claims.log.append(run=run)
    monkeypatch.undo()
    assert [line["run"] for line in Claims(claims.log.file).log.entries()[-3:]] == [*"def"]
