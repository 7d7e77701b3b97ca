"""What a site has given to sums and to runs holds over all runs, whatever their numbers, seeds and settings."""

import pytest

from lit_fedad.core.errors import UserError
from lit_fedad.sites.claims import Claims
from lit_fedad.sites.refusals import Code, RefusalError

ALL, FEWER = ["east", "north", "south"], ["east", "south"]
ROUND = (0, 0, "moments")


@pytest.fixture
def claims(tmp_path):
    claims = Claims(tmp_path / "runs.jsonl")
    claims.claim("a", "images", ROUND, ALL)
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
        claims.claim(run, "images", place, sites)
    assert refused.value.code is Code.CLAIMED


def test_the_same_sites_and_other_images_and_noise_are_answered(claims):
    claims.claim("a", "images", ROUND, ALL[::-1])  # after a coordinator has gone back to its checkpoint
    claims.claim("a", "images", (1, 0, "train"), FEWER)  # a site dropped out of a later round
    claims.claim("b", "images", ROUND, ALL)
    claims.claim("c", "others", ROUND, FEWER)
    claims.claim("d", "images", ROUND, FEWER, noised=True)
    with pytest.raises(RefusalError):  # the round in which a site dropped out of another run
        claims.claim("b", "images", (1, 0, "train"), ALL)


def test_a_run_has_one_configuration_and_runs_without_noise_are_few(claims):
    claims.begin("a", "configuration", "images", noised=False, most=2)
    claims.begin("a", "configuration", "images", noised=False, most=1)
    with pytest.raises(RefusalError) as refused:
        claims.begin("a", "another", "images", noised=False, most=2)
    assert refused.value.code is Code.REUSED
    claims.begin("b", "configuration", "images", noised=True, most=1)
    with pytest.raises(RefusalError, match="has answered in 1 runs without noise"):
        claims.begin("c", "configuration", "images", noised=False, most=1)


@pytest.mark.parametrize(
    ("training", "few"),
    [(range(60), 0), (range(50), 0), (range(30, 60), 0), (range(59), 1), (range(57), 3), (range(1, 61), 1)],
)
def test_sums_of_two_runs_differ_by_many_images_or_none(tmp_path, training, few):
    """Whatever share and seed hold out for calibration, the difference would be that of the images between them."""
    claims = Claims(tmp_path / "runs.jsonl")
    claims.begin("a", "one", "images", False, 20, range(60), 5)
    claims.begin("noised", "two", "images", True, 20, training, 5)
    claims.begin("others", "three", "other images", False, 20, training, 5)
    if not few:
        claims.begin("b", "four", "images", False, 20, training, 5)
        return
    with pytest.raises(RefusalError, match=f"would be of {few} images, and its policy asks for 5"):
        claims.begin("b", "four", "images", False, 20, training, 5)


@pytest.mark.parametrize(
    "change", [lambda lines: lines[1:], lambda lines: [lines[0].replace("east", "west"), *lines[1:]]]
)
def test_a_log_that_was_changed_is_none(claims, change):
    claims.claim("a", "images", (1, 0, "train"), ALL)
    lines = claims.log.file.read_text().splitlines(keepends=True)
    claims.log.file.write_text("".join(change(lines)) + " ")
    with pytest.raises(UserError, match="the file was changed"):
        Claims(claims.log.file).claim("a", "images", (2, 0, "train"), ALL)


def test_a_line_that_a_crash_cut_off_is_written_again(claims):
    with claims.log.file.open("a") as file:
        file.write('{"entry": 2, "run"')
    again = Claims(claims.log.file)
    again.claim("a", "images", (1, 0, "train"), FEWER)
    assert len(Claims(claims.log.file).log.entries()) == 2
